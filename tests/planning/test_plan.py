"""What `rfjax plan` says: the numbers of real programs, at the real shapes."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rfjax import make_mesh
from rfjax.bench.flops import rolling_step_flops
from rfjax.cli.main import main
from rfjax.config import preset
from rfjax.engine import Engine, Shape
from rfjax.parallel import Layout
from rfjax.planning.hlo import Program
from rfjax.planning.plan import plan
from rfjax.vae.flops import decode_flops
from rfjax.weights.parts import abstract_parts


def program(function, *args):
    return Program(jax.jit(function).lower(*args).compile().as_text())


def test_products_in_loops_count_as_often_as_they_run():
    def function(x, kernels, image, filters):
        def layer(x, kernel):
            return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ kernel), x), None

        convolved = jax.lax.conv(image, filters, (1, 1), "SAME")
        return jax.lax.scan(layer, x, kernels)[0], convolved

    found = program(
        function, jnp.ones((40, 64)), jnp.ones((5, 64, 64)), jnp.ones((2, 8, 16, 16)), jnp.ones((4, 8, 3, 3))
    )
    assert found.flops == 5 * 3 * 2 * 40 * 64 * 64 + 2 * (2 * 4 * 16 * 16) * 8 * 9
    assert found.collectives == []


def test_a_scope_is_known():
    with_scope = jax.named_scope("attention")(jnp.dot)
    (product,) = program(lambda x: with_scope(x, x), jnp.ones((64, 64))).products
    assert "/attention/" in product.scope
    assert (product.elements, product.result) == (3 * 64 * 64, 64 * 64)


@pytest.mark.parametrize(
    ("function", "kind", "sent"),
    [
        (lambda x: jax.lax.all_gather(x, "head", axis=0, tiled=True), "all-gather", 3),
        (lambda x: jax.lax.all_gather(x, "seq", axis=0, tiled=True), "all-gather", 1),
        (lambda x: jax.lax.all_to_all(x, "head", 1, 0, tiled=True), "all-to-all", 3 / 4),
        (lambda x: jax.lax.psum(x, "head"), "all-reduce", 2 * 3 / 4),
        (lambda x: jax.lax.psum_scatter(x, "head", scatter_dimension=1, tiled=True), "reduce-scatter", 3 / 4),
        (lambda x: jax.lax.ppermute(x, "head", [(i, (i + 1) % 4) for i in range(4)]), "collective-permute", 1),
    ],
)
def test_what_a_device_sends(function, kind, sent):
    """In units of its own part, in a loop that runs five times; bfloat16 as such though a CPU sends float32."""

    def five_times(x):
        return jax.lax.scan(lambda total, _: (total + function(jnp.sin(total) * x).sum(), None), 0.0, None, 5)[0]

    cut, mesh = P(("seq", "head")), make_mesh(head=4, seq=2)
    shared = jax.shard_map(lambda x: five_times(x)[None], mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    text = jax.jit(shared).lower(jnp.ones((8 * 16, 32))).compile().as_text()
    assert Program(text).traffic() == {kind: (5, 5 * sent * 16 * 32 * 4)}
    assert Program(text, sends_bfloat16=True).traffic() == {kind: (5, 5 * sent * 16 * 32 * 2)}


@pytest.mark.parametrize("name", ["step", "decode_first", "decode_next"])
def test_programs_in_bfloat16_send_bfloat16(name):
    config = preset("tiny")
    engine = Engine(config, *abstract_parts(config, "bfloat16"), "bfloat16", Layout(make_mesh(head=4, seq=2)))
    sent = list(sent_by(engine.trace(Shape(1, 8, 16))[name].jaxpr.jaxpr))
    assert sent and set(sent) == {jnp.dtype("bfloat16")}


def sent_by(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("all_gather", "all_to_all", "psum", "ppermute", "reduce_scatter"):
            yield from (var.aval.dtype for var in eqn.invars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sent_by(inner)


def test_one_device_computes_what_is_useful():
    config = preset("tiny")
    found = plan(config, "float32", 64, 128, Layout())
    assert found.costs["step"].flops == pytest.approx(rolling_step_flops(config, 8, 16), rel=0.01)
    assert found.costs["step"].collectives == {}
    assert found.resident["VAE weights"] > 0 and found.devices == 1


@pytest.fixture(scope="module")
def release():
    """The release's model on a Trainium2 chip's eight cores."""
    return plan(preset("wan-1.3b"), "bfloat16", 480, 832, Layout(make_mesh(head=4, seq=2)))


def test_the_release_fits_a_trainium2_core(release):
    assert release.total <= 6e9
    assert release.total > sum(release.resident.values()) > release.resident["DiT weights"] > 2 * 1.41e9
    # 30 layers of 8 slots of 4680 tokens, keys and values of 12 heads, in eighths
    assert release.resident["cache"] == 30 * 8 * 4680 * 2 * 1536 * 2 // 8


def test_the_work_of_the_release_is_shared_evenly(release):
    step, decode = release.costs["step"], release.costs["decode_next"]
    config = preset("wan-1.3b")
    assert step.flops * 8 <= 1.03 * rolling_step_flops(config, 60, 104)
    assert decode.flops * 8 <= 1.10 * decode_flops(config.vae, 60, 104, 3, first=False)
    assert step.share == pytest.approx(1, abs=0.03) and decode.share == pytest.approx(1, abs=0.1)
    assert {kind: count for kind, (count, _) in step.collectives.items()} == {"all-to-all": 60, "all-gather": 120}


def test_the_modelled_step_is_the_sum_of_its_parts(release):
    step = release.costs["step"]
    assert all(seconds > 0 for seconds in step.modelled.values())
    assert step.seconds == sum(step.modelled.values())
    both = step.seconds + release.costs["decode_next"].seconds
    assert release.modelled_fps == pytest.approx(12 / both)


def test_a_cache_cut_by_heads_takes_more_memory_and_gathers_less():
    both, head = (
        plan(preset("tiny"), "float32", 64, 128, Layout(make_mesh(head=2, seq=4), cut)) for cut in ("both", "head")
    )
    assert head.resident["cache"] == 4 * both.resident["cache"]
    assert head.costs["step"].collectives["all-gather"][1] < both.costs["step"].collectives["all-gather"][1]


# The command


def test_plan_says_whether_it_fits(capsys):
    arguments = ["plan", "--preset", "tiny", "--size", "128x64", "--mesh", "4x2", "--dtype", "bf16"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "128x64, bfloat16, mesh 4x2" in text and "fits, with" in text and "frames/s" in text
    assert main([*arguments, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["devices"] == 8 and numbers["total"] == sum(numbers["resident"].values()) + numbers["activations"]


def test_plan_of_what_does_not_fit_exits_with_1(capsys, monkeypatch):
    from rfjax.planning import devices

    monkeypatch.setitem(devices.DEVICES, "small", devices.Device(1e5, "something small"))
    assert main(["plan", "--preset", "tiny", "--size", "128x64", "--device", "small"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "device 'abacus' is not one of trn2, "),
        (["--mesh", "8x1"], "12 heads do not divide by head=8"),
        (["--mesh", "4x2", "--size", "96x64"], "a width of 96 does not divide among 8 devices"),
        (["--mesh", "4x4"], "needs 16 devices"),
        (["--mesh", "0x1"], "head=0"),
        (["--data", "0"], "data=0"),
        (["--cache-cut", "seq"], "invalid choice: 'seq' (choose from "),
        (["-c", "shapes-tiny"], "one of --checkpoint DIR and --preset NAME"),
    ],
)
def test_plan_refuses(arguments, message, capsys):
    try:
        code = main(["plan", "--preset", "tiny", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_cache_in_eight_bits_is_planned():
    whole, eight = (
        plan(preset("tiny"), "bfloat16", 64, 128, Layout(), cache_dtype=dtype) for dtype in (None, "float8_e4m3fn")
    )
    assert whole.resident["cache"] == 2 * eight.resident["cache"]
