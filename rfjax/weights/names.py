"""The names that tensors go by: brings every known layout of the Wan2.1 parts to the names of the release."""

import re
from collections.abc import Iterable, Mapping

from rfjax.errors import InputError

# Attributes that torch's wrappers (FSDP, compile, activation checkpoints, DDP) put into names, at any depth.
_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"}
# Attributes under which training code and ComfyUI hold the whole network.
_OWNERS = {"model", "diffusion_model"}

# A tensor that a part has in the release's naming and no other part has.
_MARKS = {
    "dit": "patch_embedding.weight",
    "vae": "decoder.conv1.weight",
    "text": "token_embedding.weight",
}
TITLES = {"dit": "the Wan DiT", "vae": "the Wan2.1 VAE", "text": "the umT5 encoder"}

# Diffusers and transformers names -> names of the release: (a name only that layout has, rules in order).
_DIT_RULES = (
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"^proj_out\.", "head.head."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
)
_VAE_RULES = (
    (r"\.norm1\.", ".residual.0."),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.", ".head.0."),
    (r"\.conv_out\.", ".head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"^encoder\.down_blocks\.", "encoder.downsamples."),
)
_TEXT_RULES = (
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.block\.", "blocks."),
    (r"\.layer\.0\.layer_norm\.", ".norm1."),
    (r"\.layer\.1\.layer_norm\.", ".norm2."),
    (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
    (r"\.layer\.0\.SelfAttention\.", ".attn."),
    (r"\.layer\.1\.DenseReluDense\.wi_0\.", ".ffn.gate.0."),
    (r"\.layer\.1\.DenseReluDense\.wi_1\.", ".ffn.fc1."),
    (r"\.layer\.1\.DenseReluDense\.wo\.", ".ffn.fc2."),
    (r"^encoder\.final_layer_norm\.", "norm."),
)
_DIFFUSERS = {
    "condition_embedder.time_proj.weight": _DIT_RULES,
    "post_quant_conv.weight": _VAE_RULES,
    "encoder.final_layer_norm.weight": _TEXT_RULES,
}
_UP_BLOCK = re.compile(r"^decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\.")
_BLOCKS_PER_STAGE = 4  # of the VAE decoder: 3 residual blocks and an upsampler, numbered through in the release


def release_names(names: Iterable[str]) -> dict[str, str]:
    """Maps each name in a file to the release's name of that tensor.

    Wrapper prefixes are dropped wherever they occur; the layouts of diffusers and transformers are renamed. A name
    that no rule knows stays as it is, for the key map to refuse. The second copy that transformers may store of
    umT5's token embedding is left out.

    Raises:
        InputError: two names mean the same tensor.
    """
    plain = {name: _unwrapped(name) for name in names}
    present = set(plain.values())
    rules = next((rules for mark, rules in _DIFFUSERS.items() if mark in present), None)
    if rules is _TEXT_RULES:
        tied = "encoder.embed_tokens.weight"
        plain = {
            name: "shared.weight" if p == tied else p
            for name, p in plain.items()
            if p != tied or "shared.weight" not in present
        }
    renamed = {name: _rename(p, rules) if rules else p for name, p in plain.items()}
    first: dict[str, str] = {}
    for name, new in renamed.items():
        if first.setdefault(new, name) != name:
            raise InputError(f"the file holds {new} twice, as {first[new]} and as {name}")
    return renamed


def identify(names: Iterable[str]) -> str | None:
    """Which part tensors of these release names make up: "dit", "vae", "text" or None."""
    present = set(names)
    return next((part for part, mark in _MARKS.items() if mark in present), None)


def image_to_video(names: Mapping[str, object]) -> bool:
    """Whether these are the tensors of an image-to-video DiT, which has an image embedding on top."""
    return any(name.startswith(("img_emb.", "condition_embedder.image_embedder.")) for name in names)


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _OWNERS:
        parts = parts[1:]
    return ".".join(parts)


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return _UP_BLOCK.sub(_upsample, name)


def _upsample(match: re.Match[str]) -> str:
    stage, resnet = match.groups()
    return f"decoder.upsamples.{_BLOCKS_PER_STAGE * int(stage) + int(resnet or 3)}."
