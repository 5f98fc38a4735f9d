"""What is lowered for Trainium keeps to the rules of its compiler, and has the NKI kernels where the operations stood.

The programs are those of the release's configuration at 480x832, from abstract weights, and those of the tiny one.
"""

import re
from collections import Counter

import pytest
from jax.extend.mlir import ir

import nki_ops
from nki_ops import kernels
from nki_ops.lint import report
from nki_ops.lint.program import Program, call_target, name_of
from nki_ops.primitives import STAND_IN
from nki_ops.simulator import nki as simulator
from rfjax.config import preset
from rfjax.engine import Engine, Shape
from rfjax.weights.parts import abstract_parts

MODELS = {"wan-1.3b": ("bfloat16", Shape(1, 60, 104)), "tiny": ("float32", Shape(1, 8, 12))}
PROGRAMS = {"encode_text", "text_kv", "step", "decode_first", "decode_next", "encode_video"}
CALLS = Counter(attention=3, rms_norm_rope_3d=1, rotate=1, update_cache=1)
# A layer's operands at 480x832: queries of the clean block, of the window and of both, and the 512 tokens of a prompt.
QUERIES = {"1x4680x12x128", "1x23400x12x128", "1x28080x12x128"}
POOLS = {"240x1x12x4680x128", "1x1x12x4680x128", "5x1x12x4680x128", "1x1x12x512x128"}


@pytest.fixture(scope="module")
def lowered():
    """`lowered(model, backend)`: each program, lowered for Trainium."""
    made = {}

    def lower(model, backend):
        if (model, backend) not in made:
            config, (dtype, shape) = preset(model), MODELS[model]
            with nki_ops.using(backend):
                engine = Engine(config, *abstract_parts(config, dtype), dtype)
                made[model, backend] = engine.lower(shape, "neuron")
        return made[model, backend]

    return lower


@pytest.mark.parametrize("backend", ["nki", "xla"])
@pytest.mark.parametrize("model", MODELS)
def test_every_program_keeps_to_the_rules(lowered, model, backend):
    programs = lowered(model, backend)
    assert set(programs) == PROGRAMS
    for name, program in programs.items():
        found = report(program)
        assert found.violations == [], name
        assert found.operations > 50
        expected = CALLS if (name, backend) == ("step", "nki") else Counter()
        assert found.custom_calls == Counter({STAND_IN + kernel: n for kernel, n in expected.items()})


@pytest.fixture
def steps(lowered):
    """The step of the release's size, with the kernels and without."""
    if kernels.nki is not simulator:
        pytest.skip("AWS's nki is installed, whose calls do not say which kernel they are of")
    return [Program(lowered("wan-1.3b", backend)["step"].compiler_ir("stablehlo")) for backend in ("nki", "xla")]


def callers(op, program, of):
    """The frames in `of` and in rfjax nearest to an operation: which function was called, and from what line."""
    frames = re.findall(r'"([^"]*)"\("([^"]+)":(\d+)', str(op.operation.location))
    inside = [function for function, file, _ in frames if file.endswith(of)]
    model = [f"{file}:{line}" for _, file, line in frames if "/rfjax/" in file]
    if inside and model:
        return inside[-1], model[0]
    if frames:
        return None
    return next((found for call in program.callers(op) if (found := callers(call, program, of))), None)


def test_custom_calls_stand_where_the_operations_stood(steps):
    with_kernels, plain = steps
    stood = {callers(op, plain, "nki_ops/xla.py") for op in plain.operations} - {None}
    stands = Counter(
        (target.removeprefix(STAND_IN), callers(op, with_kernels, "nki_ops/primitives.py"))
        for op in with_kernels.operations
        if (target := call_target(op))
    )
    places = {(kernel, line) for kernel, (_, line) in stands}
    assert sorted(kernel for kernel, _ in places) == sorted(CALLS.elements())
    assert places == {(function, line) for function, line in stood if function != "rms_norm"}


def test_nothing_of_the_replaced_operations_is_left(steps):
    with_kernels, _ = steps
    left = {callers(op, with_kernels, "nki_ops/xla.py") for op in with_kernels.operations} - {None}
    assert {function for function, _ in left} == {"rms_norm"}  # of cross-attention's queries
    exp, plain_exp = (sum(name_of(op) == "stablehlo.exponential" for op in p.operations) for p in steps)
    assert plain_exp - exp == CALLS["attention"]


def test_every_custom_call_is_in_the_loop_over_layers(steps):
    with_kernels, _ = steps
    for op in with_kernels.operations:
        if call_target(op):
            assert loops_around(op, with_kernels) == 1


def loops_around(op, program):
    count = 0
    while (op := op.operation.parent) is not None and name_of(op) != "func.func":
        count += name_of(op) == "stablehlo.while"
    return count + (0 if op is None else sum(loops_around(call, program) for call in program.callers(op)))


def test_the_kernels_get_whole_blocks_of_the_real_size(steps):
    attention = [op for op in steps[0].operations if call_target(op) == f"{STAND_IN}attention"]
    types = [["x".join(map(str, ir.RankedTensorType(x.type).shape)) for x in op.operands] for op in attention]
    assert {q for q, *_ in types} == QUERIES
    assert {pool for _, _table, _n_valid, *pools in types for pool in pools} == POOLS


def test_no_convolution_has_three_spatial_axes(lowered):
    for name in ("decode_first", "decode_next", "encode_video"):
        layouts = re.findall(r"dim_numbers = (\[[^\]]*\])", lowered("tiny", "nki")[name].as_text())
        assert layouts and all(len(layout.split(",")) == 4 for layout in layouts)
