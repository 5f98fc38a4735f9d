"""Each of the 17 rules is broken by a small program and reported with its line; what looks like it passes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nki_ops
from nki_ops.lint import RULES, check

f32, i32 = jnp.float32, jnp.int32
VECTOR, MATRIX, IDS = jnp.ones(8, f32), jnp.ones((4, 4), f32), jnp.arange(3)
IMAGE = jnp.ones((1, 8, 8, 1), f32)


def rbg_normal(key):
    return jax.random.normal(jax.random.split(jax.random.wrap_key_data(key, impl="unsafe_rbg"))[0], (3,))


def placed(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


def sum_pairs(a, b):
    return a[0] + b[0], a[1] + b[1]


# Made so that they are no frames of their own: the line is that of the caller.
convolve = partial(
    lax.conv_general_dilated,
    rhs=jnp.ones((3, 3, 1, 1)),
    padding=((1, 1), (1, 1)),
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
windows = partial(
    lax.reduce_window,
    init_value=0.0,
    computation=lax.add,
    window_dimensions=(2,),
    window_strides=(1,),
    padding="VALID",
)
threefry_bits = partial(lax.rng_bit_generator, shape=(3,), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)
somebody_elses = jax.ffi.ffi_call("somebody_elses", VECTOR)
KEY2, KEY4 = jnp.zeros(2, jnp.uint32), jnp.zeros(4, jnp.uint32)
# Each on one line, which is the line reported.
BREAKING = [
    (1, lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), VECTOR),
    (1, lambda x: lax.switch(x[0].astype(i32), [jnp.sin, jnp.cos, jnp.tanh], x), VECTOR),
    (2, lambda x: lax.while_loop(lambda c: c[0] > 0, lambda c: c - 1, x), VECTOR),
    (2, lambda n: lax.fori_loop(0, n[0], lambda i, c: c + i, n), IDS),
    (2, lambda n: lax.while_loop(lambda c: c < 9, lambda c: c * 2, n[0]), IDS),
    (2, lambda n: lax.while_loop(lambda c: c < 9, lambda c: c + 1, n[0]), IDS),
    (2, lambda n: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + c[1], c[1]), (0, n[0])), IDS),
    (3, lambda x: jax.debug.print("{x}", x=x), VECTOR),
    (3, lambda x: jax.pure_callback(np.sin, x, x), VECTOR),
    (4, lambda x: somebody_elses(x), VECTOR),
    (5, lambda x: lax.complex(x, x).real, VECTOR),
    (6, lambda x: lax.reduce((x, x), (f32(0), f32(0)), sum_pairs, (0,)), VECTOR),
    (6, lambda x: jnp.argmax(x), VECTOR),
    (7, lambda x: windows(x, window_dilation=(2,)), VECTOR),
    (7, lambda x: windows(x, base_dilation=(2,)), VECTOR),
    (8, lambda x: lax.reduce_precision(x, 8, 7), VECTOR),
    (9, lambda x: jnp.sort(x), VECTOR),
    (9, lambda x: lax.top_k(x, 2), IDS),
    (10, lambda key: threefry_bits(key), KEY4),
    (10, lambda key: jax.random.bits(key, (3,)), KEY2),
    (12, lambda x: x.astype(jnp.float8_e4m3fn).astype(f32), VECTOR),
    (12, lambda x: x.astype(jnp.float8_e5m2fnuz).astype(f32), VECTOR),
    (13, lambda x: x @ x, IDS),
    (15, lambda i: VECTOR[i], IDS),
    (15, lambda i: VECTOR.at[i].set(0), IDS),
    (15, lambda x: x.at[jnp.array([1, 2])].add(1), IDS),
    (15, lambda i: VECTOR[jnp.clip(i, 0, 8)], IDS),
    (15, lambda i: MATRIX.at[:, jnp.clip(i, -1, 3)].get(mode="promise_in_bounds"), IDS),
    (16, lambda x: convolve(x, window_strides=(2, 2), lhs_dilation=(2, 2)), IMAGE),
    (16, lambda x: convolve(x, window_strides=(1, 1), lhs_dilation=(2, 2), rhs_dilation=(2, 2)), IMAGE),
    (17, lambda x: x.astype(jnp.int8) >> 2, IDS),
]
PASSING = {
    "a choice of values": (lambda x: jnp.where(x > 0, x, 0), VECTOR),
    "a scan": (lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x), VECTOR),
    "a loop between constants": (lambda x: lax.fori_loop(2, 9, lambda i, c: c * i, x), VECTOR),
    "a map over a scan": (lambda x: lax.map(lambda row: lax.scan(lambda c, y: (c + y, c), 0.0, row), x), MATRIX),
    "a sharding marker": (lambda x: placed(x), VECTOR),
    "a plain reduction": (lambda x: (x.max(), x.sum()), VECTOR),
    "a running sum": (lambda x: jnp.cumsum(x), VECTOR),
    "a sort of integers": (lambda x: jnp.sort(x), IDS),
    "bits of the default generator": (lambda key: rbg_normal(key), KEY4),
    "an 8-bit float": (lambda x: x.astype(jnp.float8_e5m2).astype(f32), VECTOR),
    "a product": (lambda x: x @ x, VECTOR),
    "a slice at a number": (lambda i: lax.dynamic_slice(VECTOR, (i[0],), (2,)), IDS),
    "constant indices": (lambda x: x[jnp.array([0, 7, 3])], VECTOR),
    "counted indices": (lambda x: x[jnp.arange(4) + 4], VECTOR),
    "indices kept inside": (lambda i: VECTOR[jnp.clip(i, 0, 7)], IDS),
    "indices kept inside, written": (lambda i: MATRIX.at[:, jnp.clip(i, 0, 3)].set(0), IDS),
    "constant indices in a loop": (lambda x: lax.map(lambda row: row[jnp.array([0, 3])], x), MATRIX),
    "a strided convolution": (lambda x: convolve(x, window_strides=(2, 2)), IMAGE),
    "a transposed convolution": (lambda x: convolve(x, window_strides=(1, 1), lhs_dilation=(2, 2)), IMAGE),
    "a 32-bit shift": (lambda x: x >> 2, IDS),
}


@pytest.mark.parametrize("rule, function, argument", BREAKING)
def test_a_broken_rule_is_reported_with_its_line(rule, function, argument):
    found = [v for v in check(jax.jit(function).lower(argument)) if v.rule == rule]
    assert found and all(v.instead == RULES[rule - 1].instead for v in found)
    assert found[0].source.startswith(f"{__file__}:{function.__code__.co_firstlineno}, ")


# What jax.jit makes only with other settings, as text; `_` is the type.
TEXTS = [
    (11, "tensor<2xf64>", "func.func @main(%x: _) -> _ { %y = stablehlo.sine %x : _ return %y : _ }"),
    (11, "tensor<3xi64>", "func.func @main() -> _ { %y = stablehlo.iota dim = 0 : _ return %y : _ }"),
    (14, "tensor<?xf32>", "func.func @main(%x: _) -> _ { %y = stablehlo.sine %x : _ return %y : _ }"),
]


@pytest.mark.parametrize("rule, kind, text", TEXTS)
def test_a_broken_rule_in_text_is_reported(rule, kind, text):
    found = check(f"module {{ {text.replace('_', kind)} }}")
    assert {v.rule for v in found} == {rule} and found[0].source == "" and "unknown line" in str(found[0])


def test_every_rule_is_broken_by_a_test():
    assert {rule for rule, *_ in BREAKING + TEXTS} == {rule.number for rule in RULES} == set(range(1, 18))


@pytest.mark.parametrize("function, argument", PASSING.values(), ids=PASSING)
def test_what_neuron_takes_passes(function, argument):
    assert check(jax.jit(function).lower(argument)) == []


def test_the_line_is_the_innermost_that_is_not_of_jax_or_flax():
    ours = "/env/site-packages/rfjax/model.py"
    frames = [("__call__", "/env/site-packages/flax/linen.py"), ("block", ours), ("run", "/bin/rfjax")]
    inner, middle, outer = (f'"{function}"("{file}":7:0)' for function, file in frames)
    place = f"loc(callsite({inner} at callsite({middle} at {outer})))"
    wide = "tensor<2xf64>"
    body = f"%y = stablehlo.sine %x : {wide} {place} return %y : {wide} {place}"
    found = check(f"module {{ func.func @main(%x: {wide}) -> {wide} {{ {body} }} }}")
    assert {violation.source for violation in found} == {f"{ours}:7, block"}


def test_text_and_program_give_the_same():
    lowered = jax.jit(lambda x: jnp.sort(jnp.argmax(x, axis=0))).lower(MATRIX)
    assert check(lowered.as_text(debug_info=True)) == check(lowered)
    assert [v.rule for v in check(lowered)] == [6]
    assert [v._replace(source="") for v in check(lowered)] == check(lowered.as_text())


def test_the_same_on_one_line_is_reported_once():
    found = check(jax.jit(lambda x: jnp.sin(lax.reduce_precision(lax.reduce_precision(x, 8, 7), 5, 2))).lower(VECTOR))
    assert len(found) == 1


def test_a_line_says_where_what_and_what_instead():
    (violation,) = check(jax.jit(lambda x: lax.reduce_precision(x, 8, 7)).lower(VECTOR))
    assert str(violation).startswith(f"{__file__}:")
    assert "reduced precision (stablehlo.reduce_precision); instead: astype" in str(violation)
    assert str(violation).endswith("(rule 8)") and "\n" not in str(violation)


@pytest.mark.parametrize("backend, rules", [("nki", []), ("simulate", [3])])
def test_kernels_pass_and_their_simulation_does_not(backend, rules):
    table = jnp.ones((8, 2))
    with nki_ops.using(backend):
        traced = jax.jit(lambda x: nki_ops.rotate(x, table, table)).trace(jnp.ones((8, 4)))
        lowered = traced.lower(lowering_platforms=("neuron",) if backend == "nki" else None)
    assert [v.rule for v in check(lowered)] == rules
