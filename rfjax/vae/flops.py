"""How much arithmetic decoding takes, for measuring how well a device is used."""

from rfjax.config import VAEConfig
from rfjax.vae.plan import decoder_stages


def decode_flops(config: VAEConfig, latent_h: int, latent_w: int, frames: int, first: bool, batch: int = 1) -> int:
    """Floating-point operations (2 a multiply-add) of `VAE.decode` on a chunk of `frames` latent frames.

    Counts convolutions, projections and the attention; the elementwise rest is left out. The convolution after nearest
    upsampling counts as the 2x2 phases it comes down to (4 products a pixel instead of 9), all others in their direct
    form. In float32 on a CPU most of these run in about half the operations counted here (see `rfjax.vae.conv`), so
    there the rate by this count may exceed that of a plain matmul.
    """
    stages = decoder_stages(config)
    pixels = batch * frames * latent_h * latent_w  # at the current stage, over all frames

    def res_block(dim_in: int, dim_out: int) -> int:
        shortcut = dim_in * dim_out if dim_in != dim_out else 0
        return 27 * dim_in * dim_out + 27 * dim_out * dim_out + shortcut

    top = stages[0].dim_in
    attention = 4 * top * top + 2 * top * latent_h * latent_w
    conv_in = 27 * config.z_dim * top
    products = pixels * (config.z_dim**2 + conv_in + 2 * res_block(top, top) + attention)
    for plan in stages:
        blocks = res_block(plan.dim_in, plan.dim_out)
        blocks += (plan.num_blocks - 1) * res_block(plan.dim_out, plan.dim_out)
        products += pixels * blocks
        if plan.time:
            single = pixels // frames if first else 0
            products += (pixels - single) * 3 * plan.dim_out * 2 * plan.dim_out
            pixels, frames = 2 * pixels - single, 2 * frames - first
        if plan.resample:
            pixels *= 4
            products += pixels * 4 * plan.dim_out * (plan.dim_out // 2)
    return 2 * (products + pixels * 27 * stages[-1].dim_out * 3)
