"""Safetensors files, sharded ones, and the things that are found in place of weights."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rfjax.errors import InputError
from rfjax.weights.files import read_weights

TENSORS = {
    "b": np.arange(6, dtype=np.float16).reshape(2, 3),
    "a": np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "scalar": np.float32([[1.5]]).reshape(()),
    "count": np.int64([3]),
}


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def same(content, expected) -> bool:
    return set(content) == set(expected) and all(
        content[k].dtype == v.dtype and np.array_equal(content[k], v) for k, v in expected.items()
    )


def test_safetensors(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    assert same(read_weights(path), TENSORS)


@pytest.mark.parametrize("missing", [1, 20, -20, -200])
def test_truncated_safetensors(tmp_path, missing):
    path = tmp_path / "w.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - missing] if missing > 0 else whole[:-missing])
    message = error_of(path)
    assert "incomplete download" in message
    if missing > 0:
        assert f"of {len(whole)}" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": 8},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_damaged_safetensors_header(tmp_path, entry):
    path = tmp_path / "w.safetensors"
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "damaged" in error_of(path)


def test_quantized_safetensors_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "F8_E4M3" in error_of(path)


def test_header_sizes_that_look_like_other_files(tmp_path):
    """The header's size comes first, and its lowest byte may be that of a pickle."""
    path = tmp_path / "w.safetensors"
    for padding in range(256):
        header = json.dumps({"__metadata__": {"x": "y" * padding}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert read_weights(path) == {}


def sharded(folder: Path) -> Path:
    shards = {name: f"model-{i}-of-4.safetensors" for i, name in enumerate(TENSORS)}
    for name, shard in shards.items():
        save_file({name: TENSORS[name]}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return index


def test_sharded_safetensors(tmp_path):
    index = sharded(tmp_path)
    assert same(read_weights(index), TENSORS)
    (tmp_path / "model-2-of-4.safetensors").unlink()
    with pytest.raises(InputError, match="lacks 1 of 4 shards: model-2-of-4.safetensors"):
        read_weights(index)
    save_file({"other": TENSORS["a"]}, tmp_path / "model-2-of-4.safetensors")
    with pytest.raises(InputError, match="lacks scalar"):
        read_weights(index)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "empty"),
        (b"PK", "incomplete"),
        (b"<!DOCTYPE html><html><body>Sign in to continue</body></html>", "web page"),
        (b"\n  <html lang='en'>" + bytes(100), "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5676292334\n", "git lfs pull"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "old format"),
        (b"not weights at all, just some text", "neither"),
    ],
)
def test_what_is_not_a_weights_file(tmp_path, content, said):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    assert said in error_of(path)


def test_missing_file_and_folder(tmp_path):
    assert "no such file" in error_of(tmp_path / "absent.pt")
    assert "no such file" in error_of(tmp_path / "absent.safetensors.index.json")
    assert "is a folder" in error_of(tmp_path)
