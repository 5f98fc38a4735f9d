"""Converting a release: the values of the file, the choice of weights, and nothing half written on any failure."""

import errno
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from diffusers_names import RENAMES
from safetensors.numpy import save_file
from torch_format import write_torch

from rfjax.config import PRESETS
from rfjax.errors import InputError
from rfjax.weights import store
from rfjax.weights.convert import convert
from rfjax.weights.fill import flatten
from rfjax.weights.parts import abstract_part, key_map
from rfjax.weights.release import read_state_dict

DIT = "checkpoints/rolling_forcing_dmd.pt"
WAN = "wan_models/Wan2.1-T2V-1.3B"
VAE, TEXT = f"{WAN}/Wan2.1_VAE.pth", f"{WAN}/models_t5_umt5-xxl-enc-bf16.pth"
FILES = {"dit": DIT, "vae": VAE, "text": TEXT}


@pytest.fixture(scope="module")
def release(golden) -> Path:
    return golden / "tiny_a"


@pytest.fixture
def copy(release, tmp_path) -> Path:
    """A copy of the release to break."""
    return shutil.copytree(release, tmp_path / "release", ignore=shutil.ignore_patterns("golden", "tiny_config.json"))


@pytest.fixture
def dst(tmp_path) -> Path:
    return tmp_path / "out" / "checkpoint"


def arrays(path: Path, part: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    state = store.load_params(path, part, abstract_part(part, store.load_config(path), dtype)[1])
    return {name: np.asarray(leaf) for name, leaf in flatten(state).items()}


def refused(src, dst, **options) -> str:
    """The message of a conversion that is refused and leaves nothing."""
    with pytest.raises(InputError) as caught:
        convert(src, dst, **options)
    assert "\n" not in str(caught.value)
    assert not dst.exists() and not list(dst.parent.glob(".*"))
    return str(caught.value)


def tensors_of(release: Path, part: str) -> dict[str, np.ndarray]:
    return dict(read_state_dict(release / FILES[part], "ema").tensors)


def assert_stored(checkpoint: Path, part: str, tensors: dict[str, np.ndarray]) -> None:
    sources, stored = key_map(part, store.load_config(checkpoint)), arrays(checkpoint, part)
    assert set(sources) == set(stored)
    for path, source in sources.items():
        values = [source.transform(tensors[key]).astype(np.float32) for key in source.keys]
        assert np.array_equal(stored[path], np.stack(values) if source.stacked else values[0]), path


@pytest.mark.parametrize("part", FILES)
def test_stored_values_are_those_of_the_file(release, tiny_checkpoint, part):
    assert_stored(tiny_checkpoint, part, tensors_of(release, part))


def test_all_tensors_of_the_real_release_at_small_sizes(golden, copy, dst):
    """The real lists of 825, 194 and 242 tensors, every width divided."""
    lists = {"dit": "keys_full_dit.json", "vae": "keys_full_vae.json", "text": "keys_full_t5.json"}
    widths = {
        "dit": {1536: 48, 9216: 288, 8960: 64, 4096: 32, 256: 16},
        "vae": {width: width // 16 for width in (96, 192, 384, 768, 1152)},
        "text": {256384: 300, 4096: 32, 10240: 40, 64: 4},
    }
    rng = np.random.default_rng(0)
    for part, file in lists.items():
        content = json.loads((golden / file).read_text())
        shapes = {name: [widths[part].get(n, n) for n in e["shape"]] for name, e in content["keys"].items()}
        tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        write_torch(copy / FILES[part], {"generator_ema": tensors} if part == "dit" else tensors)
        if part == "dit":
            sizes = content["config"] | {"dim": 48, "ffn_dim": 64, "freq_dim": 16}
            (copy / WAN / "config.json").write_text(json.dumps(sizes))
    made = convert(copy, dst)
    assert (made.config.dit.num_layers, made.config.text.num_layers) == (30, 24)
    for part in FILES:
        assert_stored(dst, part, tensors_of(copy, part))


def test_linear_layers_are_transposed_and_stacked_in_order(release, tiny_checkpoint):
    tensors, stored = tensors_of(release, "dit"), arrays(tiny_checkpoint, "dit")
    for i in range(3):
        weight = tensors[f"blocks.{i}.ffn.0.weight"]
        assert np.array_equal(stored["blocks.ffn.up.kernel"][i], weight.T)


def test_config_and_provenance(release, tiny_checkpoint):
    assert store.load_config(tiny_checkpoint) == PRESETS["tiny"]
    content = json.loads((tiny_checkpoint / "config.json").read_text())
    assert content["provenance"]["weights"] == "ema"
    assert content["provenance"]["files"]["dit"] == {
        "name": "rolling_forcing_dmd.pt",
        "bytes": (release / DIT).stat().st_size,
    }
    for name in ("tokenizer.json", "spiece.model", "tokenizer_config.json", "special_tokens_map.json"):
        original = release / WAN / "google/umt5-xxl" / name
        assert (tiny_checkpoint / "tokenizer" / name).read_bytes() == original.read_bytes()


def test_raw_weights(release, tiny_checkpoint, dst):
    made = convert(release, dst, weights="raw")
    assert made.weights == "raw" and store.load_json(dst)["provenance"]["weights"] == "raw"
    raw, ema = arrays(dst, "dit"), arrays(tiny_checkpoint, "dit")
    tensors = read_state_dict(release / DIT, "raw").tensors
    assert np.array_equal(raw["blocks.ffn.up.kernel"][1], tensors["blocks.1.ffn.0.weight"].T)
    assert not np.array_equal(raw["blocks.ffn.up.kernel"][1], ema["blocks.ffn.up.kernel"][1])
    assert np.array_equal(raw["blocks.ffn.up.kernel"][0], ema["blocks.ffn.up.kernel"][0])  # shared in this file


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_dtypes(release, dst, dtype):
    made = convert(release, dst, dtype=dtype)
    own = {"dit": "float32", "vae": "float32", "text": "bfloat16"}
    assert made.dtypes == (dict.fromkeys(own, dtype) if dtype else own)
    matrices = {"dit": "blocks.ffn.up.kernel", "text": "blocks.attn.q.kernel", "vae": None}
    for part, matrix in matrices.items():
        stored = store.stored_arrays(dst, part)
        if matrix:
            assert stored[matrix].dtype == made.dtypes[part]
        for name, array in stored.items():
            if "norm" in name or name.startswith("encoder."):
                assert array.dtype == np.float32
    weight = tensors_of(release, "dit")["blocks.2.ffn.0.weight"]
    numpy_dtype = ml_dtypes.bfloat16 if made.dtypes["dit"] == "bfloat16" else made.dtypes["dit"]
    assert np.array_equal(arrays(dst, "dit")["blocks.ffn.up.kernel"][2], weight.T.astype(numpy_dtype))
    size = sum(file.stat().st_size for part in FILES for file in (dst / part).rglob("*") if file.is_file())
    assert made.nbytes <= size < made.nbytes + 500_000  # what Orbax adds differs from run to run


def test_files_named_one_by_one(release, tiny_checkpoint, dst, tmp_path):
    """Bare state dicts, as safetensors: no choice of weights."""
    for part in FILES:
        save_file({f"model.{k}": v.copy() for k, v in tensors_of(release, part).items()}, tmp_path / f"{part}.st")
    made = convert(
        tmp_path / "dit.st",
        dst,
        vae=tmp_path / "vae.st",
        text=tmp_path / "text.st",
        tokenizer=release / WAN / "google/umt5-xxl",
        config=release / WAN / "config.json",
    )
    assert made.weights == "bare" and made.config == PRESETS["tiny"]
    for part in FILES:
        one, other = arrays(dst, part), arrays(tiny_checkpoint, part)
        assert all(np.array_equal(one[name], other[name]) for name in other)


def test_diffusers_folder(release, tiny_checkpoint, dst, tmp_path):
    src = tmp_path / "diffusers"
    folders = {"dit": "transformer", "vae": "vae", "text": "text_encoder"}
    for part, folder in folders.items():
        (src / folder).mkdir(parents=True)
        tensors = {RENAMES[part](name): v.copy() for name, v in tensors_of(release, part).items()}
        save_file(tensors, src / folder / "model.safetensors")
    (src / "model_index.json").write_text("{}")
    config = {
        "_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "attention_head_dim": 16, "num_layers": 3,
        "ffn_dim": 256, "freq_dim": 64, "in_channels": 16, "out_channels": 16, "text_dim": 64, "eps": 1e-6,
        "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "cross_attn_norm": True, "image_dim": None,
        "added_kv_proj_dim": None, "rope_max_seq_len": 1024,
    }  # fmt: skip
    (src / "transformer/config.json").write_text(json.dumps(config))
    shutil.copytree(release / WAN / "google/umt5-xxl", src / "tokenizer")
    convert(src, dst)
    for part in FILES:
        one, other = arrays(dst, part), arrays(tiny_checkpoint, part)
        assert all(np.array_equal(one[name], other[name]) for name in other)
    assert store.load_config(dst).dit.dim == 192


def test_all_misfits_are_told_at_once(copy, dst):
    dit, vae = tensors_of(copy, "dit"), tensors_of(copy, "vae")
    missing = dit.pop("blocks.1.ffn.2.bias")
    dit |= {"blocks.0.extra": missing, "head.head.bias": np.zeros(7, np.float32)}
    dit["blocks.2.norm3.bias"] = np.zeros(192, np.int32)
    vae.pop("conv2.bias")
    write_torch(copy / DIT, {"generator_ema": dit})
    write_torch(copy / VAE, vae)
    message = refused(copy, dst)
    assert "1 missing (blocks.1.ffn.2.bias); 1 unknown (blocks.0.extra); 2 of another shape or type" in message
    assert "head.head.bias is [7] for a parameter [64]" in message and "blocks.2.norm3.bias is int32" in message
    assert "Wan2.1 VAE does not fit: 1 missing (conv2.bias)" in message


def test_many_misfits_are_counted(copy, dst):
    config = json.loads((copy / WAN / "config.json").read_text())
    (copy / WAN / "config.json").write_text(json.dumps(config | {"num_layers": 4}))
    message = refused(copy, dst)
    assert "27 missing (" in message and "blocks.3.cross_attn.k.bias" in message and "and 7 more" in message


@pytest.mark.parametrize("given, part", [(VAE, "dit"), (DIT, "vae"), (VAE, "text"), (TEXT, "dit")])
def test_weights_of_another_part(release, dst, given, part):
    titles = {DIT: "the Wan DiT", VAE: "the Wan2.1 VAE", TEXT: "the umT5 encoder"}
    message = refused(release, dst, **{part: release / given})
    assert f"holds {titles[given]}, where {titles[FILES[part]]} is needed" in message


def test_image_to_video_weights(copy, dst):
    dit = tensors_of(copy, "dit")
    write_torch(copy / DIT, dit | {"img_emb.proj.0.weight": np.ones(4, np.float32)})
    assert "image-to-video" in refused(copy, dst)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(copy, dst, value):
    vae = {name: tensor.copy() for name, tensor in tensors_of(copy, "vae").items()}
    vae["decoder.middle.0.residual.2.weight"].flat[5] = value
    write_torch(copy / VAE, vae)
    assert "decoder.middle.0.residual.2.weight has 1 values that are NaN or infinite" in refused(copy, dst)


def test_weights_beyond_float16(copy, dst):
    dit = tensors_of(copy, "dit") | {"blocks.1.ffn.0.bias": np.full(256, 1e6, np.float32)}
    write_torch(copy / DIT, dit)
    assert "blocks.1.ffn.0.bias has values beyond the range of float16" in refused(copy, dst, dtype="float16")


@pytest.mark.parametrize(
    "content, said",
    [
        ({"generator": OrderedDict(w=np.ones(1, np.float32))}, "has no ema weights; choose --weights raw"),
        ({"model": {"w": np.ones(1, np.float32)}, "step": 3}, "not a state dict of tensors: it holds model, step"),
        ({}, "it holds nothing"),
        ([1, 2], "holds a list"),
    ],
)
def test_files_without_the_weights_asked_for(copy, dst, content, said):
    write_torch(copy / DIT, content)
    assert said in refused(copy, dst)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "i2v"}, "model_type 'i2v'"),
        ({"_class_name": "UNet"}, "'UNet'"),
        ({"guidance_embed": True}, "unknown field 'guidance_embed'"),
        ({"dim": "192"}, "dim '192'"),
        ({"dim": 190}, "190"),
        ({"num_heads": None}, "num_heads None"),
        ({"qk_norm": False}, "qk_norm False"),
        ({"text_dim": 32}, "32"),
    ],
)
def test_config_of_another_model(copy, dst, change, said):
    config = json.loads((copy / WAN / "config.json").read_text())
    (copy / WAN / "config.json").write_text(json.dumps(config | change))
    assert said in refused(copy, dst)


def test_config_without_a_field(copy, dst):
    config = json.loads((copy / WAN / "config.json").read_text())
    del config["num_heads"]
    (copy / WAN / "config.json").write_text(json.dumps(config))
    assert "num_heads" in refused(copy, dst)


def test_missing_files_are_told_at_once(copy, dst, tmp_path):
    (copy / DIT).unlink()
    (copy / VAE).unlink()
    assert "dit (found 0), vae (found 0)" in refused(copy, dst)
    assert "there is no /nowhere" in refused(Path("/nowhere"), dst)
    assert "no such file: " in refused(copy, dst, dit=tmp_path / "a.pt", vae=tmp_path / "b.pth")
    shutil.copy(copy / TEXT, copy / WAN / "models_t5_other.pth")
    assert "text (found 2)" in refused(copy, dst)
    assert "dit (found 0)" in refused(None, dst)


def test_truncated_download_leaves_nothing(copy, dst):
    whole = (copy / TEXT).read_bytes()
    (copy / TEXT).write_bytes(whole[: len(whole) // 2])
    assert "incomplete download" in refused(copy, dst)


@pytest.mark.parametrize("option", [{"weights": "best"}, {"dtype": "int8"}])
def test_unknown_options(release, dst, option):
    assert next(iter(option.values())) in refused(release, dst, **option)


def test_taken_destination(release, dst):
    dst.mkdir(parents=True)
    (dst / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="exists"):
            convert(release, dst, overwrite=overwrite)
    assert [file.name for file in dst.iterdir()] == ["thesis.txt"]


def test_overwriting_a_checkpoint(release, tiny_checkpoint, dst, monkeypatch):
    shutil.copytree(tiny_checkpoint, dst)
    with pytest.raises(InputError, match="--force"):
        convert(release, dst)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(release, dst, weights="raw", overwrite=True)
    assert store.load_json(dst)["provenance"]["weights"] == "ema"  # the old one stands
    convert(release, dst, weights="raw", overwrite=True)
    assert store.load_json(dst)["provenance"]["weights"] == "raw"
    assert [path.name for path in dst.parent.iterdir()] == [dst.name]


def test_no_space_is_found_out_first(release, dst, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    monkeypatch.setattr(store, "save_part", lambda *_: pytest.fail("written without space"))
    assert "no space: the checkpoint takes 0.01 GB" in refused(release, dst)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("RESOURCE_EXHAUSTED: No space left")]
)
def test_no_space_while_writing(release, dst, monkeypatch, error):
    save_part = store.save_part

    def full(folder, part, params):
        save_part(folder, part, params)
        if part == "vae":
            raise error

    monkeypatch.setattr(store, "save_part", full)
    assert "no space left" in refused(release, dst)
