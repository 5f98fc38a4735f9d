"""Where each VAE parameter stands in the release's Wan2.1_VAE.pth."""

from functools import partial

import numpy as np

from rfjax.config import VAEConfig
from rfjax.keymap import Source, linear
from rfjax.vae.plan import StagePlan, decoder_stages, encoder_stages


def _conv(weight: np.ndarray) -> np.ndarray:
    """Torch convolution weight [out, in, *size] as [*size, in, out]."""
    return np.moveaxis(weight, (0, 1), (-1, -2))


def _pixel(weight: np.ndarray) -> np.ndarray:
    """Weight [out, in, 1, ...] of a convolution over single pixels as a linear kernel [in, out]."""
    return linear(weight.reshape(weight.shape[:2]))


def _third(part: int, tensor: np.ndarray) -> np.ndarray:
    """Part 0, 1, 2 (query, key, value) of a joint projection's weight or bias."""
    third = np.split(tensor, 3)[part]
    return third if third.ndim == 1 else _pixel(third)


def _flat(gamma: np.ndarray) -> np.ndarray:
    """Norm scale [C, 1, ...] as [C]."""
    return gamma.reshape(-1)


def _layer(target: str, source: str, transform=_conv) -> dict[str, Source]:
    return {
        f"{target}.kernel": Source((f"{source}.weight",), transform),
        f"{target}.bias": Source((f"{source}.bias",)),
    }


def _norm(target: str, source: str) -> dict[str, Source]:
    return {f"{target}.scale": Source((f"{source}.gamma",), _flat)}


def _res_block(target: str, source: str, dim_in: int, dim_out: int) -> dict[str, Source]:
    sources = _norm(f"{target}.norm1", f"{source}.residual.0") | _layer(f"{target}.conv1", f"{source}.residual.2")
    sources |= _norm(f"{target}.norm2", f"{source}.residual.3") | _layer(f"{target}.conv2", f"{source}.residual.6")
    if dim_in != dim_out:
        sources |= _layer(f"{target}.shortcut", f"{source}.shortcut", _pixel)
    return sources


def _middle(target: str, source: str, dim: int) -> dict[str, Source]:
    sources = _res_block(f"{target}.res0", f"{source}.0", dim, dim)
    sources |= _res_block(f"{target}.res1", f"{source}.2", dim, dim)
    attention = f"{target}.attention"
    sources |= _norm(f"{attention}.norm", f"{source}.1.norm")
    sources |= _layer(f"{attention}.out", f"{source}.1.proj", _pixel)
    for part, name in enumerate("qkv"):
        for leaf, key in (("kernel", "weight"), ("bias", "bias")):
            sources[f"{attention}.{name}.{leaf}"] = Source((f"{source}.1.to_qkv.{key}",), partial(_third, part))
    return sources


def _stages(target: str, source: str, stages: tuple[StagePlan, ...]) -> dict[str, Source]:
    """The release numbers the residual blocks and resampling steps of all stages in one row."""
    sources, index = {}, 0
    for i, plan in enumerate(stages):
        for j in range(plan.num_blocks):
            dim_in = plan.dim_in if j == 0 else plan.dim_out
            sources |= _res_block(f"{target}.stage{i}.res{j}", f"{source}.{index}", dim_in, plan.dim_out)
            index += 1
        if plan.resample:
            step = f"{target}.stage{i}.resample"
            sources |= _layer(f"{step}.conv", f"{source}.{index}.resample.1")
            if plan.time:
                sources |= _layer(f"{step}.time_conv", f"{source}.{index}.time_conv")
            index += 1
    return sources


def key_map(config: VAEConfig) -> dict[str, Source]:
    """NNX parameter path -> torch key and the transform between them (names of Wan2.1's VAE)."""
    down, up = encoder_stages(config), decoder_stages(config)
    sources = _layer("encoder.quant", "conv1", _pixel) | _layer("decoder.post_quant", "conv2", _pixel)
    for half in ("encoder", "decoder"):
        sources |= _layer(f"{half}.conv_in", f"{half}.conv1")
        sources |= _norm(f"{half}.head.norm", f"{half}.head.0") | _layer(f"{half}.head.conv", f"{half}.head.2")
    sources |= _middle("encoder.middle", "encoder.middle", down[-1].dim_out)
    sources |= _middle("decoder.middle", "decoder.middle", up[0].dim_in)
    sources |= _stages("encoder", "encoder.downsamples", down)
    sources |= _stages("decoder", "decoder.upsamples", up)
    return sources
