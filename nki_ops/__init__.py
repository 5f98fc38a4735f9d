"""The operations that decide whether video is real-time: attention, 3-D rotary embedding, KV cache update.

Model code calls these functions and nothing below them. Each has two forms: one in plain XLA, and a kernel for
Trainium, which also runs on the CPU, simulated; `backend()` says which is used. This package imports nothing of rfjax.
Letters: B batch, T tokens, N heads, D head dim, C = N * D channels.
"""

from nki_ops import cuda, primitives, xla
from nki_ops.dispatch import backend, switched, using
from nki_ops.errors import KernelError

attention = switched(cuda.attention, primitives.attention)
rms_norm = xla.rms_norm  # a compiler does well on it
rms_norm_rope_3d = switched(xla.rms_norm_rope_3d, primitives.rms_norm_rope_3d)
rotate = switched(xla.rotate, primitives.rotate)
update_cache = switched(xla.update_cache, primitives.update_cache)

__all__ = [
    "KernelError",
    "attention",
    "backend",
    "rms_norm",
    "rms_norm_rope_3d",
    "rotate",
    "update_cache",
    "using",
]
