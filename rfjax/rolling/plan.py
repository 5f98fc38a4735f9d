"""What one rolling step does, worked out on the host.

Blocks are numbered from 0. In step w, block b stands at place b - w + (window - 1) of the window, and a place alone
fixes the noise level: the front place holds the last entry of the step list, the back place pure noise. Ramp-up,
steady state and ramp-down differ only in which places are valid.

A stream with k conditioned blocks takes its first steps, 1 .. k - 1, with an empty window, to put the clean keys of
blocks 0 .. k - 2 into the cache; in step k the roll starts with block k.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rfjax.config import RollingConfig
from rfjax.dit.rope import Table, axis_pairs, axis_table

HostOrDevice = np.ndarray | jax.Array


class KeyTable(NamedTuple):
    """Which key blocks a group of queries sees, as `nki_ops.attention` takes it."""

    blocks: HostOrDevice  # int32 [R, max_attention_blocks]; valid ones first
    n_valid: HostOrDevice  # int32 [R]


class StepPlan(NamedTuple):
    """The arrays that vary from step to step, but for the noise.

    Key blocks are numbered: the cache slots, then the re-rotated sink, then the places of the window. R is the number
    of rows: 1 if all streams of the batch are at the same step, or one for each of them.
    """

    clean_keys: KeyTable
    window_keys: KeyTable
    write_slot: HostOrDevice  # int32 [R]: the cache slot for the clean block
    takes_given: HostOrDevice  # bool [R]: whether the clean block is a given one, see `rolling_step`
    temporal_rotary: Table  # [R, frames of clean block and window, time pairs]
    sink_rotary: Table  # [R, 1, time pairs]: from the sink's own position to where the window sees it

    @property
    def rows(self) -> int:
        return self.write_slot.shape[0]

    def row(self, index: int) -> "StepPlan":
        """One row, without its axis."""
        return jax.tree.map(lambda x: jax.lax.index_in_dim(jnp.asarray(x), index, keepdims=False), self)

    @staticmethod
    def of_rows(plans: Sequence["StepPlan"]) -> "StepPlan":
        """The plan of a batch whose streams are each at a step of their own."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *plans)


class Roll(NamedTuple):
    """The course of one stream."""

    first: int  # the first block that is generated; those before are given (conditioned)
    last: int | None  # None: endless
    origin: int = 0  # latent frame number of block 0; rotation is relative, so it changes nothing

    @property
    def first_step(self) -> int:
        return min(self.first, 1)

    def takes_given(self, step: int) -> bool:
        """Whether the clean block of a step is a given one."""
        return 1 <= step <= self.first

    def first_block(self, step: int, window_blocks: int) -> int:
        """The block at the front of the window."""
        return max(self.first, step - window_blocks + 1)

    def clean_block(self, step: int, window_blocks: int) -> int | None:
        """The finished or given block whose clean keys this step computes."""
        if step <= self.first:
            return step - 1 if step >= 1 else None
        block = step - window_blocks
        return block if block >= self.first else None

    def finished_block(self, step: int, window_blocks: int) -> int | None:
        """The block whose latents are final after this step."""
        block = step - window_blocks + 1
        within = block >= self.first and (self.last is None or block <= self.last)
        return block if within else None


def cache_slot(block: int, config: RollingConfig) -> int:
    """Slot 0 is the sink's; all later blocks share the others as a ring."""
    return 0 if block == 0 else 1 + (block - 1) % (config.cache_slots - 1)


def plan_step(step: int, roll: Roll, config: RollingConfig, head_dim: int, theta: float) -> StepPlan:
    """The plan of one step, of one row (sections 3.2 and 3.3 of the Rolling Forcing paper, in phase-batched form)."""
    width, frames = config.window_blocks, config.block_frames
    front = roll.first_block(step, width)
    back = step if roll.last is None else min(roll.last, step)
    clean = roll.clean_block(step, width)
    n_window = max(0, back - front + 1)
    n_working = min(front - 1, config.max_attention_blocks - 1 - n_window) if front > 0 else 0

    sink, places = config.cache_slots, config.cache_slots + 1
    window_keys = [places + block - step + width - 1 for block in range(front, back + 1)]
    if front > 0 and n_window:
        window_keys.append(sink)
        window_keys += [cache_slot(front - 1 - i, config) for i in range(n_working)]
    clean_keys = []
    if clean is not None:
        oldest = max(0, clean - config.max_attention_blocks + 1)
        clean_keys = [cache_slot(block, config) for block in range(oldest, clean + 1)]

    # Without a clean block the step writes what nobody reads into the slot that the next clean block will take.
    written = clean if clean is not None else roll.first
    window_start = (step - width + 1) * frames
    clean_frames = written * frames + np.arange(frames)
    window_frames = window_start + np.arange(width * frames)
    sink_shift = (front - n_working - 1) * frames if front > 0 else 0
    pairs = axis_pairs(head_dim)[0]
    plan = StepPlan(
        clean_keys=_key_table(clean_keys, config),
        window_keys=_key_table(window_keys, config),
        write_slot=np.array(cache_slot(written, config), np.int32),
        takes_given=np.array(roll.takes_given(step)),
        temporal_rotary=axis_table(roll.origin + np.concatenate([clean_frames, window_frames]), pairs, theta),
        sink_rotary=axis_table(np.array([sink_shift]), pairs, theta),
    )
    return jax.tree.map(lambda x: x[None], plan)


def _key_table(blocks: list[int], config: RollingConfig) -> KeyTable:
    """Pads to a fixed length. An empty table points at some block: its queries are masked, and must stay finite."""
    padded = np.zeros(config.max_attention_blocks, np.int32)
    padded[: len(blocks)] = blocks
    return KeyTable(padded, np.array(max(1, len(blocks)), np.int32))
