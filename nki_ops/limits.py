"""What the NKI kernels take, checked while a function is traced. Each rule says what is wrong, in numbers.

The kernels assert much of this themselves, but only when they are built, which is when a program is lowered; and what
does not fit the chip's memory, NKI's compiler finds later still.
"""

from collections.abc import Sequence
from typing import Any

from nki_ops.errors import KernelError
from nki_ops.simulator.accounting import SBUF_BYTES

PARTITIONS = 128
FLOATS = ("float32", "bfloat16")
MOST_PAIRS = 1024  # of channels in a head that is rotated; its table and a product must fit PSUM
MOST_ROWS = 64  # tokens of one tile in a partition
WORK_BYTES = 13 * 1024  # of an SBUF partition, for the products of one rotation
FLOAT32_INTEGERS = 2**24  # row numbers are counted in float32

Spec = Any  # an array or its abstract value: something with shape and dtype


def check_rms_norm_rope_3d(q: Spec, k: Spec, q_scale: Spec, k_scale: Spec, cos: Spec, sin: Spec) -> None:
    """Raises KernelError if the kernel cannot take these."""
    need = _Rules("rms_norm_rope_3d")
    need.floats(q=q, k=k)
    need(len(q.shape) == 3, f"q {q.shape} must be [B, T, C]")
    need(k.shape == q.shape and k.dtype == q.dtype, f"k {k.shape} {k.dtype} must be as q, {q.shape} {q.dtype}")
    _, tokens, channels = q.shape
    scales = (q_scale.shape, k_scale.shape)
    need(scales == ((channels,), (channels,)), f"norm scales {scales} must be as long as q has channels, {channels}")
    half = need.table(cos, sin)
    need(cos.shape[0] == tokens, f"the rotary table has {cos.shape[0]} rows for {tokens} tokens")
    need(channels % (2 * half) == 0, f"{channels} channels are no whole number of heads of {2 * half}")
    # In float32 both scales, and a row that is turned while the next is normed; and a row as it comes.
    row_bytes = channels * (16 + q.dtype.itemsize)
    need.memory(row_bytes + _table_bytes(tokens, half), f"{channels} channels and {half} pairs a head")


def check_rotate(x: Spec, cos: Spec, sin: Spec) -> None:
    """Raises KernelError if the kernel cannot take these."""
    need = _Rules("rotate")
    need.floats(x=x)
    need(len(x.shape) >= 2, f"x {x.shape} must be [..., S, D]")
    tokens, dim = x.shape[-2:]
    half = need.table(cos, sin)
    need(dim == 2 * half, f"the rotary table has {half} columns, half of {dim} channels are {dim / 2:g}")
    need(cos.shape[0] in (1, tokens), f"the rotary table has {cos.shape[0]} rows for {tokens} tokens, not 1 or all")
    need.memory(_table_bytes(cos.shape[0], half), f"{half} pairs a head")


def check_update_cache(k_pool: Spec, v_pool: Spec, k: Spec, v: Spec) -> None:
    """Raises KernelError if the kernel cannot take these."""
    need = _Rules("update_cache")
    need.floats(k_pool=k_pool, v_pool=v_pool, k=k, v=v)
    need(len(k_pool.shape) == 5, f"the pool {k_pool.shape} must be [P, B, N, S, D]")
    need.like(k_pool, v_pool, "keys", "values")
    for name, block in (("keys", k), ("values", v)):
        slot = k_pool.shape[1:]
        need(block.shape == slot, f"the block's {name} {block.shape} must have the shape of a slot, {slot}")
        need(block.dtype == k_pool.dtype, f"{name} of {block.dtype} must have the dtype of the pool, {k_pool.dtype}")


def check_attention(q: Spec, table: Spec, n_valid: Spec, pools: Sequence[tuple[Spec, Spec]]) -> None:
    """Raises KernelError if the kernel cannot take these."""
    need = _Rules("attention")
    need.floats(q=q)
    need(len(q.shape) == 4, f"q {q.shape} must be [B, T, N, D]")
    batch, tokens, heads, dim = q.shape
    need(dim <= PARTITIONS, f"head dim {dim} exceeds {PARTITIONS}, the partitions of a NeuronCore")
    need(batch * tokens * heads < FLOAT32_INTEGERS, f"q {q.shape} has more than 2^24 rows")
    need(len(table.shape) == 1 and table.shape[0] > 0, f"the table {table.shape} must be a list of block numbers")
    need(n_valid.shape == (1,), f"n_valid {n_valid.shape} must be one number")
    need(1 <= len(pools) <= 3, f"{len(pools)} pools; it takes 1 to 3")
    block_tokens = pools[0][0].shape[3] if len(pools[0][0].shape) == 5 else 0
    block = (batch, heads, block_tokens, dim)
    for k, v in pools:
        need.floats(keys=k, values=v)
        need.like(k, v, "keys", "values")
        need(k.shape[1:] == block, f"the pool {k.shape} must hold blocks {block} for queries {q.shape}")
        need(k.dtype == q.dtype, f"a pool of {k.dtype} must have the dtype of the queries, {q.dtype}")
        rows = (k.shape[0] + 1) * batch * heads
        need(rows < FLOAT32_INTEGERS, f"the pool {k.shape} has more than 2^24 rows of keys")
    places, size = table.shape[0], q.dtype.itemsize
    tiles = -(-block_tokens // PARTITIONS)
    keys_and_values = places * (block_tokens + tiles * (dim + 1)) * size
    arriving = 6 * min(tiles, MOST_ROWS) * dim * size
    need.memory(
        keys_and_values + arriving,
        f"one head's {places} blocks of {block_tokens} keys in {q.dtype} (fewer or smaller ones fit, or bfloat16)",
    )


class _Rules:
    """`need(fact, rule)`: raises a KernelError that states the rule unless the fact is true."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __call__(self, fact: bool, rule: str) -> None:
        if not fact:
            raise KernelError(f"NKI kernel {self.kernel}: {rule}")

    def floats(self, **arrays: Spec) -> None:
        for name, x in arrays.items():
            self(str(x.dtype) in FLOATS, f"{name} is {x.dtype}; it takes {' and '.join(FLOATS)}")
            self(0 not in x.shape, f"{name} {x.shape} is empty")

    def like(self, x: Spec, y: Spec, of_x: str, of_y: str) -> None:
        same = x.shape == y.shape and x.dtype == y.dtype
        self(same, f"{of_y} {y.shape} {y.dtype} must be as {of_x}, {x.shape} {x.dtype}")

    def table(self, cos: Spec, sin: Spec) -> int:
        """Checks a rotary table and returns its columns."""
        self(len(cos.shape) == 2, f"the rotary table {cos.shape} must be [tokens, D/2], one row a token")
        self(sin.shape == cos.shape, f"sin {sin.shape} must have the shape of cos, {cos.shape}")
        self(1 <= cos.shape[1] <= MOST_PAIRS, f"{cos.shape[1]} pairs of channels a head are not 1 to {MOST_PAIRS}")
        return cos.shape[1]

    def memory(self, needed: int, what: str) -> None:
        self(needed <= SBUF_BYTES, f"{what} need {needed} B of the {SBUF_BYTES} B of an SBUF partition")


def _table_bytes(tokens: int, half: int) -> int:
    """Of an SBUF partition: cos and sin of this tile's tokens and of the next one's, and what they turn."""
    rows = min(max(tokens // PARTITIONS, 1), MOST_ROWS)
    return 4 * rows * half * 4 + WORK_BYTES
