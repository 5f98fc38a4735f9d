"""KV cache update: one DMA a pool, from HBM to HBM, at an offset that the device reads from memory."""

import nki  # pyright: ignore[reportMissingImports]
import nki.isa as nisa  # pyright: ignore[reportMissingImports]
import nki.language as nl  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.common import FULL_RATE_RUN_BYTES, PARTITIONS, core_count, core_number, item_bytes


@nki.jit
def update_cache(k_pool, v_pool, k, v, slot):
    """Writes one block's keys and values into slot `slot` of the pools, in place; on two cores, one pool each.

    Args:
        k_pool, v_pool: [P, B, N, S, D] in HBM, changed in place: donate them.
        k, v: [B, N, S, D], dtype of the pools.
        slot: int32 [1, 1], at least 0 and below P; a DMA beyond the pool is a run time error.

    Returns:
        (k_pool, v_pool), the tensors that came in.
    """
    at = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=at, src=slot)
    if core_number() == 0:
        _write_block(k_pool, k, at)
    if core_number() == core_count() - 1:
        _write_block(v_pool, v, at)
    return k_pool, v_pool


def _write_block(pool, block, at):
    assert pool.shape[1:] == block.shape, f"block {block.shape} must have the shape of a slot, {pool.shape[1:]}"
    assert pool.dtype == block.dtype, f"block {block.dtype} must have the dtype of the pool, {pool.dtype}"
    rows = _dma_rows(block.size, item_bytes(block.dtype))
    run = block.size // rows
    nisa.dma_copy(
        dst=pool.ap(pattern=[[run, rows], [1, run]], offset=0, scalar_offset=at, indirect_dim=0),
        src=block.reshape((rows, run)),
    )


def _dma_rows(elements, size):
    """Into how many rows a dense block is cut: as many as the DMA queues can share at full rate."""
    for rows in range(PARTITIONS, 1, -1):
        if elements % rows == 0 and elements // rows * size >= FULL_RATE_RUN_BYTES:
            return rows
    return 1
