"""Virtual registers: scalars that exist while the device runs, not while Python builds the kernel."""

from typing import Any

from nki_ops.simulator.errors import NkiValidationError


class VirtualRegister:
    """A 32-bit register of an engine's sequencer.

    Its value may serve as a dynamic offset or a loop bound. Python must not see it: arithmetic, comparisons,
    `if`, `int()` and `range()` raise TypeError, as they do when a kernel is traced for the device.

    Attributes:
        value: the number held; None if it is unknown (uninitialised, or modelled without data).
        frozen: the induction register of a loop, which a kernel may only read.
    """

    __slots__ = ("value", "frozen")

    def __init__(self, value: int | None = None, frozen: bool = False) -> None:
        self.value = value
        self.frozen = frozen

    def set(self, value: int | None, op: str) -> None:
        """Writes the register on behalf of instruction `op`; the value wraps to 32 bits."""
        if self.frozen:
            raise NkiValidationError(f"{op} writes the induction register of a loop, which is read-only")
        self.value = value if value is None else (value + 2**31) % 2**32 - 2**31

    def __repr__(self) -> str:
        return f"VirtualRegister({self.value})"


def _refuse(name: str) -> Any:
    def method(self: VirtualRegister, *_: Any) -> Any:
        raise TypeError(
            f"a VirtualRegister has no value while the kernel is built ({name}); "
            "use it only as scalar_offset or as a bound of nl.fori_loop"
        )

    return method


for _name in (
    "bool int index float neg abs lt le gt ge add radd sub rsub mul rmul floordiv rfloordiv "
    "truediv rtruediv mod rmod pow rpow lshift rshift and or xor"
).split():
    setattr(VirtualRegister, f"__{_name}__", _refuse(_name))
