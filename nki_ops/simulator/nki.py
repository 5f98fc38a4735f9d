"""The `nki` package itself: what `import nki` gives."""

from nki_ops.simulator import collectives, isa, language, typing
from nki_ops.simulator.launch import Kernel, jit, simulate

dtype = language.DType

__all__ = ["Kernel", "collectives", "dtype", "isa", "jit", "language", "simulate", "typing"]
