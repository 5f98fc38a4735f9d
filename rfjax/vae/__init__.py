"""The causal video VAE of Wan2.1."""

from rfjax.vae.model import VAE, init_decoder_state, to_uint8

__all__ = ["VAE", "init_decoder_state", "to_uint8"]
