"""Tensors: a storage in one of the memories, and strided views of it.

A view is (shape, strides, offset, dtype) in elements of the storage, laid out row-major; on chip the first dimension
is the partition, and its stride is the number of elements a partition holds. Views never copy.
Source: the NkiTensor reference, nki-language-guide.rst (tensor values, indexing), nki-aps.rst.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nki_ops.simulator import dtypes, layout
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiAmbiguityWarning, NkiValidationError
from nki_ops.simulator.registers import VirtualRegister

PARTITIONS = 128
_CONSTANTS = (type(None), bool, int, float, str, tuple)


class NKIObject:
    """Base of the classes that kernels may use: like a dataclass, with or without the decorator.

    A constant in the class body is a field too, annotated or not (public kernels rely on it).
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        fields = dict(inspect.get_annotations(cls))
        constants = [n for n, v in vars(cls).items() if n[0] != "_" and isinstance(v, _CONSTANTS)]
        cls.__annotations__ = fields | {n: Any for n in constants if n not in fields}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [n for c in reversed(type(self).__mro__) for n in inspect.get_annotations(c)]
        values = dict(zip(names, args, strict=False)) | kwargs
        unknown = [n for n in values if n not in names]
        if len(args) > len(names) or unknown:
            raise TypeError(f"{type(self).__name__} has the fields {names}, got {args} {kwargs}")
        for name in names:
            if name in values or not hasattr(type(self), name):
                setattr(self, name, values.get(name))
        post_init = getattr(self, "__post_init__", None)
        if post_init:
            post_init()


class Storage:
    """A tensor's memory.

    Attributes:
        row: elements a partition holds (on chip); the tensor's size (HBM).
        data: bytes, row-major; None where the simulator models cost alone.
        marks: one number a byte, for HBM outputs and PSUM: 0 never written, 1 by a matmul, 2 by anything else.
        kinds: NKI dtype -> numpy dtype it is stored in.
        life: accounting record of on-chip storages.
        number: order of allocation, from 1.
        scope: the pass of a loop body in which it was made; 0 outside all loops.
    """

    __slots__ = "region dtype shape name address row data marks kinds life number scope".split()

    def __init__(
        self,
        region: MemoryRegion,
        dtype: str,
        shape: tuple[int, ...],
        name: str = "",
        address: tuple[int, int] | None = None,
        kinds: dict[str, np.dtype] = dtypes.PRECISE,
    ) -> None:
        self.region, self.dtype, self.shape, self.name, self.address = region, dtype, shape, name, address
        self.row = math.prod(shape[1:]) if region.on_chip else math.prod(shape)
        self.data: np.ndarray | None = None
        self.marks: np.ndarray | None = None
        self.kinds = kinds
        self.life: Any = None
        self.number = self.scope = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Device bytes of one partition (on chip) or of the whole (HBM)."""
        return self.row * dtypes.itemsize(self.dtype)

    def fill(self, value: float | int | None = None) -> None:
        """Makes the data: `value` everywhere, or the sentinel of fresh memory."""
        kind = self.kinds[self.dtype]
        self.data = np.full(self.size, dtypes.sentinel(self.dtype) if value is None else value, kind).view(np.uint8)

    def window(self, buffer: np.ndarray, view: NkiTensor, offset: int, as_bytes: bool = False) -> np.ndarray:
        """`view` of `buffer` (the data or the marks) at element `offset`; by bytes it gets one more axis."""
        kind = self.kinds[view.dtype]
        item = kind.itemsize
        strides = tuple(s * item for s in view.strides)
        if as_bytes:
            return np.ndarray((*view.shape, item), np.uint8, buffer, offset * item, (*strides, 1))
        return np.ndarray(view.shape, kind, buffer, offset * item, strides)

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'} {self.shape} {self.dtype} in {self.region.value}"


class Indirect(NamedTuple):
    """A part of a view's address that the device knows only while it runs.

    Attributes:
        index: (1, 1) tensor or register; with `per_partition`, a tensor with one index for each row of the view.
        stride: elements that an index of 1 means.
        limit: indices must be below this.
    """

    index: NkiTensor | VirtualRegister
    stride: int
    per_partition: bool
    limit: int


class NkiTensor(NKIObject):
    """A view of a storage. Made by `nl.ndarray`; every method returns another view of the same storage."""

    __slots__ = "storage shape strides offset dtype indirection".split()

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        dtype: str | None = None,
        indirection: Indirect | None = None,
    ) -> None:
        self.storage = storage
        self.shape = storage.shape if shape is None else shape
        self.strides = layout.row_major(self.shape) if strides is None else strides
        self.offset = offset
        self.dtype = storage.dtype if dtype is None else dtype
        self.indirection = indirection

    # ---- attributes

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.region

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of this view's dtype that a partition holds (on chip) or the storage holds (HBM)."""
        return self.storage.row_bytes // dtypes.itemsize(self.dtype)

    def __repr__(self) -> str:
        return f"NkiTensor({self.name or self.storage.number}, {self.shape}, {self.dtype}, {self.buffer.value})"

    def __bool__(self) -> bool:
        raise TypeError("a tensor's values are unknown while the kernel is built: it cannot be a Python condition")

    def is_contiguous(self) -> bool:
        """Dense and row-major; on chip, within each partition."""
        first = 1 if self.buffer.on_chip else 0
        size = math.prod(self.shape[first:])
        return size == 1 or layout.contiguous_run(self.shape[first:], self.strides[first:]) == size

    def get_pattern(self) -> list[list[int]]:
        """The view as `[[stride, count], ...]`, as `ap` takes it."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether part of the address comes from a register or a tensor."""
        return self.indirection is not None

    # ---- views

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> NkiTensor:
        offset = self.offset if offset is None else offset
        return NkiTensor(self.storage, tuple(shape), tuple(strides), offset, self.dtype, self.indirection)

    def _dim(self, dim: int, what: str, partition: bool) -> int:
        """Checks a dimension's number; `partition` says whether it may be the partition of an on-chip tensor."""
        if not -self.ndim <= dim < self.ndim:
            raise NkiValidationError(f"{what} dim {dim} is not one of the {self.ndim} dimensions of {self}")
        dim %= self.ndim
        fixed = self.buffer.on_chip or (self.indirection is not None and self.indirection.per_partition)
        if dim == 0 and fixed and not partition:
            raise NkiValidationError(f"{what} cannot act on the partition dimension of {self}")
        return dim

    def __getitem__(self, key: Any) -> NkiTensor:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in [k for k in keys if not isinstance(k, (NkiTensor, slice))]:
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise NkiValidationError(f"index has {len(keys)} entries for {self}")
        keys += [slice(None)] * (self.ndim - len(keys))

        shape, strides, offset, dropped = [], [], self.offset, []
        for dim, (k, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if isinstance(k, (NkiTensor, VirtualRegister)):
                return self._select_dynamic(dim, k)[tuple(keys[:dim] + keys[dim + 1 :])]
            start, stop, step = self._range(dim, k)
            if isinstance(k, int):
                dropped.append(dim)
            shape.append(len(range(start, stop, step)))
            strides.append(stride * step)
            offset += start * stride
            if self.indirection is not None and self.indirection.per_partition and dim == 0 and shape[0] != size:
                raise NkiValidationError(f"index cuts the indirect dimension of {self}")
        gone = self._droppable(dropped) if dropped else ()
        keep = [d for d in range(self.ndim) if d not in gone]
        return self._view([shape[d] for d in keep], [strides[d] for d in keep], offset)

    def _range(self, dim: int, key: Any) -> tuple[int, int, int]:
        size = self.shape[dim]
        if isinstance(key, slice):
            start, stop, step = key.indices(size)
            if key.stop is not None and not -size <= key.stop <= size or start >= stop or step < 1:
                raise NkiValidationError(f"index {key} of dimension {dim} is empty or outside {self}")
            if step > 1 and dim == 0 and self.buffer.on_chip and start + step < stop:
                raise NkiValidationError(f"index {key}: the partition dimension has no stride")
            return start, stop, step
        if not isinstance(key, (int, np.integer)):
            raise NkiValidationError(f"index {key!r} of {self} is no integer, slice or nl.ds")
        if not -size <= key < size:
            raise NkiValidationError(f"index {key} of dimension {dim} is outside {self}")
        return int(key) % size, int(key) % size + 1, 1

    def _droppable(self, indexed: list[int]) -> list[int]:
        """Integer indices drop their dimension; on chip not the partition's, and two dimensions stay."""
        if not self.buffer.on_chip:
            return indexed if len(indexed) < self.ndim else indexed[:-1]
        free = [d for d in indexed if d != 0]
        spare = self.ndim - 2
        return free[:spare]

    def __setitem__(self, key: Any, value: Any) -> None:
        from nki_ops.simulator import tile_math

        tile_math.assign(self[key], value)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in another order; the partition stays first."""
        if sorted(dims) != list(range(self.ndim)):
            raise NkiValidationError(f"permute {tuple(dims)} is no permutation of the dimensions of {self}")
        if dims[0] != 0:
            self._dim(0, "permute", partition=False)
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """A dimension of size 1, repeated."""
        dim = self._dim(dim, "broadcast", partition=False)
        if self.shape[dim] != 1:
            raise NkiValidationError(f"broadcast dimension {dim} of {self} has size {self.shape[dim]}, not 1")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dimension of size 1 at position `dim`."""
        if dim == 0:
            self._dim(0, "expand_dim", partition=False)
        if not 0 <= dim <= self.ndim:
            raise NkiValidationError(f"expand_dim {dim} is not a position among the dimensions of {self}")
        return self._view((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 1, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Without dimension `dim`, whose size is 1."""
        dim = self._dim(dim, "squeeze_dim", partition=False)
        if self.shape[dim] != 1:
            raise NkiValidationError(f"squeeze_dim dimension {dim} of {self} has size {self.shape[dim]}, not 1")
        return self._view(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """One dimension split in several; one size may be -1."""
        dim = self._dim(dim, "reshape_dim", partition=len(shape) == 1)
        sizes = layout.divide_up(self.shape[dim], tuple(shape))
        if sizes is None:
            raise NkiValidationError(f"reshape_dim {tuple(shape)} does not multiply to {self.shape[dim]} in {self}")
        strides = [s * self.strides[dim] for s in layout.row_major(sizes)]
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Dimensions `start_dim..end_dim` (inclusive) as one; they must lie contiguously."""
        start = self._dim(start_dim, "flatten_dims", partition=start_dim == end_dim)
        end = self._dim(end_dim, "flatten_dims", partition=start_dim == end_dim)
        part = slice(start, end + 1)
        size = math.prod(self.shape[part])
        strides = layout.reshaped_strides(self.shape[part], self.strides[part], (size,))
        if strides is None:
            raise NkiValidationError(f"flatten_dims {start}..{end} of {self}: strides {self.strides} are no one run")
        return self._view(
            (*self.shape[:start], size, *self.shape[end + 1 :]),
            (*self.strides[:start], *strides, *self.strides[end + 1 :]),
        )

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """The same elements under another shape; on chip the partition dimension stays."""
        sizes = layout.divide_up(self.size, tuple(shape))
        if sizes is None:
            raise NkiValidationError(f"reshape {tuple(shape)} does not hold the {self.size} elements of {self}")
        first = 1 if self.buffer.on_chip or (self.indirection is not None and self.indirection.per_partition) else 0
        if sizes[:first] != self.shape[:first]:
            raise NkiValidationError(f"reshape {tuple(shape)} changes the partition dimension of {self}")
        strides = layout.reshaped_strides(self.shape[first:], self.strides[first:], sizes[first:])
        if strides is None:
            raise NkiValidationError(f"reshape {tuple(shape)} of {self} with strides {self.strides} would need a copy")
        return self._view(sizes, self.strides[:first] + strides)

    def rearrange(
        self, src_pattern: tuple, dst_pattern: tuple, fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Splits, reorders and merges dimensions by name, like einops with tuples for groups."""
        sizes, view, names = fixed_sizes or {}, self, []
        for entry in src_pattern:
            group = (entry,) if isinstance(entry, str) else tuple(entry)
            view = view.reshape_dim(len(names), [sizes.get(n, -1) for n in group]) if len(group) > 1 else view
            names += group
        order = [n for entry in dst_pattern for n in ((entry,) if isinstance(entry, str) else entry)]
        if sorted(order) != sorted(names):
            raise NkiValidationError(f"rearrange {src_pattern} -> {dst_pattern} does not name the same dimensions")
        view = view.permute([names.index(n) for n in order])
        for dim, entry in enumerate(dst_pattern):
            if not isinstance(entry, str):
                view = view.flatten_dims(dim, dim + len(entry) - 1)
        return view

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start:end:step of one dimension."""
        dim = self._dim(dim, "slice", partition=True)
        if not 0 <= start < end <= self.shape[dim] or step < 1:
            raise NkiValidationError(f"slice {start}:{end}:{step} is not within dimension {dim} of {self}")
        return self[(*[slice(None)] * dim, slice(start, end, step))]

    def select(self, dim: int, index: int | NkiTensor | VirtualRegister) -> NkiTensor:
        """One index of a dimension, which goes; a (1, 1) tensor or a register selects while the device runs."""
        if not isinstance(index, int):
            return self._select_dynamic(self._dim(dim, "select", partition=False), index)
        dim = self._dim(dim, "select", partition=True)
        if not 0 <= index < self.shape[dim]:
            raise NkiValidationError(f"select index {index} is outside dimension {dim} of {self}")
        return self[(*[slice(None)] * dim, index)]

    def _select_dynamic(self, dim: int, index: NkiTensor | VirtualRegister) -> NkiTensor:
        dim = self._dim(dim, "select", partition=False)
        self._refuse_second_indirection("select")
        step = Indirect(index, self.strides[dim], False, self.shape[dim])
        shape, strides = self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :]
        return NkiTensor(self.storage, shape, strides, self.offset, self.dtype, step)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Row `vector_offset[p]` of the first dimension for every partition p (HBM only)."""
        if dim != 0 or self.buffer.on_chip:
            raise NkiValidationError(f"vector_select works on dim 0 of HBM tensors, got dim {dim} of {self}")
        self._refuse_second_indirection("vector_select")
        step = Indirect(vector_offset, self.strides[0], True, self.shape[0])
        shape = (vector_offset.shape[0], *self.shape[1:])
        return NkiTensor(self.storage, shape, self.strides, self.offset, self.dtype, step)

    def _refuse_second_indirection(self, what: str) -> None:
        if self.indirection is not None:
            raise NkiValidationError(f"{what} on {self}: only one dynamic index per tensor")

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | VirtualRegister | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """An access pattern `[[stride, count], ...]` on the storage itself.

        `offset` counts from the view's own offset, as the reference says; the guide on access patterns counts from
        the storage's start, so call it on tensors as allocated, where that is the same. A dynamic offset is scaled by
        the stride that dimension `indirect_dim` has in this view.
        """
        kind = self.dtype if dtype is None else dtypes.canonical(dtype)
        old, new = self._item_sizes(kind)
        if not pattern or any(len(p) != 2 or p[1] < 1 for p in pattern):
            raise NkiValidationError(f"ap pattern {pattern} is no list of [stride, count] with positive counts")
        strides, shape = tuple(int(p[0]) for p in pattern), tuple(int(p[1]) for p in pattern)
        if self.offset:
            text = f"ap on {self}, which starts at element {self.offset}: the documents disagree whether that counts"
            warnings.warn(f"{text}; call it on the tensor as allocated", NkiAmbiguityWarning, stacklevel=2)
        start = self.offset * old // new + (offset or 0)
        view = NkiTensor(self.storage, shape, strides, start, kind)
        if scalar_offset is not None and vector_offset is not None:
            raise NkiValidationError("ap takes scalar_offset or vector_offset, not both")
        index = scalar_offset if vector_offset is None else vector_offset
        if index is not None:
            stride = self._index_stride(indirect_dim, vector_offset is not None) * old // new
            view.indirection = Indirect(index, stride, vector_offset is not None, 2**31)
        if view.buffer.on_chip and strides[0] != view.row and shape[0] > 1:
            raise NkiValidationError(
                f"ap pattern {pattern} steps {strides[0]} elements between partitions of {self}, which hold {view.row}"
            )
        if view.indirection is None:
            view.check_bounds(start)
        return view

    def _index_stride(self, dim: int, by_rows: bool) -> int:
        """Elements that a dynamic index of 1 means along dimension `dim`."""
        self._refuse_second_indirection("ap")
        if by_rows and (dim != 0 or self.buffer.on_chip):
            raise NkiValidationError(f"ap vector_offset needs an HBM tensor and indirect_dim 0, got {self}, dim {dim}")
        return self.strides[self._dim(dim, "ap scalar_offset", partition=False)]

    def view(self, dtype: Any) -> NkiTensor:
        """The same bits as another dtype; the last dimension's size scales."""
        kind = dtypes.canonical(dtype)
        old, new = self._item_sizes(kind)
        if self.indirection is not None:
            raise NkiValidationError(f"view({kind}) is not supported on the indirect view {self}")
        if old == new:
            return NkiTensor(self.storage, self.shape, self.strides, self.offset, kind)
        if self.strides[-1] != 1 or (self.shape[-1] * old) % new or (self.offset * old) % new:
            raise NkiValidationError(f"view({kind}) of {self}: the last dimension is no whole number of {kind}")
        if any(s * old % new for s in self.strides[:-1]):
            raise NkiValidationError(f"view({kind}) of {self}: strides {self.strides} are no whole number of {kind}")
        strides = (*(s * old // new for s in self.strides[:-1]), 1)
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        return NkiTensor(self.storage, shape, strides, self.offset * old // new, kind)

    reinterpret_cast = view

    def _item_sizes(self, kind: str) -> tuple[int, int]:
        """Element sizes of this dtype and of `kind`, whose bits must be kept as the device keeps them."""
        kinds = self.storage.kinds
        if kind != self.dtype and kinds is not dtypes.PRECISE and kinds[kind].itemsize != kinds[self.dtype].itemsize:
            raise NkiValidationError(f"{self} as {kind}: bits are those of the device under NKI_PRECISE_FP=1 alone")
        return dtypes.itemsize(self.dtype), dtypes.itemsize(kind)

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Tensor indirection exists on NeuronCore-v4 alone."""
        raise NkiValidationError("indirect() needs NeuronCore-v4 (trn3); the simulator models Trainium2")

    # ---- what instructions need

    def check_bounds(self, start: int) -> None:
        """Refuses a view whose elements, from element `start` on, leave the storage or (on chip) the partition."""
        if self.buffer.on_chip:
            lo, hi = layout.extent(self.shape[1:], self.strides[1:])
            if start % self.row + hi >= self.row or start % self.row + lo < 0:
                raise NkiValidationError(
                    f"access {self.get_pattern()} at offset {start} runs out of a partition of {self.storage}"
                )
        lo, hi = layout.extent(self.shape, self.strides)
        total = self.row * (self.storage.shape[0] if self.buffer.on_chip else 1)
        if start + lo < 0 or start + hi >= total:
            raise NkiValidationError(
                f"access {self.get_pattern()} at offset {start} is out of bounds of {self.storage} ({total} elements)"
            )

    def array(self, offset: int | None = None) -> np.ndarray:
        """The data, in the stored dtype, as a numpy view."""
        assert self.storage.data is not None
        return self.storage.window(self.storage.data, self, self.offset if offset is None else offset)
