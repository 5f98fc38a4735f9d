"""The release's names as diffusers and transformers store them, written down independently of the package."""

import re


def diffusers_dit(name: str) -> str:
    if match := re.match(r"blocks\.(\d+)\.(.*)", name):
        i, rest = match.groups()
        rest = re.sub(r"^(self_attn|cross_attn)\.([qkv])\.", r"\1.to_\2.", rest)
        rest = re.sub(r"^(self_attn|cross_attn)\.o\.", r"\1.to_out.0.", rest)
        rest = rest.replace("self_attn", "attn1").replace("cross_attn", "attn2").replace("norm3", "norm2")
        rest = rest.replace("ffn.0", "ffn.net.0.proj").replace("ffn.2", "ffn.net.2")
        return f"blocks.{i}.{rest.replace('modulation', 'scale_shift_table')}"
    for old, new in {
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "head.modulation": "scale_shift_table",
        "head.head": "proj_out",
    }.items():
        name = name.replace(old, new)
    return name


def diffusers_vae(name: str) -> str:
    if re.match(r"conv[12]\.", name):
        return name.replace("conv1", "quant_conv").replace("conv2", "post_quant_conv")
    half, stage, *rest = name.split(".")
    if stage in ("conv1", "head"):
        new = {"conv1": "conv_in", "0": "norm_out", "2": "conv_out"}[stage if stage == "conv1" else rest.pop(0)]
        return ".".join([half, new, *rest])
    index, *rest = rest
    if rest[0] == "residual":
        rest[:2] = [{"0": "norm1", "2": "conv1", "3": "norm2", "6": "conv2"}[rest[1]]]
    elif rest[0] == "shortcut":
        rest[0] = "conv_shortcut"
    if stage == "middle":
        block = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}[index]
        return ".".join([half, "mid_block", block, *rest])
    if stage == "downsamples":
        return ".".join([half, "down_blocks", index, *rest])
    block, place = divmod(int(index), 4)
    where = "upsamplers.0" if place == 3 else f"resnets.{place}"
    return ".".join([half, "up_blocks", str(block), where, *rest])


def transformers_text(name: str) -> str:
    if name.startswith("token_embedding"):
        return "shared.weight"
    if name == "norm.weight":
        return "encoder.final_layer_norm.weight"
    _, i, rest = name.split(".", 2)
    layer = {
        "norm1": "layer.0.layer_norm", "norm2": "layer.1.layer_norm",
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
        "ffn.gate.0": "layer.1.DenseReluDense.wi_0", "ffn.fc1": "layer.1.DenseReluDense.wi_1",
        "ffn.fc2": "layer.1.DenseReluDense.wo",
    } | {f"attn.{p}": f"layer.0.SelfAttention.{p}" for p in "qkvo"}  # fmt: skip
    return f"encoder.block.{i}.{layer[rest.removesuffix('.weight')]}.weight"


RENAMES = {"dit": diffusers_dit, "vae": diffusers_vae, "text": transformers_text}
