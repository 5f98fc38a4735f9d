"""Where the parameters of the umT5 encoder come from in the Wan2.1 release (models_t5_umt5-xxl-enc-bf16.pth)."""

from rfjax.config import TextConfig
from rfjax.keymap import Source, linear

_MATRICES = {
    "attn.q": "attn.q",
    "attn.k": "attn.k",
    "attn.v": "attn.v",
    "attn.o": "attn.o",
    "ffn.gate": "ffn.gate.0",
    "ffn.fc1": "ffn.fc1",
    "ffn.fc2": "ffn.fc2",
}


def key_map(config: TextConfig) -> dict[str, Source]:
    """The source of every parameter of `UMT5Encoder`, by dotted NNX path."""

    def layers(name: str) -> tuple[str, ...]:
        return tuple(f"blocks.{i}.{name}.weight" for i in range(config.num_layers))

    sources = {
        "token_embedding.embedding": Source(("token_embedding.weight",)),
        "norm.scale": Source(("norm.weight",)),
        "blocks.pos_embedding.embedding": Source(layers("pos_embedding.embedding"), stacked=True),
    }
    for norm in ("norm1", "norm2"):
        sources[f"blocks.{norm}.scale"] = Source(layers(norm), stacked=True)
    for ours, theirs in _MATRICES.items():
        sources[f"blocks.{ours}.kernel"] = Source(layers(theirs), linear, stacked=True)
    return sources
