"""One video on any mesh: the same numbers, nothing compiled twice, nothing gathered that should stay cut."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from rfjax import InputError, RollingForcingPipeline, make_mesh
from rfjax.config import preset
from rfjax.engine import Shape
from rfjax.parallel import Layout

PROMPT, SEED, FRAMES = "a paper boat on a pond", 3, 69  # 6 blocks: ramp-up, a full window, ramp-down
SIZE = {"height": 64, "width": 128}
MESHES = {"2x1": (2, 1), "4x1": (4, 1), "1x2": (1, 2), "2x2": (2, 2), "4x2": (4, 2), "2x4": (2, 4)}


@pytest.fixture(scope="module")
def on_mesh(tiny_checkpoint):
    """`on_mesh(data, head, seq)`: the tiny release on such a mesh, made once."""
    made = {}

    def pipeline(data=1, head=1, seq=1, **options):
        key = data, head, seq, *options.values()
        if key not in made:
            mesh = make_mesh(data=data, head=head, seq=seq)
            made[key] = RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", mesh, **options)
        return made[key]

    return pipeline


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 256, (64, 128, 3), np.uint8)


def video(pipeline, prompt=PROMPT, seed=SEED, image=None, frames=FRAMES):
    """Latents and pixels of a video, joined along time."""
    with pipeline.stream(prompt, frames, seed=seed, image=image, **SIZE) as stream:
        chunks = list(stream)
    axis = 0 if isinstance(prompt, str) else 1
    return tuple(np.concatenate([getattr(c, name) for c in chunks], axis) for name in ("latents", "frames_float"))


@pytest.fixture(scope="module")
def alone(pipe, image):
    """The video on one device without a mesh, that from an image too."""
    return {"text": video(pipe), "image": video(pipe, image=image)}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_makes_the_video_of_one_device(on_mesh, alone, image, mesh, count_compilations):
    head, seq = MESHES[mesh]
    pipeline = on_mesh(head=head, seq=seq)
    for kind, given in (("text", None), ("image", image)):
        for ours, theirs in zip(video(pipeline, image=given), alone[kind], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    with count_compilations() as counts:
        again = video(pipeline)
    assert counts == []
    for first, second in zip(again, video(pipeline), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 2)])
def test_streams_of_a_batch_are_independent(on_mesh, alone, mesh):
    pipeline = on_mesh(*mesh)
    both = video(pipeline, [PROMPT, "a red fox"], [SEED, 8])
    other = video(pipeline, [PROMPT, "a grey wolf in the snow"], [SEED, 9])
    for ours, others, theirs in zip(both, other, alone["text"], strict=True):
        np.testing.assert_array_equal(ours[0], others[0])
        assert np.abs(ours[1] - others[1]).max() > 0.1
        np.testing.assert_allclose(ours[0], theirs, rtol=0, atol=1e-5)


def test_a_stream_moves_from_mesh_to_mesh(pipe, on_mesh, alone, tmp_path):
    file, parts = tmp_path / "stream", []
    with on_mesh(head=4).stream(PROMPT, FRAMES, seed=SEED, **SIZE) as stream:
        parts += [next(stream), next(stream)]
        stream.save(file)
    with on_mesh(head=2, seq=2).resume(file) as stream:
        parts += [next(stream), next(stream)]
        stream.save(file)
    parts += pipe.resume(file)
    latents = np.concatenate([chunk.latents for chunk in parts])
    np.testing.assert_allclose(latents, alone["text"][0], rtol=0, atol=1e-5)


def test_a_cache_that_is_cut_by_heads_only_makes_the_same_video(on_mesh, alone):
    for ours, theirs in zip(video(on_mesh(head=2, seq=4, cache_cut="head")), alone["text"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mesh", "cache_cut"), [((1, 4, 2), "both"), ((2, 2, 2), "both"), ((1, 4, 2), "head")])
def test_no_device_holds_or_gathers_what_is_cut(on_mesh, mesh, cache_cut):
    """No array of a compiled program is as large as the whole cache, window or stack of any weights' gather."""
    pipeline = on_mesh(*mesh, cache_cut=cache_cut)
    shape = Shape(2, 8, 16)
    state = pipeline.engine.init_state(shape)
    whole = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    text = pipeline.engine.executables(shape).step.as_text()
    held = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    for name, array in whole.items():
        assert array.shape not in held, name
        local = array.sharding.shard_shape(array.shape)
        assert local in held and np.prod(local) * (8 if name == ".x0" or cache_cut == "both" else 4) == array.size
    # What is gathered: the keys and values of a step, and one layer of the cache; never weights, caches or windows.
    block_tokens, config = 96, pipeline.config
    rows, heads = shape.batch // mesh[0], config.dit.num_heads // mesh[1]
    blocks = config.rolling.cache_slots if cache_cut == "both" else 2 * (config.rolling.window_blocks + 1)
    largest = rows * blocks * block_tokens * heads * config.dit.head_dim
    assert largest < state.k_cache.size / mesh[0] / mesh[1]
    for dims in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text):
        assert np.prod([int(d) for d in dims.split(",")]) <= largest


def test_tokens_are_cut_for_every_product(on_mesh):
    """FLOPs of a device, but for attention's and the modulation's, which no mesh can cut further."""
    pipeline = on_mesh(head=4, seq=2)
    cut = pipeline.engine.executables(Shape(1, 8, 16)).step.cost_analysis()["flops"]
    alone = RollingForcingPipeline(type(pipeline.engine)(
        pipeline.config, pipeline.engine.graphs, pipeline.engine.params, "float32"
    ), pipeline.tokenizer).engine.trace(Shape(1, 8, 16))["step"].lower().cost_analysis()["flops"]  # fmt: skip
    assert cut < 1.25 * alone / 8


# What is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head": 0}, "head=0"),
        ({"seq": -2}, "seq=-2"),
        ({"data": True}, "data=True"),
        ({"head": 2.0}, "head=2.0"),
        ({"head": 4, "seq": 4}, "needs 16 devices, there are 8; .*JAX_NUM_CPU_DEVICES=16"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        make_mesh(**sizes)


def test_heads_that_do_not_divide_are_refused_before_weights_load(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("rfjax.weights.parts.load_parts", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match="12 heads do not divide by head=8; head can be 1, 2, 3, 4, 6, 12"):
        RollingForcingPipeline.from_pretrained(tiny_checkpoint, mesh=make_mesh(head=8))


def test_an_unknown_cut_of_the_cache_is_refused(tiny_checkpoint):
    with pytest.raises(InputError, match="cache_cut 'seq' is not one of both, head"):
        RollingForcingPipeline.from_pretrained(tiny_checkpoint, mesh=make_mesh(head=4, seq=2), cache_cut="seq")


def test_another_axis_is_refused(tiny_checkpoint):
    mesh = jax.make_mesh((2,), ("model",))
    with pytest.raises(InputError, match="mesh axis 'model' is not one of data, seq, head"):
        RollingForcingPipeline.from_pretrained(tiny_checkpoint, mesh=mesh)


def test_a_mesh_may_lack_axes_and_name_them_in_any_order(tiny_checkpoint):
    layout = Layout(jax.make_mesh((2, 4), ("head", "data")))
    assert dict(layout.mesh.shape) == {"data": 4, "seq": 1, "head": 2}
    assert (layout.groups, layout.shares) == (4, 2)


@pytest.mark.parametrize(
    ("width", "message"),
    [(96, "width of 96 does not divide among 8 devices; the nearest that does is (64|128)"), (832, None)],
)
def test_a_width_that_does_not_divide_is_refused_with_the_nearest(width, message):
    check = partial(Layout(make_mesh(head=4, seq=2)).check_cut, preset("tiny"), 1, 480 // 8, width // 8)
    if message is None:
        return check()
    with pytest.raises(InputError, match=message):
        check()


def test_a_batch_that_does_not_divide_is_refused(on_mesh):
    with pytest.raises(InputError, match="3 prompts do not divide by data=2"):
        on_mesh(data=2).stream(["a"] * 3, 9, **SIZE)
