"""The reader of torch's files: every value right, no code run, one clear line for every broken file."""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_format import STORAGE_NAMES, Call, Global, Storage, Tensor, write_torch

from rfjax.errors import InputError
from rfjax.weights.files import read_weights

FILE = "checkpoints/rolling_forcing_dmd.pt"
RNG = np.random.default_rng(0)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "weights.pt"


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@st.composite
def views(draw) -> tuple[np.ndarray, list[Tensor]]:
    """A storage and tensors on it: at any offset, transposed, stepped, or expanded by a stride of 0."""
    dtype = draw(st.sampled_from(list(STORAGE_NAMES)))
    size = draw(st.integers(1, 64))
    values = RNG.integers(0, 2 if dtype == np.bool_ else 256, size * dtype.itemsize, np.uint8).view(dtype)
    storage, tensors = Storage(values), []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        strides = tuple(draw(st.integers(0, 8)) for _ in shape)
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 in shape or last >= size:
            shape, strides, last = (size,), (1,), size - 1
        tensors.append(Tensor(storage, draw(st.integers(0, size - 1 - last)), shape, strides))
    return values, tensors


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(views(), min_size=1, max_size=3), st.sampled_from(["little", "big", None]))
def test_every_view_of_every_dtype_is_read(path, storages, byteorder):
    tensors = [(values, tensor) for values, on_it in storages for tensor in on_it]
    write_torch(path, {f"t{i}": tensor for i, (_, tensor) in enumerate(tensors)}, byteorder=byteorder)
    content = read_weights(path)
    for i, (values, t) in enumerate(tensors):
        strides = tuple(s * values.itemsize for s in t.strides)
        expected = np.lib.stride_tricks.as_strided(values[t.offset :], t.shape, strides)
        assert equal(content[f"t{i}"], expected)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_raises_nothing_but_input_errors(path, data):
    write_torch(path, {"a": np.arange(6.0).reshape(2, 3), "b": OrderedDict(c=np.ones(3, np.float16))})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_weights(path)
    except InputError as error:
        assert "\n" not in str(error)


def test_nested_containers_and_parameters(path):
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    parameter = Call(Global("torch._utils", "_rebuild_parameter"), (Tensor(Storage(weight.ravel()), 0, (2, 3), (3, 1)),
                                                                    True, OrderedDict()))  # fmt: skip
    size = Call(Global("torch", "Size"), ((2, 3),))
    write_torch(path, {"generator": OrderedDict(w=parameter), "step": 7, "rest": [None, True, 0.5, "x", size]})
    content = read_weights(path)
    assert equal(content["generator"]["w"], weight)
    assert content["step"] == 7 and content["rest"] == [None, True, 0.5, "x", (2, 3)]


def test_golden_entries_share_storage(golden):
    content = read_weights(golden / "tiny_a" / FILE)
    raw, ema = content["generator"], content["generator_ema"]
    shared, own = "blocks.0.self_attn.q.weight", "blocks.1.self_attn.q.weight"
    assert np.shares_memory(raw[f"model.{shared}"], ema[f"model._fsdp_wrapped_module.{shared}"])
    assert not np.array_equal(raw[f"model.{own}"], ema[f"model._fsdp_wrapped_module.{own}"])


def test_tensors_are_views_of_the_mapped_file(path):
    write_torch(path, {"w": np.ones((4, 4), np.float32)})
    weight = read_weights(path)["w"]
    assert not weight.flags.owndata and not weight.flags.writeable


@pytest.mark.parametrize("fraction", [0.0001, 0.001, 0.01, 0.3, 0.9, 0.9999])
def test_truncated_download(golden, path, fraction):
    whole = (golden / "tiny_a" / FILE).read_bytes()
    path.write_bytes(whole[: int(fraction * len(whole))])
    message = error_of(path)
    assert "incomplete download" in message and f"{int(fraction * len(whole))} bytes" in message
    if 0.01 <= fraction <= 0.9:  # the pickle at the start is whole and says how much is to come
        assert "of at least 8282624" in message


@pytest.mark.parametrize("dumps", [pickle.dumps, lambda o: pickle.dumps(o, 2), lambda o: pickle.dumps(o, 0)])
def test_code_in_a_pickle_does_not_run(path, tmp_path, dumps):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps({"w": Payload()}))
    error_of(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "builtins.getattr", "numpy._core.multiarray.scalar", "torch.nn.Linear"]
)
def test_refused_names_are_told(path, name):
    module, _, attribute = name.rpartition(".")
    write_torch(path, {"w": Call(Global(module, attribute), ("touch ran",))})
    assert name in error_of(path)


@pytest.mark.parametrize("pickled", [b"\x80\x02Nr\xff\xff\xff\xff.", b"\x80\x05\x96" + b"\xff" * 7 + b"\x00."])
def test_pickles_that_ask_for_all_memory_are_refused(path, pickled):
    """A memo number of 2^32, and a bytearray of 2^56: both are allocated before they are read."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    assert "damaged" in error_of(path)


def test_quantized_tensors_are_refused(path):
    args = (None, 0, (1,), (1,), False, OrderedDict(), Global("torch", "float8_e4m3fn"))
    write_torch(path, {"w": Call(Global("torch._utils", "_rebuild_tensor_v3"), args)})
    assert "_rebuild_tensor_v3" in error_of(path) or "float8" in error_of(path)


@pytest.mark.parametrize(
    "offset, shape, strides", [(0, (7,), (1,)), (6, (1,), (1,)), (-1, (2,), (1,)), (0, (2,), (-1,))]
)
def test_views_beyond_their_storage_are_refused(path, offset, shape, strides):
    write_torch(path, {"w": Tensor(Storage(np.zeros(6, np.float32)), offset, shape, strides)})
    assert "damaged" in error_of(path)


def test_other_archives(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("document.xml", "<x/>")
    assert "not a torch file" in error_of(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    assert "compressed" in error_of(path)


def test_zip64_records(path, monkeypatch):
    """Archives beyond 4 GB keep sizes and offsets in extra fields; here the limit is lowered instead."""
    weight = np.arange(64, dtype=np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 16)
        write_torch(path, {"w": weight})
    assert equal(read_weights(path)["w"], weight)
