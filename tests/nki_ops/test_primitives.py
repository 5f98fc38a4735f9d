"""The kernels as JAX functions: simulated they equal the XLA forms, for Trainium they are custom calls."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import nki_ops
from nki_ops import KernelError, kernels, primitives, xla
from nki_ops.simulator import TensorSpec, profile
from nki_ops.simulator import nki as simulator

P = PartitionSpec


def draw(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def arguments(name, dtype=jnp.float32):
    """Small arguments of one operation, with everything that it takes in play."""
    rng = np.random.default_rng(0)
    x = partial(draw, rng, dtype=dtype)
    cache, block, table = (x(3, 1, 2, 5, 8), x(3, 1, 2, 5, 8)), (x(1, 2, 5, 8), x(1, 2, 5, 8)), draw(rng, 2, 5, 4)
    return {
        "rms_norm_rope_3d": (x(2, 5, 16), x(2, 5, 16), (draw(rng, 16), draw(rng, 16)), *table),
        "rotate": (block[0], *table),
        "update_cache": (cache, block, jnp.int32(1)),
        "attention": (x(1, 7, 2, 8), [cache, (block[0][None], block[1][None])], jnp.array([3, 0, 1]), jnp.int32(2)),
    }[name]


OPERATIONS = ["rms_norm_rope_3d", "rotate", "update_cache", "attention"]
IN_PLACE = {"update_cache": {0: 0, 1: 1}}


def run(backend, name, *args):
    """A new function every time: one that is traced already keeps its form."""
    with nki_ops.using(backend):
        return jax.jit(lambda *args: getattr(nki_ops, name)(*args))(*args)


def for_trainium(function, *args):
    """The lowered text of a function with the NKI kernels, made without Trainium."""
    with nki_ops.using("nki"):
        return jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("neuron",)).as_text()


def custom_calls(text):
    return re.findall(r"stablehlo\.custom_call @(\S+?)\(", text)


# ---- simulated


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_simulated_kernel_equals_the_xla_form(name, dtype, tolerance):
    args = arguments(name, dtype)
    for got, expected in zip(*(jax.tree.leaves(run(b, name, *args)) for b in ("simulate", "xla")), strict=True):
        assert got.dtype == expected.dtype == dtype and got.shape == expected.shape
        distance = np.linalg.norm(np.asarray(got - expected, np.float32))
        assert distance <= tolerance * np.linalg.norm(np.asarray(expected, np.float32))


def test_operations_work_outside_of_jit_too():
    with nki_ops.using("simulate"):
        outs = nki_ops.rms_norm_rope_3d(*arguments("rms_norm_rope_3d"), eps=0.1)
    for got, expected in zip(outs, xla.rms_norm_rope_3d(*arguments("rms_norm_rope_3d"), eps=0.1), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_in_a_scan_the_cache_is_written_step_by_step():
    cache, block, _ = arguments("update_cache")

    def write_all(cache):
        def write(cache, slot):
            blocks = [b * (slot + 1) for b in block]
            return nki_ops.update_cache(cache, blocks, slot), None

        return jax.lax.scan(write, cache, jnp.arange(2))[0]

    with nki_ops.using("simulate"):
        written = jax.jit(write_all)(cache)
    for old, new, values in zip(cache, written, block, strict=True):
        np.testing.assert_array_equal(new, jnp.stack([values, 2 * values, old[2]]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_is_one_call_after_the_other(name):
    """Over the first argument, which has its new axis in the middle, and the last."""
    first, *others, last = arguments(name)
    firsts = [jax.tree.map(lambda x, i=i: x * (i + 1), first) for i in range(2)]
    lasts = [last, jax.tree.map(lambda x: x - x.dtype.type(1), last)]
    with nki_ops.using("simulate"):
        operation = getattr(nki_ops, name)
        mapped = jax.vmap(lambda a, z: operation(a, *others, z), in_axes=(1, 0))(
            jax.tree.map(lambda *x: jnp.stack(x, axis=1), *firsts), jnp.stack(lasts)
        )
        alone = [operation(a, *others, z) for a, z in zip(firsts, lasts, strict=True)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    for got, one in zip(jax.tree.leaves(mapped), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, one)


def test_there_is_no_derivative():
    x, cos, sin = arguments("rotate")
    with nki_ops.using("simulate"), pytest.raises(NotImplementedError, match="nki_rotate"):
        jax.grad(lambda x: nki_ops.rotate(x, cos, sin).sum())(x)


# ---- in shard_map


def heads_apart(mesh, **options):
    """Attention with heads over the mesh axis "head", as shard_map has it."""
    heads = P(None, None, "head")
    return jax.shard_map(
        lambda q, k, v, table: nki_ops.attention(q, [(k, v)], table, np.int32(2)),
        mesh=mesh, in_specs=(heads, heads, heads, P()), **{"out_specs": heads} | options,
    )  # fmt: skip


def test_in_shard_map_the_simulated_kernel_equals_the_xla_form():
    q, pools, *_ = arguments("attention")
    table = jnp.array([2, 0])
    with nki_ops.using("simulate"):
        out = jax.jit(heads_apart(Mesh(np.array(jax.devices()[:1]), ("head",))))(q, *pools[0], table)
    np.testing.assert_allclose(out, xla.attention(q, pools[:1], table, np.int32(2)), rtol=0, atol=1e-6)


def test_on_two_devices_each_simulates_its_heads():
    """In a process of its own: the number of devices is fixed when JAX starts."""
    program = """
import jax, numpy as np
from jax.sharding import Mesh
import nki_ops, test_primitives as t
q, pools, *_ = t.arguments("attention")
table = np.array([2, 0])
with nki_ops.using("simulate"):
    out = jax.jit(t.heads_apart(Mesh(np.array(jax.devices()), ("head",))))(q, *pools[0], table)
assert len(out.sharding.device_set) == 2
np.testing.assert_allclose(out, nki_ops.xla.attention(q, pools[:1], table, np.int32(2)), rtol=0, atol=1e-6)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", program], env=os.environ | flags, check=True)


def test_in_shard_map_the_kernel_has_the_shapes_of_a_shard():
    mesh = AbstractMesh((2,), ("head",))
    q, pool = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 7, 4, 8), (3, 1, 4, 5, 8)))
    text = for_trainium(heads_apart(mesh), q, pool, pool, jax.ShapeDtypeStruct((2,), jnp.int32))
    call = next(line for line in text.splitlines() if "nki_ops_stand_in.attention" in line)
    assert "tensor<1x7x2x8xf32>, tensor<2xi32>, tensor<1xi32>, tensor<3x1x2x5x8xf32>" in call


def test_in_shard_map_an_output_varies_as_the_operands_do():
    mesh = AbstractMesh((2,), ("head",))
    q, pool = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 7, 4, 8), (3, 1, 4, 5, 8)))
    table = jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(ValueError, match="out_specs"):
        for_trainium(heads_apart(mesh, out_specs=P()), q, pool, pool, table)


def test_in_shard_map_operands_over_unlike_axes_are_refused():
    rotate = jax.shard_map(
        nki_ops.rotate, mesh=AbstractMesh((2, 2), ("head", "seq")), in_specs=(P("head"), P("seq"), P("seq")),
        out_specs=P(("head", "seq")),
    )  # fmt: skip
    table = jax.ShapeDtypeStruct((10, 4), jnp.float32)
    with pytest.raises(KernelError, match=r"\['seq'\], another over \['head'\]"):
        for_trainium(rotate, jax.ShapeDtypeStruct((2, 5, 8), jnp.float32), table, table)


# ---- for Trainium


@pytest.mark.parametrize("name", OPERATIONS)
def test_for_trainium_a_custom_call_stands_for_the_operation(name):
    text = for_trainium(getattr(nki_ops, name), *arguments(name))
    assert custom_calls(text) == [f"nki_ops_stand_in.{name}"]
    assert not re.search(r"stablehlo\.(dot|exponential|multiply|while|dynamic_update_slice)", text)
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert {int(output): int(operand) for output, operand in aliases} == IN_PLACE.get(name, {})


@pytest.mark.parametrize("cores", ["1", "2", None])
def test_a_kernel_is_launched_on_the_cores_of_a_logical_core(monkeypatch, cores):
    if cores is None:
        monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    else:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", cores)
    assert f"cores = {cores or 2} : i32" in for_trainium(nki_ops.rotate, *arguments("rotate"))


def test_a_bad_number_of_cores_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    with pytest.raises(KernelError, match="NEURON_LOGICAL_NC_CONFIG=3"):
        for_trainium(nki_ops.rotate, *arguments("rotate"))


def test_a_kernel_for_another_device_is_refused():
    with pytest.raises(KernelError, match="runs on Trainium, and this program is for cpu .*RFJAX_KERNELS"):
        run("nki", "rotate", *arguments("rotate"))


@pytest.fixture
def no_real_nki():
    if kernels.nki is not simulator:
        pytest.skip("AWS's nki is installed")


@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_on_trainium_a_missing_or_empty_nki_is_an_error(no_real_nki, monkeypatch, version):
    def find(name):
        if version is None:
            raise primitives.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(primitives.metadata, "version", find)
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    found = "AWS's nki is not installed" if version is None else "the nki 0.0.1 .* placeholder"
    with pytest.raises(KernelError, match=found):
        for_trainium(nki_ops.rotate, *arguments("rotate"))


def test_simulation_for_trainium_is_an_error():
    x, cos, sin = arguments("rotate")
    with nki_ops.using("simulate"):
        traced = jax.jit(lambda x: nki_ops.rotate(x, cos, sin)).trace(x)
        with pytest.raises(KernelError, match="^NKI kernel rotate: .* callback .* set it to nki or xla$"):
            traced.lower(lowering_platforms=("neuron",))


def test_with_nki_the_kernel_itself_is_called(no_real_nki, monkeypatch):
    """A double of `nki.jit`'s function: like it, it makes a custom call of traced arguments."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            def call(q, k, *others):
                *_, eps = others
                calls.append((grid, eps))
                shape = jax.ShapeDtypeStruct((2, 5, 2, 8), q.dtype)
                return jax.ffi.ffi_call("AwsNeuronCustomNativeKernel", (shape, shape))(q, k, *others[:-1])

            return lambda *args, eps: call(*args, eps)

    monkeypatch.setattr(kernels, "nki", object())
    monkeypatch.setattr(kernels, "rms_norm_rope_3d", Kernel())
    text = for_trainium(nki_ops.rms_norm_rope_3d, *arguments("rms_norm_rope_3d"))
    assert custom_calls(text) == ["AwsNeuronCustomNativeKernel"]
    assert calls == [(2, 1e-6)]


# ---- shapes that kernels do not take


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def rope(q=(1, 300, 64), table=(300, 8), dtype="float32", scale=None, k=None, sin=None):
    scales = spec(*scale or q[-1:]), spec(q[-1])
    return [spec(*q, dtype=dtype), spec(*k or q, dtype=dtype), scales, spec(*table), spec(*sin or table)]


def rotation(x=(2, 300, 16), table=(300, 8), dtype="float32"):
    return [spec(*x, dtype=dtype), spec(*table), spec(*table)]


def cache(pool=(3, 1, 2, 5, 8), block=(1, 2, 5, 8), v_pool=None, dtype="float32"):
    block = spec(*block, dtype=dtype)
    return [(spec(*pool, dtype=dtype), spec(*v_pool or pool, dtype=dtype)), (block, block), spec(dtype="int32")]


def attend(q=(1, 9, 2, 8), pools=((3, 1, 2, 5, 8),), places=2, dtype="float32", kv_dtype=None, v=None):
    pools = [(spec(*p, dtype=kv_dtype or dtype), spec(*v or p, dtype=kv_dtype or dtype)) for p in pools]
    return [spec(*q, dtype=dtype), pools, spec(places, dtype="int32"), spec(dtype="int32")]


WIDE = {"dtype": "bfloat16"}
REFUSED = [
    ("rms_norm_rope_3d", rope(dtype="float16"), "q is float16; it takes float32 and bfloat16"),
    ("rms_norm_rope_3d", rope(q=(300, 64)), r"q \(300, 64\) must be \[B, T, C\]"),
    ("rms_norm_rope_3d", rope(k=(1, 300, 32)), r"k \(1, 300, 32\) .* must be as q"),
    ("rms_norm_rope_3d", rope(scale=(32,)), r"norm scales .*32.* must be as long .* 64"),
    ("rms_norm_rope_3d", rope(table=(299, 8)), "299 rows for 300 tokens"),
    ("rms_norm_rope_3d", rope(sin=(300, 7)), r"sin \(300, 7\) must have the shape of cos, \(300, 8\)"),
    ("rms_norm_rope_3d", rope(table=(1, 300, 8)), r"table \(1, 300, 8\) must be"),
    ("rms_norm_rope_3d", rope(q=(1, 300, 60)), "60 channels are no whole number of heads of 16"),
    ("rms_norm_rope_3d", rope(q=(1, 9, 3072), table=(9, 1536)), "1536 pairs of channels a head are not 1 to 1024"),
    ("rms_norm_rope_3d", rope(q=(1, 300, 16000)), "16000 channels and 8 pairs a head need .* of the 212728 B"),
    ("rotate", rotation(dtype="int32"), "x is int32"),
    ("rotate", rotation(x=(16,)), r"x \(16,\) must be"),
    ("rotate", rotation(x=(2, 0, 16)), "is empty"),
    ("rotate", rotation(x=(2, 300, 14)), "8 columns, half of 14 channels are 7"),
    ("rotate", rotation(table=(2, 8)), "2 rows for 300 tokens"),
    ("rotate", rotation(x=(2, 9000, 1024), table=(9000, 512)), "512 pairs a head need"),
    ("update_cache", cache(pool=(3, 2, 5, 8)), r"the pool \(3, 2, 5, 8\) must be"),
    ("update_cache", cache(v_pool=(2, 1, 2, 5, 8)), "must be as keys"),
    ("update_cache", cache(block=(1, 2, 4, 8)), r"keys \(1, 2, 4, 8\) must have the shape of a slot, \(1, 2, 5, 8\)"),
    ("update_cache", cache(dtype="int32"), "k_pool is int32"),
    ("attention", attend(dtype="float16"), "q is float16"),
    ("attention", attend(q=(9, 2, 8)), r"q \(9, 2, 8\) must be"),
    ("attention", attend(q=(1, 9, 2, 130)), "head dim 130 exceeds 128"),
    ("attention", attend(q=(2, 2**22, 2, 8)), r"more than 2\^24 rows"),
    ("attention", attend(pools=[(2**23, 1, 2, 5, 8)]), r"more than 2\^24 rows"),
    ("attention", attend(places=0), r"the table \(0,\)"),
    ("attention", attend(pools=[(1, 1, 2, 5, 8)] * 4), "4 pools"),
    ("attention", attend(pools=[(3, 1, 3, 5, 8)]), r"must hold blocks \(1, 2, 5, 8\)"),
    ("attention", attend(pools=[(3, 1, 2, 5, 8), (3, 1, 2, 6, 8)]), r"2, 6, 8\) must hold blocks \(1, 2, 5, 8\)"),
    ("attention", attend(v=(2, 1, 2, 5, 8)), "values .* must be as keys"),
    ("attention", attend(kv_dtype="bfloat16"), "a pool of bfloat16 must have the dtype of the queries, float32"),
    ("attention", attend((1, 9, 2, 128), [(9, 1, 2, 4680, 128)], 7), "7 blocks of 4680 keys .*need 378348 B"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["nki", "simulate"])
@pytest.mark.parametrize("name, args, rule", REFUSED)
def test_shapes_that_a_kernel_cannot_take_are_refused_while_tracing(backend, name, args, rule):
    with nki_ops.using(backend), pytest.raises(KernelError, match=f"^NKI kernel {name}: .*({rule})"):
        jax.eval_shape(lambda *args: getattr(nki_ops, name)(*args), *args)


@pytest.mark.parametrize(
    "name, args",
    [
        ("rms_norm_rope_3d", rope(q=(1, 16384, 7424), table=(16384, 64), **WIDE)),
        ("rms_norm_rope_3d", rope(q=(1, 300, 11056), **WIDE)),
        ("rms_norm_rope_3d", rope(q=(1, 9, 4096), table=(9, 1024))),
        ("rotate", rotation(x=(3, 16384, 388), table=(16384, 194))),
        ("rotate", rotation(x=(3, 300, 2048), table=(1, 1024))),
        ("update_cache", cache(pool=(2, 1, 1, 65537, 3), block=(1, 1, 65537, 3))),
        ("attention", attend((1, 9, 1, 128), [(2, 1, 1, 5200, 128)], 7, **WIDE)),
        ("attention", attend((1, 9, 1, 128), [(2, 1, 1, 14000, 128)], 2, **WIDE)),
        ("attention", attend((1, 9, 1, 1), [(2, 1, 1, 4, 1)], 3)),
    ],
)
def test_shapes_at_the_edge_of_what_is_accepted_build(no_real_nki, name, args):
    """On the simulator, which counts the chip's memory, without data."""
    with nki_ops.using("nki"):
        jaxpr = jax.make_jaxpr(lambda *args: getattr(nki_ops, name)(*args))(*args)
    call = next(e for e in jaxpr.eqns if e.primitive.name == f"nki_{name}")
    operands = [TensorSpec(x.aval.shape, x.aval.dtype) for x in call.invars]
    for i, operand in enumerate(operands):
        if operand.dtype == jnp.int32:
            operands[i] = np.ones(operand.shape, np.int32)
    for cores in (1, 2):
        profile(getattr(kernels, name)[cores], cost_only=True)(*operands)
