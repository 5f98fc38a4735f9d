"""Keys and values of one head on the chip: found through the block table, read in place, keys transposed."""

from typing import Any

import nki.isa as nisa  # pyright: ignore[reportMissingImports]
import nki.language as nl  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.common import MOST_ROWS, PARTITIONS, item_bytes, token_tiles

# Bias of a key that does not count: exp(-3e4) is 0. Its block is a valid one, so its score is finite.
MASKED = -3e4


class Keys(nl.NKIObject):
    """One head's keys and values, and where they come from.

    Attributes:
        columns: [D, places * S], K^T.
        values: [128, places * tiles, D + 1]; the last column is ones, so that P.V sums the rows of P too.
        tiles: key tiles of up to 128 keys in a block.
        mask: float32 [128, places], `MASKED` where a place does not count.
        rows: for every pool an int32 [1, places]: at which row of S keys the place's block begins; the row behind the
            pool's last block if it is in another pool.
        peak: float32 [128, 1], the largest squared norm of the keys in each partition.
    """

    columns: Any
    values: Any
    tiles: int
    mask: Any
    rows: Any
    peak: Any


def allocate_keys(table, n_valid, pools):
    """The on-chip memory for one head after the other, and the table as addresses."""
    k = pools[0][0]
    block_tokens, dim = k.shape[3], k.shape[4]
    places = table.size
    tiles = (block_tokens + PARTITIONS - 1) // PARTITIONS
    bytes_needed = places * (block_tokens + tiles * (dim + 1)) * item_bytes(k.dtype)
    work_bytes = 6 * min(tiles, MOST_ROWS) * dim * item_bytes(k.dtype)  # two blocks on their way in
    assert bytes_needed + work_bytes <= nl.tile_size.sbuf_fmax_bytes, (
        f"keys and values of one head need {bytes_needed} B and {work_bytes} B to load them of the "
        f"{nl.tile_size.sbuf_fmax_bytes} B of an SBUF partition: use bfloat16, fewer places or smaller blocks"
    )
    rows, mask = _read_table(table, n_valid, pools)
    values = nl.ndarray((PARTITIONS, places * tiles, dim + 1), k.dtype, buffer=nl.sbuf)
    nisa.memset(dst=values[:, :, dim : dim + 1], value=1.0)
    columns = nl.ndarray((dim, places * block_tokens), k.dtype, buffer=nl.sbuf)
    peak = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    return Keys(columns=columns, values=values, tiles=tiles, mask=mask, rows=rows, peak=peak)


def _read_table(table, n_valid, pools):
    """(rows, mask) of `Keys` for the first head. Places that do not count show the block of the first place."""
    places = table.size
    count = nl.ndarray((PARTITIONS, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=count, src=n_valid.reshape((1, 1)).broadcast(0, PARTITIONS))
    count32 = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=count32, src=count)
    place = nl.ndarray((PARTITIONS, places), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=place, pattern=[[1, places]])
    valid = nl.ndarray((PARTITIONS, places), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=valid, data=place, op0=nl.less, operand0=count32)
    mask = nl.ndarray((PARTITIONS, places), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=valid, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-MASKED)

    entries = nl.ndarray((1, places), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=entries, src=table.reshape((1, places)))
    blocks = nl.ndarray((1, places), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=blocks, src=entries)
    first = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=first, src=blocks[:, 0:1])
    nisa.scalar_tensor_tensor(
        dst=blocks, data=blocks, op0=nl.subtract, operand0=first, op1=nl.multiply, operand1=valid[0:1, :]
    )
    nisa.tensor_scalar(dst=blocks, data=blocks, op0=nl.add, operand0=first, op1=nl.maximum, operand1=0.0)
    total = 0
    for k, _ in pools:
        total += k.shape[0]
    nisa.tensor_scalar(dst=blocks, data=blocks, op0=nl.minimum, operand0=1.0 * (total - 1))

    rows, before = [], 0
    for k, _ in pools:
        rows.append(_rows_in_pool(blocks, before, k))
        before += k.shape[0]
    return rows, mask


def _rows_in_pool(blocks, before, pool):
    """Rows of the blocks of a pool that has `before` blocks before it; beyond its end for blocks of other pools."""
    size = pool.shape[0]
    block_rows = pool.shape[1] * pool.shape[2]
    assert (size + 1) * block_rows < 2**24, f"pool {pool.shape} has too many blocks to count them in float32"
    place = nl.ndarray(blocks.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=place, data=blocks, op0=nl.subtract, operand0=1.0 * before)
    behind = nl.ndarray(blocks.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=behind, data=place, op0=nl.greater_equal, operand0=0.0)
    inside = nl.ndarray(blocks.shape, nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=inside, data=place, op0=nl.less, operand0=1.0 * size, op1=nl.multiply, operand1=behind
    )
    nisa.scalar_tensor_tensor(
        dst=place, data=place, op0=nl.subtract, operand0=1.0 * size, op1=nl.multiply, operand1=inside
    )
    rows = nl.ndarray(blocks.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=rows, data=place, op0=nl.add, operand0=1.0 * size, op1=nl.multiply, operand1=1.0 * block_rows
    )
    return rows


def load_head(keys, pools):
    """Brings in the blocks of the head that `keys.rows` points at, and moves these on to the next head."""
    nisa.memset(dst=keys.peak, value=0.0)
    for place in range(keys.mask.shape[1]):
        for start, partitions, rows in token_tiles(pools[0][0].shape[3]):
            _load_part(keys, pools, place, start, partitions, rows)
    for rows in keys.rows:
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=1.0)


def _load_part(keys, pools, place, start, partitions, rows):
    """Keys start .. start + partitions * rows of one block; each partition gets `rows` consecutive ones."""
    block_tokens, dim = pools[0][0].shape[3], pools[0][0].shape[4]
    k = nl.ndarray((partitions, rows, dim), keys.values.dtype, buffer=nl.sbuf)
    v = nl.ndarray((partitions, rows, dim), keys.values.dtype, buffer=nl.sbuf)
    run = rows * dim
    mode = nisa.oob_mode.skip if len(pools) > 1 else nisa.oob_mode.error
    for i in range(len(pools)):
        here = keys.rows[i][:, place : place + 1]
        for target, source in ((k, pools[i][0]), (v, pools[i][1])):
            nisa.dma_copy(
                dst=target.reshape((partitions, run)),
                src=source.ap([[run, partitions], [1, run]], start * dim, scalar_offset=here, indirect_dim=2),
                oob_mode=mode,
            )
    tile = place * keys.tiles + start // PARTITIONS
    nisa.tensor_copy(dst=keys.values[:partitions, tile : tile + rows, :dim], src=v, engine=nisa.engine.gpsimd)
    _transpose_keys(keys, k, place * block_tokens + start)
    note_largest_norm(keys.peak, k)


def _transpose_keys(keys, k, column):
    """K^T by TensorE, as many tiles at a time as fit one PSUM bank."""
    partitions, rows, dim = k.shape
    at_once = nl.tile_size.psum_bank_fmax_bytes // (PARTITIONS * item_bytes(k.dtype))
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        bank = nl.ndarray((dim, count, partitions), k.dtype, buffer=nl.psum)
        for i in range(count):
            nisa.nc_transpose(dst=bank[:, i, :], data=k[:, row + i, :], engine=nisa.engine.tensor)
        here = nl.ds(column + row * partitions, count * partitions)
        nisa.tensor_copy(dst=keys.columns[:, here], src=bank, engine=nisa.engine.vector)


def note_largest_norm(peak, x):
    """peak = max(peak, largest squared norm of the rows x [partitions, rows, D]); roughly, in the dtype of x."""
    partitions, rows, dim = x.shape
    squares = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=squares, data1=x, data2=x, op=nl.multiply, engine=nisa.engine.gpsimd)
    norms = nl.ndarray((partitions, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=norms, op=nl.add, data=squares, axis=2)
    largest = nl.ndarray((partitions, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=norms, axis=1)
    nisa.tensor_tensor(dst=peak[:partitions, :], data1=peak[:partitions, :], data2=largest, op=nl.maximum)


def key_groups(keys, block_tokens, place, size):
    """Key tiles of a place in the order they are weighed, up to `size` at once.

    Returns:
        A list of (place, keys in a tile, tiles), each tile as (first column of K^T, tile of V).
    """
    groups = []
    for start, partitions, rows in token_tiles(block_tokens):
        for row in range(0, rows, size):
            tiles = []
            for i in range(row, min(row + size, rows)):
                column = place * block_tokens + start + i * partitions
                tiles.append((column, place * keys.tiles + start // PARTITIONS + i))
            groups.append((place, partitions, tiles))
    return groups
