"""Running kernels: arguments, outputs, in-place inputs, loops, and launches on two cores."""

import ml_dtypes
import numpy as np
import pytest

from nki_ops.simulator import NkiValidationError, SimulatorError, TensorSpec, jit, nki, profile, simulate

nl, nisa = nki.language, nki.isa


@jit
def doubled(a, factor=2.0):
    """A typical small kernel."""
    tile = nl.load(a)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    out = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out


X = np.arange(32, dtype=np.float32).reshape(4, 8)


def test_decorated_and_plain_functions_run():
    for kernel in (doubled, doubled[1], doubled.function):
        np.testing.assert_array_equal(simulate(kernel)(X), 2 * X)
    np.testing.assert_array_equal(doubled(X, factor=3.0), 3 * X)
    assert doubled.__name__ == "doubled" and "typical" in doubled.__doc__


def test_outputs_keep_their_dtype():
    for dtype in (ml_dtypes.bfloat16, np.float16, np.int32, ml_dtypes.float8_e4m3):
        assert simulate(doubled)(X.astype(dtype)).dtype == dtype


def copy_through(a, out):
    tile = nl.load(a)
    nisa.dma_copy(out, tile)


def test_inputs_are_written_in_place():
    out = np.zeros_like(X)
    assert simulate(copy_through)(X, out) is None
    np.testing.assert_array_equal(out, X)
    columns = np.zeros((8, 4), np.float32).T  # not contiguous: a copy goes in and comes back
    simulate(copy_through)(X, columns)
    np.testing.assert_array_equal(columns, X)


def test_returned_inputs_are_the_arrays_passed_in():
    def kernel(cache, block):
        nisa.dma_copy(cache[1:3], nl.load(block))
        return cache, doubled.function(block)

    cache, block = X.copy(), np.ones((2, 8), np.float32)
    got, twice = simulate(kernel)(cache, block)
    assert got is cache
    assert (cache[1:3] == 1).all() and (cache[0] == X[0]).all() and (twice == 2).all()


def test_read_only_inputs_come_back_as_outputs():
    fixed = X.copy()
    fixed.flags.writeable = False

    def kernel(cache, give):
        nisa.memset(one := nl.ndarray((1, 8), nl.float32), 1.0)
        nisa.dma_copy(cache[0:1], one)
        return cache if give else None

    got = simulate(kernel)(fixed, True)
    assert (got[0] == 1).all() and (fixed[0] == X[0]).all()
    with pytest.raises(SimulatorError, match="writes its argument cache, which is read-only"):
        simulate(kernel)(fixed, False)


def test_jax_arrays_are_taken():
    jnp = pytest.importorskip("jax.numpy")
    out = simulate(doubled)(jnp.asarray(X, jnp.bfloat16))
    assert out.dtype == ml_dtypes.bfloat16 and (out.astype(np.float32) == 2 * X).all()

    def kernel(a, kind):
        assert kind == nl.bfloat16

    simulate(kernel)(X, jnp.bfloat16)


def test_constants_and_none_pass_through():
    class Config(nl.NKIObject):
        width: int = 4

    def kernel(a, bias, config, shape, kind):
        assert bias is None and config.width == 4 and shape == (4, 8) and kind == nl.bfloat16
        return doubled.function(a, factor=1.0)

    simulate(kernel)(X, None, Config(), (4, 8), ml_dtypes.bfloat16)


LAUNCH_RULES = {
    "list": (lambda a, b: None, (X, [1, 2]), "argument b is a list; pass a tuple"),
    "empty": (lambda a: None, (np.zeros((0, 4), np.float32),), "at least one element"),
    "float64": (lambda a: None, (X.astype(np.float64),), "is not an NKI type"),
    "private output": (
        lambda a: nl.ndarray(a.shape, a.dtype, nl.hbm),
        (X,),
        "outputs must be allocated with buffer=nl.shared_hbm",
    ),
    "sbuf output": (lambda a: nl.load(a), (X,), "outputs must be allocated with buffer=nl.shared_hbm"),
    "unwritten output": (lambda a: nl.ndarray((4, 4), nl.float32, nl.shared_hbm), (X,), "16 elements were never"),
    "partial output": (
        lambda a: (nisa.dma_copy((o := nl.ndarray((4, 8), nl.float32, nl.shared_hbm))[0:3], a[0:3]), o)[1],
        (X,),
        "8 elements were never written",
    ),
    "part of a tensor": (lambda a: a[0:2], (X,), "is a part of"),
    "no tensor": (lambda a: 3.0, (X,), "a kernel returns tensors, got float"),
    "decorated callee": (lambda a: doubled(a), (X,), "functions that kernels call must not be decorated"),
}


@pytest.mark.parametrize("rule", LAUNCH_RULES)
def test_launch_rules(rule):
    kernel, args, message = LAUNCH_RULES[rule]
    with pytest.raises(NkiValidationError, match=message):
        simulate(kernel)(*args)


def test_bad_launches():
    with pytest.raises(NkiValidationError, match="launch grid 3 must be 1 or 2"):
        doubled[3]
    with pytest.raises(SimulatorError, match="platform_target"):
        jit(platform_target="trn2")
    with pytest.warns(DeprecationWarning, match="mode"):
        jit(mode="trace")
    with pytest.raises(SimulatorError, match="called inside a kernel"):
        simulate(lambda: simulate(doubled)(X))()
    with pytest.raises(TypeError):
        simulate(doubled)()


def test_the_target_is_trainium2(monkeypatch):
    assert simulate(lambda: None)() is None
    assert nisa.get_nc_version() == nisa.nc_version.gen3 and nisa.get_nc_version() < nisa.nc_version.gen4
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    with pytest.raises(SimulatorError, match="TARGET_OVERRIDE=trn3: the simulator models trn2"):
        simulate(doubled)(X)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    simulate(doubled)(X)


def test_without_precise_fp_nothing_is_rounded(monkeypatch, rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)

    def kernel(a):
        tile = nl.ndarray(a.shape, nl.bfloat16)
        nisa.dma_copy(tile, a)
        out = nl.ndarray(a.shape, nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    rounded = simulate(kernel)(x)
    np.testing.assert_array_equal(rounded, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    np.testing.assert_array_equal(simulate(kernel)(x), x)
    with pytest.raises(NkiValidationError, match="NKI_PRECISE_FP=1"):
        simulate(lambda: nl.ndarray((4, 4), nl.bfloat16).view(nl.int16) and None)()


# ---- loops of the device


def test_fori_loop_runs_with_a_register(chip):
    def kernel(a, count):
        bound, out = nisa.register_alloc(), nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        nisa.register_load(bound, chip.up(count))
        nisa.dma_copy(out, chip.sb(*a.shape, value=-1.0))

        def body(i):
            tile = chip.sb(1, 8)
            nisa.dma_copy(tile, a.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0))
            nisa.tensor_scalar(tile, tile, nl.add, 100.0)
            nisa.dma_copy(out.select(0, i), tile)

        nl.fori_loop(1, bound, body, step=2)
        return out

    assert (simulate(kernel)(X, np.array([[1]], np.int32)) == -1).all()
    got = simulate(kernel)(X, np.array([[4]], np.int32))
    np.testing.assert_array_equal(got[[1, 3]], X[[1, 3]] + 100)
    assert (got[[0, 2]] == -1).all()


def test_while_loop_ends_at_zero(chip):
    def kernel(count):
        left, total = chip.up(count), chip.sb(1, 1, value=0.0)
        reg = nisa.register_alloc()
        nisa.register_load(reg, left)

        def body(r):
            nisa.tensor_scalar(total, total, nl.add, 2.0)
            nisa.tensor_scalar(left, left, nl.subtract, 1.0)
            nisa.register_load(r, left)
            return r

        nl.while_loop(reg, body)
        return chip.down(total)

    assert simulate(kernel)(np.array([[5]], np.int32)) == 10
    assert simulate(kernel)(np.array([[0]], np.int32)) == 0


def test_dynamic_range_and_range_aliases_still_work(chip):
    def kernel(count):
        out, reg = chip.sb(1, 1, value=0.0), nisa.register_alloc()
        nisa.register_load(reg, chip.up(count))
        for _ in nl.dynamic_range(reg):
            nisa.tensor_scalar(out, out, nl.add, 1.0)
        for alias in (nl.affine_range, nl.sequential_range, nl.static_range):
            assert [*alias(3)] == [0, 1, 2] and [*alias(1, 5, 2)] == [1, 3]
        assert nisa.vector_engine is nisa.engine.vector
        return chip.down(out)

    with pytest.warns(DeprecationWarning) as caught:
        assert simulate(kernel)(np.array([[3]], np.int32)) == 3
    said = {str(w.message) for w in caught}
    assert "nl.dynamic_range is deprecated; use nl.fori_loop" in said
    assert "nl.affine_range is deprecated; use range" in said
    assert "nisa.vector_engine is deprecated; use nisa.engine.vector" in said


def test_registers_move_and_store(chip):
    def kernel():
        a, b = nisa.register_alloc(-5), nisa.register_alloc()
        nisa.register_move(b, a)
        out = chip.sb(1, 1, dtype="int32")
        nisa.register_store(out, b)
        nisa.register_move(a, 2**31)  # wraps
        again = chip.sb(1, 1, dtype="int32")
        nisa.register_store(again, a)
        return chip.down(out), chip.down(again)

    assert [int(x[0, 0]) for x in simulate(kernel)()] == [-5, -(2**31)]


def leak(chip):
    kept = []
    nl.fori_loop(0, 2, lambda i: kept.append(chip.sb(1, 1, value=0.0)))
    nisa.tensor_copy(chip.sb(1, 1), kept[0])


def reorder(chip):
    with nl.no_reorder():
        nl.fori_loop(0, 2, lambda i: None)


LOOP_RULES = {
    "leaked tensor": (leak, "made inside a loop body"),
    "returns": (lambda c: nl.fori_loop(0, 2, lambda i: 1), "body_fun must return None"),
    "step": (lambda c: nl.fori_loop(0, 2, lambda i: None, step=0), "positive compile-time integer"),
    "no_reorder": (reorder, "not supported inside nl.no_reorder"),
    "bound": (lambda c: nl.fori_loop(0, 2.5, lambda i: None), "must be an integer or a register"),
    "unset bound": (lambda c: nl.fori_loop(0, nisa.register_alloc(), lambda i: None), "uninitialised register"),
    "writes index": (lambda c: nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 0)), "which is read-only"),
    "while returns": (lambda c: nl.while_loop(nisa.register_alloc(1), lambda r: None), "must return the register"),
}


@pytest.mark.parametrize("rule", LOOP_RULES)
def test_loop_rules(chip, rule):
    breaks, message = LOOP_RULES[rule]
    with pytest.raises(NkiValidationError, match=message):
        simulate(lambda: breaks(chip) and None)()


@pytest.mark.parametrize("use", [lambda r: r + 1, bool, int, range, lambda r: r < 3, lambda r: [0, 1][r]])
def test_python_cannot_see_a_register(use):
    with pytest.raises(TypeError, match="has no value while the kernel is built"):
        simulate(lambda: nl.fori_loop(0, 1, lambda i: use(i) and None))()


# ---- two cores


def split_rows(a):
    """Each core does half of the rows, then core 0 checks the other's half."""
    core, cores = nl.program_id(), nl.num_programs()
    rows = a.shape[0] // cores
    out = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
    mine = slice(core * rows, (core + 1) * rows)
    tile = nl.load(a[mine])
    nisa.tensor_scalar(tile, tile, nl.add, float(core))
    nisa.dma_copy(out[mine], tile)
    return out


def test_two_cores_share_inputs_and_outputs():
    want = X.copy()
    want[2:] += 1
    np.testing.assert_array_equal(simulate(jit(split_rows)[2])(X), want)
    np.testing.assert_array_equal(simulate(split_rows)(X), X)

    def grid(expected):
        assert (nl.program_ndim(), nl.num_programs(0)) == expected

    simulate(grid)((0, 1))
    simulate(jit(grid)[1])((1, 1))
    simulate(jit(grid)[2])((1, 2))


def exchange(a, barrier):
    """Core 1 reads what core 0 wrote, after a barrier or without one."""
    shared = nl.ndarray((2, 8), a.dtype, nl.shared_hbm)
    out = nl.ndarray((2, 8), a.dtype, nl.shared_hbm)
    me = nl.program_id()
    nisa.dma_copy(shared[me : me + 1], nl.load(a[me : me + 1]))
    if barrier:
        nisa.core_barrier(shared, (0, 1))
    nisa.dma_copy(out[me : me + 1], nl.load(shared[1 - me : 2 - me]))
    return out


def test_core_barrier_orders_the_cores():
    np.testing.assert_array_equal(simulate(jit(exchange)[2])(X, True), X[[1, 0]])
    assert np.isnan(simulate(jit(exchange)[2])(X, False)).any()  # the bug shows, and every time


def swap(a, engine=nisa.dma_engine.dma):
    me = nl.program_id()
    mine, theirs = nl.load(a[me : me + 1]), nl.ndarray((1, 8), a.dtype)
    nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe_id=0, dma_engine=engine)
    out = nl.ndarray((2, 8), a.dtype, nl.shared_hbm)
    nisa.dma_copy(out[me : me + 1], theirs)
    return out


def test_sendrecv_swaps_tiles():
    np.testing.assert_array_equal(simulate(jit(swap)[2])(X), X[[1, 0]])
    np.testing.assert_array_equal(simulate(jit(swap)[2])(X, nisa.dma_engine.gpsimd_dma), X[[1, 0]])


def send(src, dst, to=1, engine=nisa.dma_engine.dma):
    return nisa.sendrecv(src, dst, to, 1 - nl.program_id(), 0, dma_engine=engine)


def one_sided(chip):
    if nl.program_id() == 0:
        nisa.core_barrier(nl.ndarray((4,), nl.float32, nl.shared_hbm), (0, 1))


def crossed(chip):
    data = nl.ndarray((4,), nl.float32, nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.core_barrier(data, (0, 1))
    else:
        send(chip.sb(4, 4, value=0.0), chip.sb(4, 4), to=0)


def uneven(chip):
    nl.fori_loop(0, 1 + nl.program_id(), lambda i: None)


CORE_RULES = {
    "one-sided barrier": (one_sided, "core_barrier 1 on core 0 never completes: core 1 ended"),
    "deadlock": (crossed, "never completes: core 0 waits for something else"),
    "uneven loops": (uneven, "both cores must have the same control flow"),
    "barrier cores": (
        lambda c: nisa.core_barrier(nl.ndarray((4,), nl.float32, nl.shared_hbm), (0, 2)),
        "cores .0, 2. must be .0, 1.",
    ),
    "barrier data": (lambda c: nisa.core_barrier(c.sb(4, 4), (0, 1)), "data must be in shared_hbm"),
    "send psum": (lambda c: send(c.ps(4, 4), c.sb(4, 4)), "PSUM, which DMA cannot reach"),
    "send hbm": (lambda c: send(c.hbm(4, 4), c.sb(4, 4)), "src must be in sbuf"),
    "send shape": (lambda c: send(c.sb(4, 4), c.sb(4, 8)), "must have the shape and dtype of dst"),
    "send other shape": (
        lambda c: send(c.sb(4, n := 4 + 4 * nl.program_id(), value=0.0), c.sb(4, n), to=1 - nl.program_id()),
        "core . sent .4, .*, dst is",
    ),
    "send rank": (lambda c: send(c.sb(4, 4), c.sb(4, 4), to=2), "send_to_rank 2 must be 0 or 1"),
    "send size": (
        lambda c: send(c.sb(4, 512), c.sb(4, 512), engine=nisa.dma_engine.gpsimd_dma),
        "2048 bytes per partition, gpsimd_dma takes 1024",
    ),
    "other allocation": (
        lambda c: nl.ndarray((4 + nl.program_id(),), nl.float32, nl.shared_hbm),
        "both cores must allocate the same tensors",
    ),
}


@pytest.mark.parametrize("rule", CORE_RULES)
def test_core_rules(chip, rule):
    breaks, message = CORE_RULES[rule]

    def kernel():
        breaks(chip)

    with pytest.raises(NkiValidationError, match=message):
        simulate(jit(kernel)[2])()


def test_cores_must_return_the_same_tensors(chip):
    def kernel():
        outs = [nl.ndarray((1, 4), nl.float32, nl.shared_hbm) for _ in range(2)]
        return outs[nl.program_id()]

    with pytest.raises(NkiValidationError, match="the cores return different tensors"):
        simulate(jit(kernel)[2])()


def test_profile_reports_each_core():
    out, report = profile(jit(split_rows)[2])(X)
    assert report.cores == 2 and len(report.per_core) == 2
    assert report.seconds == max(r.seconds for r in report.per_core)
    assert out.shape == X.shape
    spec, again = profile(jit(split_rows)[2], cost_only=True)(TensorSpec(X.shape, nl.float32))
    assert spec == TensorSpec((4, 8), "float32") and again.engine_seconds == report.engine_seconds
