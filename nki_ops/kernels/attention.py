"""Attention over key blocks that a table names: the kernel, its loops over heads and queries.

attention_keys.py brings a head's keys and values onto the chip, attention_softmax.py weighs them.
"""

from typing import Any

import nki  # pyright: ignore[reportMissingImports]
import nki.isa as nisa  # pyright: ignore[reportMissingImports]
import nki.language as nl  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.attention_keys import allocate_keys, load_head
from nki_ops.kernels.attention_softmax import BANK, largest_of_all, set_shift, weigh_online, weigh_shifted
from nki_ops.kernels.common import PARTITIONS, core_share


class Queries(nl.NKIObject):
    """The tile of one head's queries that is at work: sub-tiles of equally many queries.

    Attributes:
        columns: [D, sub-tiles, queries], Q^T.
        bias: float32 [128, places], what is added to the scores of a place's keys.
        at: int32 [1, sub-tiles], the sub-tiles' first rows in q as [B * T * N, D].
        reached: float32 [1, sub-tiles], first rows of the tile last loaded, counted from the first query's.
        origin: float32 [1, sub-tiles], the row of the first query.
    """

    columns: Any
    bias: Any
    at: Any
    reached: Any
    origin: Any


@nki.jit
def attention(q, table, n_valid, k0, v0, k1=None, v1=None, k2=None, v2=None, variant="shift", row_sums=False):
    """Softmax attention of every query over the key blocks that `table` names; scores are scaled by 1 / sqrt(D).

    The blocks are read where they lie. A place's DMA is issued for every pool, within the pool's own bounds: the one
    pool that the block is in moves data, the others are skipped. Places from n_valid on are never read, but take as
    long as the others. On two cores each takes half of the queries.

    Variant "shift" subtracts no row maximum but one shift for up to 512 queries, max(0, bound - 70), where the bound
    is the largest |q| times the largest |k| over sqrt(D). It cannot overflow. A row whose largest score lies more than
    139 below the bound has a sum of weights below 1e-30; from 158 on it comes out infinite or NaN.
    Variant "online" keeps the maximum of every row, at about half of the speed, and has no such limit.

    Args:
        q: [B, T, N, D] queries, normed and rotated; float32 or bfloat16, D up to 128.
        table: int32 [places], numbers of blocks, counted through all pools in order; the valid ones first. Numbers
            beyond the last block mean that one, as in XLA.
        n_valid: int32 [1], how many entries count, at least 1.
        k0, v0, k1, v1, k2, v2: one to three pools [P, B, N, S, D] of keys and values, in the dtype of q.
        variant: "shift" or "online".
        row_sums: for debugging: return the sums of the rows' weights too.

    Returns:
        [B, T, N, D] in the dtype of q; with row_sums also float32 [B, T, N].
    """
    pools = [(k0, v0)]
    for k, v in ((k1, v1), (k2, v2)):
        if k != None:  # noqa: E711  (the kernel language has no `is`)
            pools.append((k, v))
    _check(q, pools, variant)
    batch, tokens, heads, dim = q.shape
    block_tokens, scale = k0.shape[3], dim**-0.5
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    outputs = [out]
    if row_sums:
        outputs.append(nl.ndarray((batch, tokens, heads), nl.float32, buffer=nl.shared_hbm))

    first, count = core_share(tokens)
    n_tiles, sub_tiles, queries = query_tiles(count)
    rows_a_tile = sub_tiles * queries * heads
    last_row = (count - queries) * heads
    keys = allocate_keys(table, n_valid, pools)
    state = _allocate_queries(q, keys, sub_tiles, queries)
    shifted = variant == "shift"
    if not shifted:
        nisa.tensor_copy(dst=state.bias, src=keys.mask)

    def one_head(head):
        load_head(keys, pools)
        k_peak = largest_of_all(keys.peak)
        nisa.iota(dst=state.reached, pattern=[[queries * heads, sub_tiles]])
        _find_rows(state.at, state, last_row)
        arrived = _load_queries(q, state.at, queries)
        _transpose_queries(state.columns, arrived)
        if shifted:
            set_shift(state, arrived, keys, k_peak, scale)

        def one_tile(tile):
            # The next tile's queries arrive while this one is at work; after the last tile, its own once more.
            nisa.tensor_scalar(dst=state.reached, data=state.reached, op0=nl.add, operand0=1.0 * rows_a_tile)
            ahead = nl.ndarray((1, sub_tiles), nl.int32, buffer=nl.sbuf)
            _find_rows(ahead, state, last_row)
            arriving = _load_queries(q, ahead, queries)
            if shifted:
                _finish(outputs, weigh_shifted(state, keys, block_tokens, scale), state.at)
                set_shift(state, arriving, keys, k_peak, scale)
            else:
                _finish(outputs, weigh_online(state, keys, block_tokens, scale), state.at)
            _transpose_queries(state.columns, arriving)
            nisa.tensor_copy(dst=state.at, src=ahead)

        nl.fori_loop(0, n_tiles, one_tile)
        nisa.tensor_scalar(dst=state.origin, data=state.origin, op0=nl.add, operand0=1.0)

    for b in range(batch):
        nisa.memset(dst=state.origin, value=1.0 * (b * tokens + first) * heads)
        nl.fori_loop(0, heads, one_head)
    return (outputs[0], outputs[1]) if row_sums else out


def _check(q, pools, variant):
    batch, tokens, heads, dim = q.shape
    assert variant in ("shift", "online"), f'variant must be "shift" or "online", is {variant}'
    assert q.dtype in (nl.float32, nl.bfloat16), f"queries must be float32 or bfloat16, are {q.dtype}"
    assert dim <= PARTITIONS, f"head dim {dim} exceeds {PARTITIONS}"
    assert batch * tokens * heads < 2**24, f"queries {q.shape} have too many rows to count them in float32"
    block = (batch, heads, pools[0][0].shape[3], dim)
    for pool in pools:
        assert pool[0].shape == pool[1].shape, f"values {pool[1].shape} must have the shape of keys {pool[0].shape}"
        for x in pool:
            assert x.shape[1:] == block, f"pool {x.shape} must hold blocks {block} for queries {q.shape}"
            assert x.dtype == q.dtype, f"pool of {x.dtype} must have the dtype of the queries, {q.dtype}"


def query_tiles(count):
    """(tiles, sub-tiles a tile, queries a sub-tile): up to 512 queries a tile and 128 a sub-tile, evenly cut.

    The last sub-tiles may reach beyond the end; they are moved back, and the overlap is computed twice.
    """
    tiles = (count + BANK - 1) // BANK
    sub_tiles = ((count + tiles - 1) // tiles + PARTITIONS - 1) // PARTITIONS
    return tiles, sub_tiles, (count + tiles * sub_tiles - 1) // (tiles * sub_tiles)


# ---- queries in, results out


def _allocate_queries(q, keys, sub_tiles, queries):
    return Queries(
        columns=nl.ndarray((q.shape[3], sub_tiles, queries), q.dtype, buffer=nl.sbuf),
        bias=nl.ndarray(keys.mask.shape, nl.float32, buffer=nl.sbuf),
        at=nl.ndarray((1, sub_tiles), nl.int32, buffer=nl.sbuf),
        reached=nl.ndarray((1, sub_tiles), nl.float32, buffer=nl.sbuf),
        origin=nl.ndarray((1, sub_tiles), nl.float32, buffer=nl.sbuf),
    )


def _find_rows(at, state, last_row):
    """Rows of q at which the sub-tiles begin, none beyond the last possible one."""
    nisa.scalar_tensor_tensor(
        dst=at, data=state.reached, op0=nl.minimum, operand0=1.0 * last_row, op1=nl.add, operand1=state.origin
    )


def _load_queries(q, at, queries):
    """[queries, sub-tiles, D] of one head."""
    heads, dim = q.shape[2], q.shape[3]
    x = nl.ndarray((queries, at.shape[1], dim), q.dtype, buffer=nl.sbuf)
    for i in range(at.shape[1]):
        rows = q.ap([[heads * dim, queries], [1, dim]], 0, scalar_offset=at[:, i : i + 1], indirect_dim=2)
        nisa.dma_copy(dst=x[:, i, :], src=rows)
    return x


def _transpose_queries(columns, x):
    turned = nl.ndarray(columns.shape, x.dtype, buffer=nl.psum)
    for i in range(x.shape[1]):
        nisa.nc_transpose(dst=turned[:, i, :], data=x[:, i, :], engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=columns, src=turned)


def _finish(outputs, sums, at):
    """Divides by the sums of the weights and stores the rows where their queries were."""
    out = outputs[0]
    heads, dim = out.shape[2], out.shape[3]
    for i in range(len(sums)):
        queries, here = sums[i].shape[0], at[:, i : i + 1]
        inverse = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=sums[i][:, dim : dim + 1])
        y = nl.ndarray((queries, dim), out.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=y, data=sums[i][:, :dim], op0=nl.multiply, operand0=inverse)
        nisa.dma_copy(dst=out.ap([[heads * dim, queries], [1, dim]], 0, scalar_offset=here, indirect_dim=2), src=y)
        if len(outputs) > 1:
            total = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=total, src=sums[i][:, dim : dim + 1])
            rows = outputs[1].ap([[heads, queries], [1, 1]], 0, scalar_offset=here, indirect_dim=2)
            nisa.dma_copy(dst=rows, src=total)
