"""NKI kernels for Trainium2 of the operations in `nki_ops.xla`, written in NKI 0.6.

Each is decorated with `nki.jit`: `kernel(...)` runs on one physical core, `kernel[2](...)` on the two of a logical
NeuronCore, which share the work. Importing this package makes `import nki` give the simulator where AWS's package is
absent; nothing else depends on which of the two it is. docs/kernels.md has the layouts and the modelled costs.
"""

from contextlib import suppress

from nki_ops.simulator import SimulatorError, install

with suppress(SimulatorError):  # AWS's package is there; the kernels import that
    install()

import nki  # noqa: E402  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.attention import attention  # noqa: E402
from nki_ops.kernels.cache import update_cache  # noqa: E402
from nki_ops.kernels.rope import rms_norm_rope_3d, rotate  # noqa: E402

__all__ = ["attention", "nki", "rms_norm_rope_3d", "rotate", "update_cache"]
