"""Running kernels: `nki.jit`, `nki.simulate`, and `profile`, which counts costs.

Source: nki_simulator.rst (what `nki.simulate` does), the reference of `nki.jit`.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_ops.simulator import dtypes
from nki_ops.simulator.core import Core, Launch, is_running
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiValidationError, SimulatorError
from nki_ops.simulator.instruction import OTHER_MARK
from nki_ops.simulator.isa_control import get_nc_version
from nki_ops.simulator.memory import NkiTensor, Storage
from nki_ops.simulator.report import Report, report_of

SMALL_INPUT_BYTES = 4096


@dataclass(frozen=True)
class TensorSpec:
    """An array without data, for `profile(..., cost_only=True)`: as argument and as result."""

    shape: tuple[int, ...]
    dtype: Any


class Kernel:
    """A function decorated with `nki.jit`. `kernel[2]` launches on two cores; calling it simulates it."""

    def __init__(self, function: Callable, grid: int | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.grid = grid

    def __getitem__(self, grid: int) -> Kernel:
        if grid not in (1, 2):
            raise NkiValidationError(f"launch grid {grid!r} must be 1 or 2, the logical NeuronCore's cores")
        return Kernel(self.function, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_running():
            raise NkiValidationError(
                f"{self.function.__name__} is decorated with nki.jit and called inside a kernel; "
                "functions that kernels call must not be decorated"
            )
        return simulate(self)(*args, **kwargs)


def jit(fn: Callable | None = None, **kwargs: Any) -> Any:
    """Marks a function as a kernel. Options are those of older versions; they are ignored with a warning.

    Raises:
        SimulatorError: `platform_target`, which NKI refuses too.
    """
    if "platform_target" in kwargs:
        raise SimulatorError("nki.jit(platform_target=...) was removed; set NEURON_PLATFORM_TARGET_OVERRIDE=trn2")
    for option in kwargs:
        warnings.warn(f"nki.jit({option}=...) is ignored", DeprecationWarning, stacklevel=2)
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel: Callable) -> Callable[..., Any]:
    """A function that runs `kernel` (decorated or plain) on numpy arrays and returns numpy arrays.

    Inputs that the kernel writes are changed in place; an input that it returns is the array passed in.
    """
    return lambda *args, **kwargs: _run(kernel, args, kwargs, with_data=True)[0]


def profile(kernel: Callable, cost_only: bool = False) -> Callable[..., tuple[Any, Report]]:
    """A function that runs `kernel` and returns (outputs, Report).

    Args:
        kernel: decorated or plain, `kernel[2]` too.
        cost_only: no data: arguments may be `TensorSpec` or anything with shape and dtype, outputs are `TensorSpec`.
            Dynamic loops run their body once and count it as often as the loop would. Arrays of up to 4 KiB keep
            their data, so that loop bounds and indices can be followed.
    """
    return lambda *args, **kwargs: _run(kernel, args, kwargs, with_data=not cost_only)


def _run(kernel: Callable, args: tuple, kwargs: dict, with_data: bool) -> tuple[Any, Report]:
    if is_running():
        raise SimulatorError("nki.simulate was called inside a kernel")
    get_nc_version()
    function, grid = (kernel.function, kernel.grid) if isinstance(kernel, Kernel) else (kernel, None)
    launch = Launch(grid or 1, grid is not None, with_data, os.environ.get("NKI_PRECISE_FP", "1") != "0")
    inputs = _Inputs(launch)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments = {name: inputs.wrap(name, value) for name, value in bound.arguments.items()}

    cores = [Core(launch, rank) for rank in range(launch.cores)]
    results = _run_cores(cores, lambda: function(*bound.args, **bound.kwargs))
    report = report_of(cores)
    if launch.cores == 2 and cores[0].loop_trips != cores[1].loop_trips:
        raise NkiValidationError(
            f"the cores' dynamic loops ran {cores[0].loop_trips} and {cores[1].loop_trips} times; "
            "both cores must have the same control flow"
        )
    outputs = [_flat(r) for r in results]
    for other in outputs[1:]:
        if [t.storage for t in other] != [t.storage for t in outputs[0]]:
            raise NkiValidationError("the cores return different tensors; outputs must be in shared_hbm")
    returned = {t.storage for t in outputs[0]}
    arrays = [inputs.result(t) for t in outputs[0]]
    inputs.write_back(returned)
    if not isinstance(results[0], (tuple, list)):
        return (arrays[0] if arrays else None), report
    return tuple(arrays), report


def _run_cores(cores: list[Core], body: Callable[[], Any]) -> list[Any]:
    """Runs `body` on each core: one core in this thread, two in threads that take turns."""
    results: list[Any] = [None] * len(cores)
    errors: list[BaseException] = []

    def run(core: Core) -> None:
        with core.active():
            results[core.rank] = body()

    def run_in_turn(core: Core) -> None:
        with core.launch.turn(core.rank):
            try:
                run(core)
            except BaseException as error:  # raised again in the caller's thread
                errors.append(error)

    if len(cores) == 1:
        run(cores[0])
        return results
    threads = [threading.Thread(target=run_in_turn, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _flat(result: Any) -> list[NkiTensor]:
    values = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
    for value in values:
        if not isinstance(value, NkiTensor):
            raise NkiValidationError(f"a kernel returns tensors, got {type(value).__name__}")
    return values


class _Inputs:
    """The arrays of a call as HBM tensors, and what becomes of them."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.arrays: dict[Storage, Any] = {}
        self.copied: list[tuple[str, Storage]] = []

    def wrap(self, name: str, value: Any) -> Any:
        """An array as tensor, also within a tuple; anything else as compile-time constant."""
        if type(value) is tuple:
            return tuple(self.wrap(f"{name}[{i}]", v) for i, v in enumerate(value))
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        if not is_array or isinstance(value, (type, np.dtype, np.generic)):
            return _constant(name, value)
        shape = tuple(int(n) for n in value.shape)
        if not shape or 0 in shape:
            raise NkiValidationError(
                f"argument {name} has shape {shape}; arrays need at least one element and dimension"
            )
        region = MemoryRegion.shared_hbm if self.launch.cores > 1 else MemoryRegion.private_hbm
        storage = Storage(region, dtypes.canonical(value.dtype), shape, name, None, self.launch.kinds)
        self.arrays[storage] = value
        if self.launch.with_data:
            self._attach(name, storage, value)
        elif isinstance(value, np.ndarray) and value.nbytes <= SMALL_INPUT_BYTES:
            storage.fill(0)
            NkiTensor(storage).array()[...] = value
        return NkiTensor(storage)

    def _attach(self, name: str, storage: Storage, value: Any) -> None:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        same_bits = array.dtype.itemsize == storage.kinds[storage.dtype].itemsize
        if array.flags.c_contiguous and array.flags.writeable and same_bits and array is value:
            storage.data = array.reshape(-1).view(np.uint8)
            return
        storage.fill(0)
        NkiTensor(storage).array()[...] = array
        assert storage.data is not None
        storage.marks = np.zeros(storage.data.size, np.uint8)
        self.copied.append((name, storage))

    def write_back(self, returned: set[Storage]) -> None:
        """Brings writes to copies of inputs into the arrays passed in."""
        for name, storage in self.copied:
            array = self.arrays[storage]
            assert storage.marks is not None
            if not storage.marks.any():
                continue
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = NkiTensor(storage).array().astype(array.dtype)
            elif storage not in returned:
                raise SimulatorError(f"the kernel writes its argument {name}, which is read-only; pass a numpy array")

    def result(self, tensor: NkiTensor) -> Any:
        """A returned tensor as array.

        Raises:
            NkiValidationError: it is not in shared HBM, is a part of a tensor, or was not written everywhere.
        """
        storage = tensor.storage
        is_input = storage in self.arrays
        if not is_input and storage.region is not MemoryRegion.shared_hbm:
            raise NkiValidationError(f"returned {storage}: outputs must be allocated with buffer=nl.shared_hbm")
        if tensor.size != storage.size or not tensor.is_contiguous():
            raise NkiValidationError(f"returned {tensor} is a part of {storage}; return the whole tensor")
        if not self.launch.with_data:
            return TensorSpec(tensor.shape, tensor.dtype)
        array = self.arrays.get(storage)
        if is_input:
            if isinstance(array, np.ndarray) and array.flags.writeable and tensor.shape == array.shape:
                return array
        else:
            assert storage.marks is not None
            missing = int((storage.marks != OTHER_MARK).sum()) // storage.kinds[storage.dtype].itemsize
            if missing:
                raise NkiValidationError(f"returned {storage}: {missing} elements were never written")
        values = tensor.array().copy()
        return values.astype(bool) if tensor.dtype == "bool" else values


def _constant(name: str, value: Any) -> Any:
    """A compile-time constant; dtypes become NKI's."""
    if isinstance(value, list):
        raise NkiValidationError(f"argument {name} is a list; pass a tuple, kernels are cached by their constants")
    numpy_type = isinstance(value, type) and issubclass(value, np.generic)
    jax_type = isinstance(value, type) and isinstance(getattr(value, "dtype", None), np.dtype)
    return dtypes.canonical(value) if isinstance(value, np.dtype) or numpy_type or jax_type else value
