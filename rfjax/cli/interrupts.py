"""Ctrl-C, and the signals that ask a program to end (SIGTERM, SIGHUP): all do the same."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """While entered, such a signal raises KeyboardInterrupt; but SIGHUP stays ignored under nohup.

    Attributes:
        received: the numbers of the signals that came.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._held = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interrupts":
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Windows has no SIGHUP. A script's background jobs ignore SIGINT, and yet are meant by `kill -INT`.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._before[number] = signal.signal(number, self._arrive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[list[int]]:
        """The list of signals received, to be looked at: the first one cuts nothing; the next interrupts as usual."""
        self._held = True
        try:
            yield self.received
        finally:
            self._held = False

    @contextlib.contextmanager
    def delayed(self) -> Iterator[None]:
        """Interrupts at the end of what is inside: libraries that are imported may abort when they are cut."""
        with self.held():
            yield
        if self.received:
            raise KeyboardInterrupt

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if not self._held or len(self.received) > 1:
            raise KeyboardInterrupt
