"""The `nki` package itself: what `import nki` gives."""

from nki_ops.simulator import isa, language, typing
from nki_ops.simulator.launch import Kernel, jit, simulate

__all__ = ["Kernel", "isa", "jit", "language", "simulate", "typing"]
