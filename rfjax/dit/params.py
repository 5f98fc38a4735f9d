"""Where each DiT parameter stands in the release's files (names of Wan2.1's `WanModel`)."""

from collections.abc import Callable

import numpy as np

from rfjax.config import DiTConfig
from rfjax.keymap import Source, identity, linear


def _patch_kernel(weight: np.ndarray) -> np.ndarray:
    """Conv3d weight [dim, c, 1, 2, 2] as the kernel of a projection of patches [(c 2 2), dim]."""
    return weight.reshape(weight.shape[0], -1).T


def _drop_batch(weight: np.ndarray) -> np.ndarray:
    return weight[0]


def key_map(config: DiTConfig) -> dict[str, Source]:
    """NNX parameter path -> torch keys and the transform between them."""
    sources = {
        "patch_embedding.kernel": Source(("patch_embedding.weight",), _patch_kernel),
        "patch_embedding.bias": Source(("patch_embedding.bias",)),
        "head_modulation": Source(("head.modulation",), _drop_batch),
    }
    plain = {
        "text_embedding.up": "text_embedding.0",
        "text_embedding.down": "text_embedding.2",
        "time_in": "time_embedding.0",
        "time_out": "time_embedding.2",
        "time_projection": "time_projection.1",
        "head": "head.head",
    }
    for target, source in plain.items():
        sources[f"{target}.kernel"] = Source((f"{source}.weight",), linear)
        sources[f"{target}.bias"] = Source((f"{source}.bias",))

    def layers(name: str, transform: Callable[[np.ndarray], np.ndarray] = identity) -> Source:
        keys = tuple(f"blocks.{i}.{name}" for i in range(config.num_layers))
        return Source(keys, transform, stacked=True)

    projections = {"ffn.up": "ffn.0", "ffn.down": "ffn.2"}
    for attn in ("self_attn", "cross_attn"):
        projections |= {f"{attn}.{p}": f"{attn}.{p}" for p in "qkvo"}
        for norm in ("norm_q", "norm_k"):
            sources[f"blocks.{attn}.{norm}"] = layers(f"{attn}.{norm}.weight")
    for target, source in projections.items():
        sources[f"blocks.{target}.kernel"] = layers(f"{source}.weight", linear)
        sources[f"blocks.{target}.bias"] = layers(f"{source}.bias")
    sources["blocks.norm3_scale"] = layers("norm3.weight")
    sources["blocks.norm3_bias"] = layers("norm3.bias")
    sources["blocks.modulation"] = layers("modulation", _drop_batch)
    return sources
