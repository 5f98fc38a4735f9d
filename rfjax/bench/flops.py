"""Useful floating-point operations of a step, counted from the configuration: a multiply and an add are two.

Counted are matrix products, and in attention the key blocks that are truly attended. Not counted are norms, softmax,
activations, and anything an implementation computes twice.
"""

from rfjax.config import DiTConfig, ModelConfig


def dit_tokens(config: ModelConfig, latent_height: int, latent_width: int) -> int:
    """Tokens of one latent frame."""
    _, patch_h, patch_w = config.dit.patch_size
    return latent_height * latent_width // (patch_h * patch_w)


def rolling_step_flops(config: ModelConfig, latent_height: int, latent_width: int, batch: int = 1) -> int:
    """One steady step: the clean pass of a block and the denoising of a full window, both over all key blocks.

    The text embedding is not in it: a prompt's keys and values are computed once.
    """
    dit, rolling = config.dit, config.rolling
    block = rolling.block_frames * dit_tokens(config, latent_height, latent_width)
    tokens = (rolling.window_blocks + 1) * block
    groups = rolling.window_blocks + 1  # runs of frames that share a timestep
    linear = 6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim  # self-attention q k v o, cross-attention q o, and the FFN
    keys = rolling.max_attention_blocks * block + dit.text_len
    layer = 2 * tokens * linear + 4 * tokens * keys * dit.dim
    return batch * (dit.num_layers * layer + _dit_ends(dit, tokens)) + 2 * groups * _time_weights(dit)


def _dit_ends(dit: DiTConfig, tokens: int) -> int:
    patch = dit.patch_size[1] * dit.patch_size[2]
    return 2 * tokens * patch * (dit.in_dim + dit.out_dim) * dit.dim


def _time_weights(dit: DiTConfig) -> int:
    return dit.freq_dim * dit.dim + 7 * dit.dim**2
