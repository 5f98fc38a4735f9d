"""The operations that decide whether video is real-time: attention, 3-D rotary embedding, KV cache update.

Model code calls these functions and nothing below them, so a backend with its own kernels plugs in here. This
package imports nothing of rfjax. Letters: B batch, T tokens, N heads, D head dim, C = N * D channels.
"""

from nki_ops.xla import attention, rms_norm, rms_norm_rope_3d, rotate, update_cache

__all__ = ["attention", "rms_norm", "rms_norm_rope_3d", "rotate", "update_cache"]
