"""State of a running kernel: the launch, and one core of it. Each core runs in a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nki_ops.simulator import accounting, dtypes
from nki_ops.simulator.accounting import AddressMap, Counts, Life
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiValidationError, SimulatorError
from nki_ops.simulator.memory import PARTITIONS, NkiTensor, Storage

# Without data, tensors up to this many bytes still get some, so that indices and loop bounds can be followed.
SMALL_TENSOR_BYTES = 4096

_running = threading.local()


def current() -> "Core":
    """The core whose kernel calls us.

    Raises:
        SimulatorError: no kernel is running in this thread.
    """
    core = getattr(_running, "core", None)
    if core is None:
        raise SimulatorError("nki.language and nki.isa work inside a kernel: run it with nki.simulate(kernel)(...)")
    return core


def is_running() -> bool:
    """Whether this thread runs a kernel."""
    return getattr(_running, "core", None) is not None


class Launch:
    """What the cores of one launch share, and how they take turns.

    The threads run one at a time and switch where they must wait for each other, so a run repeats exactly; a missing
    barrier shows as the sentinel values of memory that the other core has not written yet.
    """

    def __init__(self, cores: int, has_grid: bool, with_data: bool, precise: bool) -> None:
        self.cores, self.has_grid = cores, has_grid
        self.with_data = with_data
        self.kinds = dtypes.PRECISE if precise else dtypes.WIDE
        self.shared: list[NkiTensor] = []
        self.barriers = [0] * cores
        self.mail: dict[tuple, list[Any]] = {}
        self._turn = 0
        self._waiting: list[Callable[[], bool] | None] = [None] * cores
        self._done = [False] * cores
        self._change = threading.Condition()

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """The span in which core `rank` lives; it runs only while it is its turn."""
        with self._change:
            self._change.wait_for(lambda: self._turn == rank)
        try:
            yield
        finally:
            with self._change:
                self._done[rank] = True
                self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        self._turn = (rank + 1) % self.cores
        self._change.notify_all()

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Lets the other core run until `ready()`.

        Raises:
            NkiValidationError: the other core ended, or waits too, so it never will be.
        """
        with self._change:
            while not ready():
                other = (rank + 1) % self.cores
                stuck = self._waiting[other]
                if self._done[other] or (stuck is not None and not stuck()):
                    end = "ended" if self._done[other] else "waits for something else"
                    raise NkiValidationError(f"{what} on core {rank} never completes: core {other} {end}")
                self._waiting[rank] = ready
                self._pass_on(rank)
                self._change.wait_for(lambda: self._turn == rank)
                self._waiting[rank] = None


class Core:
    """One core of a launch: its accumulators, counts and memories.

    Attributes:
        times: how often the code now running stands for itself (inside loops modelled by one pass).
        folded: inside such a loop, where data is only that of the first pass.
        loop_trips: trip counts of the dynamic loops so far; both cores of a launch must agree.
    """

    def __init__(self, launch: Launch, rank: int) -> None:
        self.launch, self.rank = launch, rank
        self.counts = Counts()
        self.lives: list[Life] = []
        self.tick = 0
        self.times = 1
        self.folded = False
        self.no_reorder = 0
        self.loop_trips: list[int | None] = []
        self.scalar_accumulator = np.full(PARTITIONS, np.nan, np.float32)
        self.vector_accumulator = np.full(PARTITIONS, np.nan, np.float32)
        self._scopes = [0]
        self._scopes_made = 0
        self._shared_made = 0
        self._allocated = 0
        self._maps: dict[MemoryRegion, AddressMap] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the thread's current core."""
        _running.core = self
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            _running.core = None

    # ---- memory

    def allocate(
        self, region: MemoryRegion, dtype: str, shape: tuple[int, ...], name: str, address: tuple[int, int] | None
    ) -> NkiTensor:
        """A new tensor with the sentinel values of fresh memory. In shared HBM both cores get the same one."""
        shared = region is MemoryRegion.shared_hbm and self.launch.cores > 1
        if shared:
            self._shared_made += 1
            if len(self.launch.shared) >= self._shared_made:
                return self._twin(self.launch.shared[self._shared_made - 1], dtype, shape)
        self._allocated += 1
        storage = Storage(region, dtype, shape, name, address, self.launch.kinds)
        storage.number, storage.scope = self._allocated, self._scopes[-1]
        if self.launch.with_data or storage.row_bytes * (shape[0] if region.on_chip else 1) <= SMALL_TENSOR_BYTES:
            storage.fill()
        if self.launch.with_data and region is not MemoryRegion.sbuf:
            assert storage.data is not None
            storage.marks = np.zeros(storage.data.size, np.uint8)
        if region.on_chip:
            self._place(storage)
        tensor = NkiTensor(storage)
        if shared:
            self.launch.shared.append(tensor)
        return tensor

    def _twin(self, tensor: NkiTensor, dtype: str, shape: tuple[int, ...]) -> NkiTensor:
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise NkiValidationError(
                f"shared_hbm tensor {self._shared_made} is {tensor.shape} {tensor.dtype} on core 0 and "
                f"{shape} {dtype} on core {self.rank}; both cores must allocate the same tensors in the same order"
            )
        return tensor

    def _place(self, storage: Storage) -> None:
        size = storage.row_bytes
        if storage.region is MemoryRegion.psum:
            size = -(-size // accounting.PSUM_BANK_BYTES) * accounting.PSUM_BANK_BYTES
        capacity = accounting.CAPACITY[storage.region]
        start = 0 if storage.address is None else storage.address[1]
        if start < 0 or start + size > capacity:
            raise NkiValidationError(
                f"ndarray {accounting.label_of(storage)} needs bytes {start}..{start + size} of a "
                f"{storage.region.value} partition, which has {capacity}"
            )
        placed_at = None if storage.address is None else start
        storage.life = Life(storage.region, size, accounting.label_of(storage), placed_at, created=self.tick)
        self.lives.append(storage.life)

    def address_map(self, region: MemoryRegion) -> AddressMap:
        if region not in self._maps:
            self._maps[region] = AddressMap(region)
        return self._maps[region]

    def touch(self, storage: Storage) -> None:
        """Notes that the current instruction uses `storage`.

        Raises:
            NkiValidationError: it was made in a pass of a loop body that is over.
        """
        if storage.scope not in self._scopes:
            raise NkiValidationError(f"{storage} was made inside a loop body and is not visible outside that pass")
        life = storage.life
        if life is not None:
            if life.first < 0:
                life.first = self.tick
            life.last = self.tick

    # ---- loops

    @contextmanager
    def loop(self, trips: int, folded: bool) -> Iterator[None]:
        """A dynamic loop. What it uses from outside is live all through it; folded, one pass stands for `trips`."""
        self.tick += 1
        start, times, was_folded = self.tick, self.times, self.folded
        self.times, self.folded = times * (trips if folded else 1), was_folded or folded
        try:
            yield
        finally:
            self.times, self.folded = times, was_folded
        for life in self.lives:
            if life.created < start <= life.last:
                life.first = min(life.first, start)
                life.last = self.tick

    @contextmanager
    def loop_pass(self) -> Iterator[None]:
        """One pass through a loop body: tensors made in it end with it."""
        self._scopes_made += 1
        self._scopes.append(self._scopes_made)
        try:
            yield
        finally:
            self._scopes.pop()
