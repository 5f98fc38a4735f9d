"""Arithmetic on strided layouts: what a view covers, and how it lies in memory. All strides are in elements."""

import math
from functools import lru_cache


@lru_cache(maxsize=65536)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


@lru_cache(maxsize=65536)
def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """(lowest, highest) element that a view touches, counted from its own offset."""
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)


@lru_cache(maxsize=65536)
def collapsed(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The view as the fewest (stride, count) pairs, outermost first; at least one pair."""
    pairs: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if pairs and pairs[-1][0] == stride * count:
            pairs[-1] = (stride, pairs[-1][1] * count)
        else:
            pairs.append((stride, count))
    return tuple(pairs) or ((1, 1),)


@lru_cache(maxsize=65536)
def contiguous_run(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements lie back to back before the first jump, walking the view in row-major order."""
    stride, count = collapsed(shape, strides)[-1]
    return count if stride == 1 else 1


@lru_cache(maxsize=65536)
def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of the same elements under another shape, or None where that needs a copy."""
    pairs = list(collapsed(shape, strides))
    new_strides: list[int] = []
    stride, left = pairs.pop()
    for size in reversed(new_shape):
        if size == 1:
            new_strides.append(stride)
            continue
        if left == 1 and pairs:
            stride, left = pairs.pop()
        if left % size:
            return None
        new_strides.append(stride)
        stride, left = stride * size, left // size
    return tuple(reversed(new_strides)) if left == 1 and not pairs else None


@lru_cache(maxsize=4096)
def pieces(elements: int, run_a: int, run_b: int) -> int:
    """Into how many pieces two layouts cut a stream of `elements`, one every `run_a`, the other every `run_b`."""
    return max(1, elements // run_a + elements // run_b - elements // math.lcm(run_a, run_b))


def divide_up(total: int, known: tuple[int, ...]) -> tuple[int, ...] | None:
    """`known` with its one -1 replaced so that the product is `total`; None if that does not come out."""
    if known.count(-1) > 1:
        return None
    rest = math.prod(n for n in known if n != -1)
    if -1 in known:
        if rest == 0 or total % rest:
            return None
        known = tuple(total // rest if n == -1 else n for n in known)
    return known if math.prod(known) == total and all(n > 0 for n in known) else None
