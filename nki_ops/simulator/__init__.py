"""A CPU simulator of NKI 0.6 for Trainium2: numpy and ml_dtypes, nothing of AWS's.

Kernels use `nki`'s own API. `install()` makes `import nki` resolve to it where the real package is absent;
`simulate(kernel)(*arrays)` runs a kernel, `profile(kernel)(*arrays)` counts what it costs as well, and
`check_subset(kernel)` finds what NKI's compiler would refuse.

Beyond AWS's `nki.simulate`: SBUF and PSUM are finite, tensors at one address overwrite each other, accesses start at
the partitions the hardware allows, a DMA must not read what it writes, outputs must be written everywhere, and engine
time, DMA traffic and its descriptors are modelled with documented rates.

Not modelled: hazards between engines (the compiler orders instructions), races between two cores (they take turns, so
a missing barrier shows as unwritten memory, always the same way), and limits of the compiler on program size.
"""

from nki_ops.simulator.errors import NkiAmbiguityWarning, NkiRangeWarning, NkiValidationError, SimulatorError
from nki_ops.simulator.install import install
from nki_ops.simulator.launch import TensorSpec, jit, profile, simulate
from nki_ops.simulator.report import Report
from nki_ops.simulator.subset import Violation, check_subset

__all__ = [
    "NkiAmbiguityWarning",
    "NkiRangeWarning",
    "NkiValidationError",
    "Report",
    "SimulatorError",
    "TensorSpec",
    "Violation",
    "check_subset",
    "install",
    "jit",
    "profile",
    "simulate",
]
