"""What the kernels share: how work is cut. All of it is worked out while a kernel is built."""

import nki.language as nl  # pyright: ignore[reportMissingImports]

PARTITIONS = 128
# Shorter runs leave DMA bandwidth unused: 97 % of the rate at 4 KiB, 81 % at 2 KiB, 10 % at 256 B.
FULL_RATE_RUN_BYTES = 4096
# Tokens that a partition holds of one tile: enough for long runs, and few enough that tiles of any input fit SBUF.
MOST_ROWS = 64


def item_bytes(dtype):
    """Bytes of one element of the float types that the kernels take."""
    return 4 if dtype == nl.float32 else 2


def core_count():
    """On how many cores the kernel was launched: 2 for `kernel[2]`."""
    return nl.num_programs(0) if nl.program_ndim() > 0 else 1


def core_number():
    """Which of them runs this."""
    return nl.program_id(0) if nl.program_ndim() > 0 else 0


def core_share(rows):
    """(first row, number of rows) that this core works on.

    Both cores must run the same instructions, so both get as many rows; of an odd number they share the middle one,
    and write the same values there.
    """
    count = (rows + core_count() - 1) // core_count()
    return core_number() * (rows - count), count


def token_tiles(tokens):
    """Cuts tokens into tiles of (first token, partitions, consecutive tokens a partition).

    All but the last few tokens fill 128 partitions; those few get a partition each.
    """
    tiles, start = [], 0
    while tokens - start >= PARTITIONS:
        rows = min((tokens - start) // PARTITIONS, MOST_ROWS)
        tiles.append((start, PARTITIONS, rows))
        start += PARTITIONS * rows
    if start < tokens:
        tiles.append((start, tokens - start, 1))
    return tiles
