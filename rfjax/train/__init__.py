"""Training: the causal VAE, then the DiT with its text encoder on rolling windows, then on its own roll-outs."""

STAGES = ("vae", "encode", "text", "first", "dit", "rollout", "decoder", "export")
