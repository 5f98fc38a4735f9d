"""The umT5 encoder against recorded numbers of the PyTorch release."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rfjax.config import UMT5_XXL, preset
from rfjax.errors import InputError
from rfjax.text import UMT5Encoder
from rfjax.text.model import relative_position_buckets
from rfjax.text.params import key_map
from rfjax.weights.files import read_weights
from rfjax.weights.fill import check_fit, fill, flatten

TINY = preset("tiny").text


def load(tensors, dtype):
    graph, state = nnx.split(nnx.eval_shape(lambda: UMT5Encoder(TINY, dtype=dtype, rngs=nnx.Rngs(0))))
    params = flatten(state)
    arrays = fill("umT5", key_map(TINY), params, tensors)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(arrays[p]) for p in params]))


@pytest.fixture(scope="module")
def release(golden):
    return read_weights(golden / "tiny_a/wan_models/Wan2.1-T2V-1.3B/models_t5_umt5-xxl-enc-bf16.pth")


@pytest.fixture(scope="module")
def recorded(load_golden):
    return dict(load_golden("t5")[0])


@pytest.fixture(scope="module", params=[jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def encoder(request, release):
    return nnx.jit(load(release, request.param))


def padded(ids, length):
    return np.pad(ids, ((0, 0), (0, length - ids.shape[1])))


def test_context_equals_the_release(encoder, recorded, assert_parity):
    context = encoder(recorded["ids"], recorded["mask"].sum(1))
    assert context.dtype == jnp.float32
    assert_parity("text features", context, recorded["context"], 1e-5)


def test_a_long_prompt_equals_the_release(encoder, recorded, assert_parity):
    context = encoder(padded(recorded["long_ids"], 512), np.array([300]))
    assert_parity("text features", context[:, :300], recorded["long_context"], 1e-5)
    assert not np.any(context[:, 300:])


def test_the_first_block_equals_the_release(release, recorded):
    model = load(release, jnp.float32)
    graph, layers = nnx.split(model.blocks)
    block = nnx.merge(graph, jax.tree.map(lambda p: p[0], layers))
    buckets = relative_position_buckets(recorded["ids"].shape[1], TINY.num_buckets, TINY.max_distance)
    out = block(model.token_embedding(recorded["ids"]), buckets, recorded["mask"].astype(bool))
    np.testing.assert_allclose(out, recorded["block0_out"], rtol=0, atol=1e-5)


def test_position_bias_equals_the_release(release, recorded):
    table = load(release, jnp.float32).blocks.pos_embedding.embedding[...][-1]
    bias = table[relative_position_buckets(32, TINY.num_buckets, TINY.max_distance)]
    np.testing.assert_array_equal(bias.transpose(2, 0, 1), recorded["last_block_pos_bias"][0])


def test_buckets_equal_the_release(recorded):
    buckets = relative_position_buckets(512, 32, 128)
    query, key = np.indices(buckets.shape)
    np.testing.assert_array_equal(buckets, recorded["rel_bucket"][key - query - recorded["rel_pos"][0]])


def test_a_prompt_does_not_depend_on_its_batch(encoder, recorded):
    ids, lengths = recorded["ids"], recorded["mask"].sum(1)
    together = encoder(ids, lengths)
    for row in range(len(ids)):
        alone = encoder(ids[row : row + 1], lengths[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], rtol=0, atol=1e-5)


def test_padding_changes_nothing(encoder, recorded):
    ids, lengths = recorded["ids"], recorded["mask"].sum(1)
    wide = padded(ids, 96)
    wide[:, 40:] = 7  # not even what stands in the padding
    np.testing.assert_allclose(
        encoder(wide, lengths), np.pad(encoder(ids, lengths), ((0, 0), (0, 64), (0, 0))), rtol=0, atol=1e-5
    )


def test_random_weights_give_finite_features_of_unit_size():
    model = UMT5Encoder(TINY, dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 48))
    context = model(ids, np.array([48, 48]))
    assert np.all(np.isfinite(context))
    np.testing.assert_allclose(np.mean(np.square(context)), 1, rtol=0.01)


def test_layers_start_with_different_weights():
    kernel = UMT5Encoder(TINY, rngs=nnx.Rngs(0)).blocks.attn.q.kernel[...]
    assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize("config", [UMT5_XXL, TINY], ids=["xxl", "tiny"])
def test_key_map_fits_every_parameter_and_every_tensor(config, release, golden):
    if config is TINY:
        shapes = {key: tensor.shape for key, tensor in release.items()}
    else:
        record = json.loads((golden / "keys_full_t5.json").read_text())
        shapes = {key: tuple(entry["shape"]) for key, entry in record["keys"].items()}
    tensors = {key: np.broadcast_to(np.float32(0), shape) for key, shape in shapes.items()}
    model = nnx.eval_shape(lambda: UMT5Encoder(config, rngs=nnx.Rngs(0)))
    check_fit("umT5", key_map(config), flatten(nnx.state(model)), tensors)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_full_size_needs_little_memory_beside_its_weights(dtype):
    """Compiles only. Left to itself, XLA's CPU backend converts all layers to float32 at once: 19 GB."""
    graph, state = nnx.split(nnx.eval_shape(lambda: UMT5Encoder(UMT5_XXL, dtype=dtype, rngs=nnx.Rngs(0))))
    ids, lengths = jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    encode = jax.jit(lambda state, ids, lengths: nnx.merge(graph, state)(ids, lengths))
    memory = encode.lower(state, ids, lengths).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5e9


@pytest.mark.parametrize(("ids", "lengths"), [((32,), (1,)), ((2, 32), (3,)), ((2, 32), ()), ((2, 32), (2, 32))])
def test_shapes_that_do_not_match_are_refused(ids, lengths):
    with pytest.raises(InputError, match="expected"):
        UMT5Encoder(TINY, rngs=nnx.Rngs(0))(np.zeros(ids, np.int32), np.ones(lengths, np.int32))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="64 does not split into 5 heads"):
        UMT5Encoder(replace(TINY, num_heads=5), rngs=nnx.Rngs(0))
