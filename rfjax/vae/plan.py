"""The sizes of the encoder's and decoder's stages, as the Wan2.1 VAE lays them out."""

from typing import NamedTuple

from rfjax.config import VAEConfig


class StagePlan(NamedTuple):
    """Residual blocks of one resolution, and the step to the next."""

    dim_in: int
    dim_out: int
    num_blocks: int
    resample: bool  # whether height and width change after the blocks
    time: bool  # whether the frame count changes with them


def encoder_stages(config: VAEConfig) -> tuple[StagePlan, ...]:
    """Stages from pixels to latents."""
    dims = [config.dim * mult for mult in (1, *config.dim_mult)]
    times = (*config.temporal_downsample, False)
    last = len(times) - 1
    return tuple(
        StagePlan(dims[i], dims[i + 1], config.num_res_blocks, i < last, time) for i, time in enumerate(times)
    )


def decoder_stages(config: VAEConfig) -> tuple[StagePlan, ...]:
    """Stages from latents to pixels; an upsampling step halves the channels that the next stage takes."""
    dims = [config.dim * mult for mult in reversed(config.dim_mult)]
    times = (*reversed(config.temporal_downsample), False)
    ins = (dims[0], *(dim // 2 for dim in dims))
    last = len(times) - 1
    return tuple(StagePlan(ins[i], dims[i], config.num_res_blocks + 1, i < last, time) for i, time in enumerate(times))
