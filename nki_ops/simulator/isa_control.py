"""Registers, and what two cores of a launch do together. Source: nki.isa reference."""

import os
from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes
from nki_ops.simulator.core import current
from nki_ops.simulator.enums import MemoryRegion, nc_version
from nki_ops.simulator.enums import dma_engine as DmaEngine
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.errors import NkiValidationError, SimulatorError
from nki_ops.simulator.instruction import SBUF, Instruction, as_enum, call_site, free_size
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.registers import VirtualRegister

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
# Bytes a partition that GpSimdE's own DMA takes in one sendrecv, by element size.
_GPSIMD_DMA_LIMIT = {4: 1024, 2: 512, 1: 256}


def get_nc_version() -> nc_version:
    """Trainium2, which is all that is modelled.

    Raises:
        SimulatorError: the environment asks for another target.
    """
    target = os.environ.get(TARGET_VARIABLE, "trn2")
    if target not in ("trn2", "gen3"):
        raise SimulatorError(
            f"{TARGET_VARIABLE}={target}: the simulator models trn2 (gen3) only; unset it or set trn2"
        )
    return nc_version.gen3


def get_nc_sub_version() -> int:
    """First silicon revision."""
    return 0


def register_alloc(x: int | NkiTensor | None = None) -> VirtualRegister:
    """A new register, holding `x` if given."""
    register = VirtualRegister()
    if isinstance(x, NkiTensor):
        register_load(register, x)
    elif x is not None:
        register.set(x, "register_alloc")
    return register


def register_move(dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """dst = a constant or another register."""
    _count("register_move", dst)
    dst.set(src.value if isinstance(src, VirtualRegister) else src, "register_move")


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor in SBUF or HBM."""
    _count("register_load", dst)
    if not isinstance(src, NkiTensor) or src.size != 1 or src.buffer is MemoryRegion.psum:
        raise NkiValidationError(f"register_load src must be a tensor of one element in SBUF or HBM, got {src}")
    current().touch(src.storage)
    known = src.storage.data is not None and not current().folded
    dst.set(int(src.array().reshape(-1)[0]) if known else None, "register_load")


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of a tensor = src."""
    _count("register_store", src)
    if not isinstance(dst, NkiTensor) or dst.size != 1 or dst.buffer is MemoryRegion.psum:
        raise NkiValidationError(f"register_store dst must be a tensor of one element in SBUF or HBM, got {dst}")
    run = Instruction("register_store", Engine.dma, {"dst": dst}, {})
    if src.value is None and run.core.launch.with_data:
        run.fail("src is an uninitialised register")
    if src.value is None:
        dst.storage.data = None
    elif run.live:
        run.write(dst, np.array([[src.value]], np.int64))


def _count(op: str, register: Any) -> None:
    if not isinstance(register, VirtualRegister):
        raise NkiValidationError(f"{op} needs a register of nisa.register_alloc, got {type(register).__name__}")
    core = current()
    core.counts.instructions[op] += core.times


def core_barrier(
    data: NkiTensor, cores: tuple[int, ...], engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """Both cores of an LNC2 launch wait here for each other."""
    as_enum("core_barrier", "engine", engine, Engine)
    core = _need_two_cores("core_barrier")
    if tuple(cores) != (0, 1):
        raise NkiValidationError(f"core_barrier cores {tuple(cores)} must be (0, 1)")
    if not isinstance(data, NkiTensor) or data.buffer is not MemoryRegion.shared_hbm:
        raise NkiValidationError(f"core_barrier data must be in shared_hbm, got {data}")
    core.counts.instructions["core_barrier"] += core.times
    barriers = core.launch.barriers
    barriers[core.rank] += 1
    reached = barriers[core.rank]
    core.launch.wait_until(core.rank, lambda: min(barriers) >= reached, f"core_barrier {reached}")


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> Instruction:
    """Sends `src` to one core's `dst` and receives into this `dst` from another; both in SBUF."""
    dma_engine = as_enum("sendrecv", "dma_engine", dma_engine, DmaEngine)
    core = _need_two_cores("sendrecv")
    run = Instruction("sendrecv", Engine.dma, {"dst": dst}, {"src": src})
    run.on(SBUF, src=src, dst=dst)
    if src.dtype != dst.dtype or src.shape != dst.shape:
        run.fail(f"src {src.shape} {src.dtype} must have the shape and dtype of dst, {dst.shape} {dst.dtype}")
    for label, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if rank not in (0, 1):
            run.fail(f"{label} {rank} must be 0 or 1")
    item = dtypes.itemsize(src.dtype)
    limit = _GPSIMD_DMA_LIMIT[item]
    if dma_engine is DmaEngine.gpsimd_dma and free_size(src) * item > limit:
        run.fail(f"src has {free_size(src) * item} bytes per partition, gpsimd_dma takes {limit}")
    moved = src.size * item
    seconds = costs.dma_seconds(moved, free_size(src) * item, costs.dma_engines(src.shape[0], 1))
    core.counts.dma("sendrecv", call_site(name), "sbuf->sbuf", moved, free_size(src) * item, seconds, core.times)

    mail = core.launch.mail
    mail.setdefault((send_to_rank, core.rank, pipe_id), []).append((run.live and run.read(src).copy(), src.shape))
    inbox = mail.setdefault((core.rank, recv_from_rank, pipe_id), [])
    core.launch.wait_until(core.rank, lambda: len(inbox) > 0, f"sendrecv of pipe {pipe_id}")
    values, shape = inbox.pop(0)
    if shape != dst.shape:
        run.fail(f"core {recv_from_rank} sent {shape}, dst is {dst.shape}")
    if run.live:
        run.write(dst, values)
    return run


def _need_two_cores(op: str) -> Any:
    core = current()
    if core.launch.cores != 2:
        raise NkiValidationError(f"{op} needs a launch on two cores: kernel[2](...)")
    return core
