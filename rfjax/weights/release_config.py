"""The model's configuration, from the release's `config.json` and the shapes of its tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rfjax.config import DiTConfig, ModelConfig, TextConfig, VAEConfig
from rfjax.errors import InputError
from rfjax.weights.release import StateDict

_WAN_FIELDS = ("dim", "ffn_dim", "num_heads", "num_layers", "freq_dim", "in_dim", "out_dim", "text_dim", "text_len")
_DIFFUSERS_FIELDS = {
    "ffn_dim": "ffn_dim",
    "num_attention_heads": "num_heads",
    "num_layers": "num_layers",
    "freq_dim": "freq_dim",
    "in_channels": "in_dim",
    "out_channels": "out_dim",
    "text_dim": "text_dim",
}
# Fields that have one value in every model this package runs, and fields that say nothing about it.
_FIXED = {
    "model_type": ("t2v",),
    "qk_norm": (True, "rms_norm_across_heads"),
    "cross_attn_norm": (True,),
    "window_size": ([-1, -1],),
    "added_kv_proj_dim": (None,),
    "image_dim": (None,),
    "pos_embed_seq_len": (None,),
}
_SILENT = ("_class_name", "_diffusers_version", "_name_or_path", "rope_max_seq_len")


def read_config(path: Path, parts: Mapping[str, StateDict]) -> ModelConfig:
    """The model's configuration, from the DiT's `config.json` and, where that is silent, the shapes of tensors.

    Args:
        path: the config.json of the release (or of diffusers' `transformer/`).
        parts: the state dict of each part, as `check_part` accepted it.

    Raises:
        InputError: the config is unreadable, lacks a field, has one of unknown meaning, or is of another model.
    """
    dit, vae, text = (_Shapes(parts[part]) for part in ("dit", "vae", "text"))
    fields = _read_dit_fields(path)
    fields.setdefault("text_dim", dit["text_embedding.0.weight"][1])
    fields.setdefault("patch_size", dit["patch_embedding.weight"][2:])
    try:
        dit_config = DiTConfig(**fields)
    except TypeError as error:
        raise InputError(f"{path}: {error}") from None
    num_buckets, num_heads = text["blocks.0.pos_embedding.embedding.weight"]
    vocab_size, dim = text["token_embedding.weight"]
    return ModelConfig(
        dit=dit_config,
        vae=VAEConfig(dim=vae["encoder.conv1.weight"][0], z_dim=vae["conv2.weight"][0]),
        text=TextConfig(
            vocab_size=vocab_size,
            dim=dim,
            dim_attn=text["blocks.0.attn.q.weight"][0],
            dim_ffn=text["blocks.0.ffn.fc1.weight"][0],
            num_heads=num_heads,
            num_layers=len({name.split(".")[1] for name in parts["text"].tensors if name.startswith("blocks.")}),
            num_buckets=num_buckets,
        ),
    )


class _Shapes:
    def __init__(self, state: StateDict):
        self._state = state

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self._state.tensors:
            raise InputError(f"{self._state.path} lacks {name}, which gives the size of the model")
        return self._state.tensors[name].shape


def _read_dit_fields(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        raise InputError(f"{path} is not JSON") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no JSON object")
    class_name = data.get("_class_name")
    if class_name in ("WanModel", "CausalWanModel"):
        sizes = {name: name for name in _WAN_FIELDS}
    elif class_name == "WanTransformer3DModel":
        sizes = {**_DIFFUSERS_FIELDS, "attention_head_dim": "head_dim"}
    else:
        raise InputError(f"{path} is the config of {class_name!r}; expected WanModel (Wan2.1 text-to-video)")
    fields: dict[str, Any] = {}
    for name, value in data.items():
        if name in sizes:
            fields[sizes[name]] = _checked(path, name, value, type(value) is int and value > 0)
        elif name == "eps":
            fields[name] = _checked(path, name, value, type(value) is float and value > 0)
        elif name == "patch_size":
            is_size = isinstance(value, list) and len(value) == 3 and all(type(n) is int for n in value)
            fields[name] = tuple(_checked(path, name, value, is_size))
        elif name in _FIXED:
            _checked(path, name, value, value in _FIXED[name])
        elif name not in _SILENT:
            raise InputError(f"{path} has the unknown field {name!r}; this is not a Wan2.1 text-to-video model")
    if "head_dim" in fields:
        fields["dim"] = fields.pop("head_dim") * fields.get("num_heads", 1)
    return fields


def _checked(path: Path, name: str, value: Any, supported: bool) -> Any:
    if not supported:
        raise InputError(f"{path}: {name} {value!r} is not that of a Wan2.1 text-to-video model")
    return value
