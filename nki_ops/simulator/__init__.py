"""A CPU simulator of NKI 0.6 for Trainium2: numpy and ml_dtypes, nothing of AWS's.

Kernels use `nki`'s own API. `install()` makes `import nki` resolve to it where the real package is absent;
`simulate(kernel)(*arrays)` runs a kernel and `profile(kernel)(*arrays)` counts what it costs as well. Beside what
`nki.simulate` checks, it accounts for memory, watches partitions and overlapping DMAs, and models engine time.
"""

from nki_ops.simulator.errors import NkiRangeWarning, NkiValidationError, SimulatorError
from nki_ops.simulator.install import install
from nki_ops.simulator.launch import TensorSpec, jit, profile, simulate
from nki_ops.simulator.report import Report
from nki_ops.simulator.subset import Violation, check_subset

__all__ = [
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
