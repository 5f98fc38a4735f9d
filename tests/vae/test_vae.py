import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rfjax.config import WAN_LATENTS_STD, VAEConfig, preset
from rfjax.errors import InputError
from rfjax.vae import VAE, init_decoder_state, to_uint8
from rfjax.vae.flops import decode_flops
from rfjax.vae.params import key_map
from rfjax.weights.files import read_weights

TINY = preset("tiny").vae
# Few layers, for what holds at any size; wide enough for every form of convolution.
SMALL = VAEConfig(
    dim=16, z_dim=4, dim_mult=(1, 2), num_res_blocks=1, temporal_downsample=(True,),
    latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.0, 2.0, 0.5, 1.5),
)  # fmt: skip


def random_vae(config, **dtypes):
    # The default generator takes seconds to compile for each shape.
    return VAE(config, **dtypes, rngs=nnx.Rngs(params=jax.random.key(0, impl="rbg")))


class Codec:
    """A VAE behind jitted functions."""

    def __init__(self, vae):
        self.config, self.dtype = vae.config, vae.dtype
        self.graph, self.params = nnx.split(vae)

        def decode(params, latents, state, first):
            return nnx.merge(self.graph, params).decode(latents, state, first=first)

        self.decode = jax.jit(decode, static_argnames="first", donate_argnames="state")
        self.encode = jax.jit(lambda params, pixels: nnx.merge(self.graph, params).encode(pixels))

    def fresh(self, latents):
        return init_decoder_state(self.config, latents.shape[0], *latents.shape[3:], dtype=self.dtype)

    def stream(self, latents, plan, state=None):
        """Pixels of each chunk of `plan`, a list of latent frame counts."""
        state = self.fresh(latents) if state is None else state
        chunks, start = [], 0
        for frames in plan:
            chunk, state = self.decode(self.params, latents[:, start : start + frames], state, first=start == 0)
            chunks.append(np.asarray(chunk))
            start += frames
        return chunks

    def once(self, latents):
        return self.stream(latents, [latents.shape[1]])[0]


def assert_close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def last(channels_second):
    """[B T C H W] as [B T H W C]."""
    return np.moveaxis(channels_second, 2, -1)


@pytest.fixture(scope="module")
def release(golden):
    return read_weights(golden / "tiny_a/wan_models/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth")


@pytest.fixture(scope="module")
def tiny(release):
    vae, sources = nnx.eval_shape(lambda: random_vae(TINY)), key_map(TINY)

    def fill(path, param):
        source = sources[".".join(entry.key for entry in path[:-1])]
        return jnp.asarray(source.transform(release[source.keys[0]]), param.dtype)

    graph, params = nnx.split(vae)
    return Codec(nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, params)))


@pytest.fixture(scope="module")
def small():
    return Codec(random_vae(SMALL))


@pytest.fixture(scope="module")
def half(small):
    """`small`, decoding in bfloat16."""
    vae = nnx.eval_shape(lambda: random_vae(SMALL, dtype=jnp.bfloat16))
    graph, params = nnx.split(vae)
    params = jax.tree.map(lambda half, full: full.astype(half.dtype), params, small.params)
    return Codec(nnx.merge(graph, params))


@pytest.fixture(scope="module")
def latents():
    return np.random.default_rng(0).standard_normal((2, 9, 4, 6, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def arrays(load_golden):
    arrays, _ = load_golden("vae")
    return {name: arrays[name].astype(np.float32) for name in arrays}


# --- the release's numbers


def test_decoding_at_once_equals_the_release(tiny, arrays, assert_parity):
    assert_parity("VAE decoding", tiny.once(arrays["z"][:, :5]), last(arrays["decode5"]), 1e-5)


def test_streamed_decoding_equals_the_release(tiny, arrays, assert_parity):
    first, second = tiny.stream(arrays["z"], [3, 3])
    assert_parity("VAE decoding, streamed", first, last(arrays["decode5"])[:, :9], 1e-5)
    assert_parity("VAE decoding, streamed", second, last(arrays["stream33_second"]), 1e-5)


def test_a_new_stream_sees_nothing_of_the_state_it_is_given(tiny, arrays):
    dirty = jax.tree.map(jnp.ones_like, tiny.fresh(arrays["z"]))
    (pixels,) = tiny.stream(arrays["z"][:, 3:], [3], dirty)
    assert_close(pixels[:, :5], last(arrays["fresh_decode_of_3_5"]))


def test_encoding_equals_the_release(tiny, arrays, assert_parity):
    pixels = np.moveaxis(arrays["pixels_u8"], 1, -1) / np.float32(127.5) - 1
    assert_parity("VAE encoding", tiny.encode(tiny.params, pixels), arrays["mu"], 1e-5)


@pytest.mark.parametrize("config", [TINY, preset("wan-1.3b").vae], ids=["tiny", "full"])
def test_key_map_names_every_parameter_and_every_tensor(config, golden, release):
    params = nnx.state(nnx.eval_shape(lambda: VAE(config, rngs=nnx.Rngs(0))))
    params = {".".join(path): param.shape for path, param in nnx.to_flat_state(params)}
    if config is TINY:
        tensors = {key: tensor.shape for key, tensor in release.items()}
    else:
        listed = json.loads((golden / "keys_full_vae.json").read_text())
        tensors = {key: entry["shape"] for key, entry in listed["keys"].items()}
        assert sum(int(np.prod(shape)) for shape in params.values()) == listed["total_params"]
    sources = key_map(config)
    assert {key for source in sources.values() for key in source.keys} == set(tensors)
    filled = {
        path: source.transform(np.broadcast_to(np.float32(0), tensors[source.keys[0]])).shape
        for path, source in sources.items()
    }
    assert filled == params


# --- streaming


@pytest.mark.parametrize("plan", [[3, 3, 3], [1, 2, 2], [1] * 5], ids=str)
def test_every_chunk_plan_gives_the_same_pixels(small, latents, plan):
    latents = latents[:, : sum(plan)]
    chunks = small.stream(latents, plan)
    assert [chunk.shape[1] for chunk in chunks] == [2 * plan[0] - 1] + [2 * frames for frames in plan[1:]]
    assert_close(np.concatenate(chunks, axis=1), small.once(latents))


def test_chunk_plans_are_equal_where_the_form_of_convolutions_depends_on_the_chunk():
    codec = Codec(random_vae(replace(SMALL, dim=64, dim_mult=(1,), temporal_downsample=())))
    latents = np.random.default_rng(0).standard_normal((1, 3, 4, 24, 24)).astype(np.float32)
    assert_close(np.concatenate(codec.stream(latents, [1, 2]), axis=1), codec.once(latents))


@pytest.mark.parametrize("room", [1, 2, 3])
def test_what_is_too_large_for_memory_is_decoded_in_pieces(small, latents, room, monkeypatch):
    """First chunks of 1 + 4 frames, then chunks of 4."""
    whole, frame = np.concatenate(small.stream(latents, [5, 4]), axis=1), 2 * SMALL.temporal_stride * SMALL.dim
    frame *= np.prod(latents.shape[3:]) * SMALL.spatial_stride**2
    monkeypatch.setattr("rfjax.vae.model._MAX_VALUES", room * int(frame))
    codec = Codec(nnx.merge(small.graph, small.params))
    assert_close(np.concatenate(codec.stream(latents, [5, 4]), axis=1), whole)
    text = codec.decode.lower(codec.params, latents[:, 5:], codec.fresh(latents), first=False).as_text()
    assert f"stablehlo.constant dense<{4 // (2 if room == 3 else room)}>" in text and "stablehlo.while" in text


def test_later_latents_do_not_change_earlier_pixels(small, latents):
    short, long = small.once(latents[:, :5]), small.once(latents)
    assert_close(long[:, : short.shape[1]], short)


def test_the_past_matters(small, latents):
    """The test of equal plans would pass without any state if the past did not matter."""
    _, second = small.stream(latents[:1, :6], [3, 3])
    assert np.abs(second - small.stream(np.concatenate([latents[:1, 3:6]] * 2, axis=1), [3, 3])[1]).max() > 1e-2


def test_a_batch_is_its_samples(small, latents):
    together = small.stream(latents[:, :6], [3, 3])
    for i in range(2):
        alone = small.stream(latents[i : i + 1, :6], [3, 3])
        for batch, solo in zip(together, alone, strict=True):
            assert_close(batch[i : i + 1], solo)


def test_a_stream_of_any_length_compiles_twice(half, latents):
    half.stream(latents[:1], [3, 3, 3])
    assert half.decode._cache_size() == 2


def test_bfloat16_decoding_is_close(small, half, latents):
    """Relative error of the pixels: below 2 percent (1.1 when this was written)."""
    exact, rounded = (np.concatenate(codec.stream(latents[:1, :6], [3, 3]), 1) for codec in (small, half))
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


def test_dtypes(half, latents):
    """The policy: decoder and its state as asked, encoder, norms and pixels in float32."""
    pixels, state = half.decode(half.params, 50 * latents[:1, :3], half.fresh(latents[:1]), first=True)
    assert pixels.dtype == jnp.float32 and float(jnp.abs(pixels).max()) == 1
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.bfloat16)}
    vae = nnx.merge(half.graph, half.params)
    assert vae.encoder.conv_in.kernel.dtype == vae.decoder.head.norm.scale.dtype == jnp.float32
    assert vae.decoder.conv_in.kernel.dtype == jnp.bfloat16


def test_decoding_cut_along_the_width_is_the_same(small, latents):
    """Every shard takes its neighbours' columns; a named vmap axis stands for the mesh axis."""
    shards, vae = 4, nnx.merge(small.graph, small.params)

    def split(x, axis):
        return jnp.moveaxis(x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :]), axis, 0)

    state = jax.tree.map(lambda a: split(a, 3), small.fresh(latents[:1]))
    pixels = []
    for start in (0, 3):
        decode = partial(vae.decode, first=start == 0, width_axis="seq")
        chunk = split(jnp.asarray(latents[:1, start : start + 3]), 4)
        chunk, state = jax.jit(jax.vmap(decode, axis_name="seq"))(chunk, state)
        pixels.append(jnp.concatenate(list(chunk), axis=3))
    assert_close(jnp.concatenate(pixels, 1), np.concatenate(small.stream(latents[:1, :6], [3, 3]), 1))


# --- encoding, and the rest


def test_encoding_of_a_longer_video_extends_the_shorter(small):
    pixels = np.random.default_rng(1).uniform(-1, 1, (1, 7, 8, 8, 3)).astype(np.float32)
    long = small.encode(small.params, pixels)
    assert long.shape == (1, 4, 4, 4, 4)
    assert_close(long[:, :1], small.encode(small.params, pixels[:, :1]))


@pytest.mark.parametrize(
    "shape, message",
    [
        ((1, 16, 64, 96, 3), "16 frames.* 1 [+] 4 k .* 13"),
        ((1, 0, 64, 96, 3), "0 frames.* such as 1"),
        ((1, 5, 64, 90, 3), "90x64.* multiples of 8"),
    ],
)
def test_a_video_that_does_not_fit_is_refused(tiny, shape, message):
    with pytest.raises(InputError, match=message):
        jax.eval_shape(tiny.encode, tiny.params, jax.ShapeDtypeStruct(shape, jnp.float32))


def test_uint8_rounds_and_clips():
    pixels = jnp.array([-2.0, -1.0, -0.5, 0.0, 1 / 255, 0.999, 1.0, 3.0])
    assert to_uint8(pixels).tolist() == [0, 0, 64, 128, 128, 255, 255, 255]
    levels = np.arange(256)
    assert (np.asarray(to_uint8(jnp.asarray(levels / np.float32(127.5) - 1))) == levels).all()


def test_normalisation_is_that_of_wan():
    assert VAEConfig(dim=96).latents_std == WAN_LATENTS_STD


@pytest.mark.parametrize("first", [True, False])
def test_flops_are_those_of_the_traced_network(monkeypatch, first):
    """Within 1 percent: the last convolution runs over two frames more than are counted."""
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    config = preset("wan-1.3b").vae
    graph, params = nnx.split(nnx.eval_shape(lambda: VAE(config, rngs=nnx.Rngs(0))))
    latents = jax.ShapeDtypeStruct((2, 3, 16, 12, 20), jnp.float32)
    state = jax.eval_shape(lambda: init_decoder_state(config, 2, 12, 20))
    decode = jax.make_jaxpr(lambda p, z, s: nnx.merge(graph, p).decode(z, s, first=first))
    traced = sum(_flops(eqn) for eqn in decode(params, latents, state).jaxpr.eqns)
    assert traced == pytest.approx(decode_flops(config, 12, 20, 3, first, batch=2), rel=0.01)


def _flops(eqn):
    inner = [value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")]
    if inner:
        times = eqn.params.get("length", 1)  # of a scan
        return times * sum(_flops(e) for jaxpr in inner for e in jaxpr.eqns)
    out = eqn.outvars[0].aval
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * out.size * int(np.prod(eqn.invars[1].aval.shape[:-1]))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out.size * int(np.prod([eqn.invars[0].aval.shape[axis] for axis in contracted]))
    return 0
