"""What instructions of VectorE compute, and how values are cast, against numpy."""

import ml_dtypes
import numpy as np
import pytest

from nki_ops.simulator import nki

nl, nisa = nki.language, nki.isa
BF16 = ml_dtypes.bfloat16


def close(got, want, tol=1e-6):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


@pytest.fixture
def x(rng):
    return rng.standard_normal((32, 64)).astype(np.float32)


@pytest.fixture
def y(rng):
    return rng.standard_normal((32, 64)).astype(np.float32)


def test_tensor_tensor(chip, x, y):
    for op, f in [(nl.add, np.add), (nl.subtract, np.subtract), (nl.multiply, np.multiply), (nl.maximum, np.maximum)]:
        close(
            chip.run(lambda a, b, d, op=op: nisa.tensor_tensor(d, a, b, op), x, y, out=(x.shape, "float32")), f(x, y)
        )
    less = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.less), x, y, out=(x.shape, "uint8"))
    np.testing.assert_array_equal(less, x < y)
    both = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.logical_and), x, y, out=(x.shape, "float32"))
    np.testing.assert_array_equal(both, np.ones_like(x))
    power = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.power), np.abs(x), y, out=(x.shape, "float32"))
    close(power, np.abs(x) ** y, 1e-5)


def test_arithmetic_is_float32_whatever_the_dtypes(chip):
    """bf16 operands are summed exactly and rounded once, to nearest even."""
    a, b = np.array([[256.0, 1.0]], BF16), np.array([[1.0, 2**-9]], BF16)
    got = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.add), a, b, out=((1, 2), "float32"))
    np.testing.assert_array_equal(got, [[257.0, 1 + 2**-9]])
    got = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.add), a, b, out=((1, 2), "bfloat16"))
    np.testing.assert_array_equal(got, [[256.0, 1.0]])


def test_int32_is_exact_on_gpsimd_and_float_on_vector(chip):
    a, b = np.array([[2**24 + 1, 2**31 - 1]], np.int32), np.array([[2, 1]], np.int32)
    exact = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.add), a, b, out=((1, 2), "int32"))
    np.testing.assert_array_equal(exact, [[2**24 + 3, -(2**31)]])
    rounded = chip.run(
        lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.add, engine=nisa.engine.vector), a, b, out=((1, 2), "int32")
    )
    np.testing.assert_array_equal(rounded, [[2**24 + 2, 2**31 - 1]])


def test_casts_to_integers_round_to_even_and_saturate(chip):
    values = np.array([[0.5, 1.5, 2.5, -0.5, 300.0, -300.0, 1e20, np.nan]], np.float32)
    for dtype, want in [
        ("int8", [0, 2, 2, 0, 127, -128, 127, 0]),
        ("uint8", [0, 2, 2, 0, 255, 0, 255, 0]),
        ("int32", [0, 2, 2, 0, 300, -300, 2**31 - 1, 0]),
    ]:
        got = chip.run(lambda a, d: nisa.tensor_copy(d, a), values, out=((1, 8), dtype))
        np.testing.assert_array_equal(got[0], want)


def test_low_precision_is_stored_as_ml_dtypes_rounds(chip, x):
    for dtype in ("bfloat16", "float16", "float8_e4m3", "float8_e5m2"):
        got = chip.run(lambda a, d: nisa.tensor_copy(d, a), x, out=(x.shape, dtype))
        kind = getattr(ml_dtypes, dtype, np.float16)
        np.testing.assert_array_equal(got, x.astype(kind).astype(np.float64))
    tf32 = chip.run(lambda a, d: nisa.tensor_copy(d, a), x, out=(x.shape, "tfloat32"))
    assert np.abs(tf32 / x - 1).max() <= 2**-11
    assert len(np.unique(tf32.astype(np.float32).view(np.uint32) & 0x1FFF)) == 1


def test_tensor_scalar(chip, x):
    column = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]

    def run(*args, **kwargs):
        return chip.run(lambda a, c, d: nisa.tensor_scalar(d, a, *args, **kwargs), x, column, out=(x.shape, "float32"))

    close(run(nl.multiply, 2.0, op1=nl.add, operand1=-1.0), x * 2 - 1)
    close(run(nl.subtract, 1.0, reverse0=True), 1 - x)
    close(run(nl.multiply, 2.0, op1=nl.subtract, operand1=3.0, reverse1=True), 3 - 2 * x)
    close(run(nl.abs, op1=nl.power, operand1=0.5), np.sqrt(np.abs(x)))
    np.testing.assert_array_equal(run(nl.greater_equal, 0.25), x >= 0.25)
    got = chip.run(
        lambda a, c, d: nisa.tensor_scalar(d, a, nl.multiply, c, op1=nl.add, operand1=c, engine=nisa.engine.scalar),
        x,
        column,
        out=(x.shape, "float32"),
    )
    close(got, x * column + column)
    positive = np.abs(x) + 0.5
    close(
        chip.run(lambda a, d: nisa.tensor_scalar(d, a, nl.rsqrt, 0.0), positive, out=(x.shape, "float32")),
        positive**-0.5,
    )


def test_bit_operations(chip, rng):
    a = rng.integers(-(2**31), 2**31 - 1, (8, 16)).astype(np.int32)
    b = rng.integers(0, 31, (8, 16)).astype(np.int32)
    shape = (a.shape, "int32")
    got = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.bitwise_xor), a, b, out=shape)
    np.testing.assert_array_equal(got, a ^ b)
    got = chip.run(lambda a, b, d: nisa.tensor_tensor(d, a, b, nl.right_shift), a, b, out=shape)
    np.testing.assert_array_equal(got, (a.view(np.uint32) >> b.view(np.uint32)).view(np.int32))
    got = chip.run(
        lambda a, d: nisa.tensor_scalar(d, a, nl.left_shift, 3, op1=nl.bitwise_and, operand1=0xFF), a, out=shape
    )
    np.testing.assert_array_equal(got, (a << 3) & 0xFF)
    got = chip.run(lambda a, d: nisa.tensor_scalar(d, a, nl.invert), a, out=shape)
    np.testing.assert_array_equal(got, ~a)


def test_scalar_tensor_tensor(chip, x, y):
    column = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    got = chip.run(
        lambda a, b, c, d: nisa.scalar_tensor_tensor(d, a, nl.multiply, c, nl.subtract, b, reverse1=True),
        x,
        y,
        column,
        out=(x.shape, "float32"),
    )
    close(got, y - x * column)
    got = chip.run(
        lambda a, b, d: nisa.scalar_tensor_tensor(d, a, nl.subtract, 1.0, nl.multiply, b, reverse0=True),
        x,
        y,
        out=(x.shape, "float32"),
    )
    close(got, (1 - x) * y)


def test_stride_zero_operands_broadcast(chip, rng):
    x = rng.standard_normal((16, 4, 8)).astype(np.float32)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    got = chip.run(
        lambda a, b, d: nisa.tensor_tensor(d, a, b.expand_dim(1).broadcast(1, 4), nl.multiply),
        x,
        c,
        out=(x.shape, "float32"),
    )
    close(got, x * c[:, None])


def test_copies_and_selections(chip, x, y):
    mask = (x > 0).astype(np.uint8)

    def predicated(reverse):
        def body(a, b, m, d):
            nisa.tensor_copy(d, b)
            nisa.tensor_copy_predicated(d, a, m, reverse_pred=reverse)

        return chip.run(body, x, y, mask, out=(x.shape, "float32"))

    np.testing.assert_array_equal(predicated(False), np.where(mask, x, y))
    np.testing.assert_array_equal(predicated(True), np.where(mask, y, x))

    def constant(a, m, d):
        nisa.tensor_copy(d, a)
        nisa.tensor_copy_predicated(d, 7.0, m)

    np.testing.assert_array_equal(chip.run(constant, x, mask, out=(x.shape, "float32")), np.where(mask, 7.0, x))

    def select(a, m, d):
        top = chip.sb(32, 1)
        nisa.select_reduce(d, m, a, -1.0, reduce_res=top, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.tensor_scalar(d, d, nl.subtract, top)

    want = np.where(mask, x, -1.0)
    close(chip.run(select, x, mask, out=(x.shape, "float32")), want - want.max(1, keepdims=True))


def test_bit_exact_copy_keeps_nan_payloads(chip):
    bits = np.array([[0x7FC12345, 0x7F812345, 0x80000000]], np.uint32)
    got = chip.run(lambda a, d: nisa.tensor_copy(d.view(nl.float32), a.view(nl.float32)), bits, out=((1, 3), "uint32"))
    np.testing.assert_array_equal(got, bits)


def test_range_select(chip, x):
    lo, hi = np.full((32, 1), 105.0, np.float32), np.arange(100, 132, dtype=np.float32)[:, None] + 10

    def body(a, lo, hi, d):
        top = chip.sb(32, 1)
        nisa.range_select(d, a, nl.greater_equal, nl.less, lo, hi, reduce_res=top, range_start=100)
        nisa.tensor_scalar(d, d, nl.maximum, top)

    index = np.arange(100, 164)
    kept = np.where((index >= lo) & (index < hi), x, np.finfo(np.float32).min)
    close(chip.run(body, x, lo, hi, out=(x.shape, "float32")), np.maximum(kept, kept.max(1, keepdims=True)))


def test_reductions(chip, rng):
    x = rng.standard_normal((16, 4, 8)).astype(np.float32)
    run = chip.run
    close(run(lambda a, d: nisa.tensor_reduce(d, nl.add, a, 2), x, out=((16, 4), "float32")), x.sum(2), 1e-5)
    got = run(lambda a, d: nisa.tensor_reduce(d, nl.maximum, a, (1, 2), negate=True), x, out=((16, 1), "float32"))
    close(got[:, 0], -x.max((1, 2)))
    whole = rng.integers(0, 255, (16, 8)).astype(np.uint8)
    got = run(lambda a, d: nisa.tensor_reduce(d, nl.bitwise_or, a, 1), whole, out=((16, 1), "uint8"))
    np.testing.assert_array_equal(got[:, 0], np.bitwise_or.reduce(whole, 1))
    got = run(lambda a, d: nisa.tensor_partition_reduce(d, nl.add, a), x[:, 0], out=((1, 8), "float32"))
    close(got[0], x[:, 0].sum(0), 1e-5)


def test_tensor_scalar_reduce_carries_its_registers(chip, rng):
    x = rng.standard_normal((16, 32)).astype(np.float32)
    cmd = nisa.reduce_cmd

    def body(a, d):
        part, res = chip.sb(16, 16), [chip.sb(16, 1) for _ in range(4)]
        reduce = nisa.tensor_scalar_reduce
        reduce(part, a[:, :16], nl.multiply, 2.0, nl.maximum)
        reduce(part, a[:, 16:], nl.multiply, 2.0, nl.maximum, res[0], reduce_cmd=cmd.reduce)
        reduce(part, a[:, 16:], nl.multiply, 2.0, nl.add, res[1], reduce_cmd=cmd.reset_reduce, reduce_res_negate=True)
        reduce(part, a[:, 16:], nl.multiply, 1.0, nl.add, res[2], reduce_cmd=cmd.load_reduce, reduce_init=5.0)
        reduce(part, a[:, :16], nl.add, 0.0, nl.multiply, res[3])
        for i, r in enumerate(res):
            nisa.tensor_copy(d[:, i : i + 1], r)

    got = chip.run(body, x, out=((16, 4), "float32"))
    want = [2 * x.max(1), -2 * x[:, 16:].sum(1), 5 + x[:, 16:].sum(1), x[:, :16].prod(1)]
    close(got, np.stack(want, 1), 1e-4)


def test_vector_registers_are_undefined_after_idle(chip, x):
    def body(a, d):
        ones, scratch = chip.sb(32, 64, dtype="uint8", value=1), chip.sb(32, 64)
        nisa.tensor_scalar_reduce(scratch, a, nl.add, 0.0, nl.maximum)
        nisa.select_reduce(scratch, ones, a, 0.0)
        nisa.tensor_scalar_reduce(scratch, a, nl.add, 0.0, nl.maximum, d, reduce_cmd=nisa.reduce_cmd.reduce)

    assert np.isnan(chip.run(body, x, out=((32, 1), "float32"))).all()


def test_scans(chip, rng):
    a, b = (rng.standard_normal((8, 16)).astype(np.float32) for _ in "ab")
    got = chip.run(
        lambda a, b, d: nisa.tensor_tensor_scan(d, a, b, 0.5, nl.multiply, nl.add), a, b, out=(a.shape, "float32")
    )
    state, want = np.full(8, 0.5, np.float32), []
    for i in range(16):
        state = a[:, i] * state + b[:, i]
        want.append(state)
    close(got, np.stack(want, 1), 1e-5)

    def cumulative(a, d):
        nisa.tensor_scalar_cumulative(d[:, :8], a[:, :8], nl.multiply, nl.add, 2.0)
        nisa.tensor_scalar_cumulative(d[:, 8:], a[:, 8:], nl.multiply, nl.add, 2.0, reduce_cmd=nisa.reduce_cmd.reduce)

    close(chip.run(cumulative, a, out=(a.shape, "float32")), np.cumsum(2 * a, 1), 1e-5)
    load = nisa.reduce_cmd.load_reduce
    got = chip.run(
        lambda a, d: nisa.tensor_scalar_cumulative(d, a, nl.add, nl.maximum, 0.0, imm1=0.5, reduce_cmd=load),
        a,
        out=(a.shape, "float32"),
    )
    close(got, np.maximum(np.maximum.accumulate(a, 1), 0.5))


def test_batch_norm_statistics(chip, rng):
    x = rng.standard_normal((16, 3, 100)).astype(np.float32) * 3 + 1

    def body(a, d):
        stats = chip.sb(16, 3, 6)
        for i in range(3):
            nisa.bn_stats(stats[:, i, :], a[:, i, :])
        nisa.bn_aggr(d, stats)

    got = chip.run(body, x, out=((16, 2), "float32"))
    close(got, np.stack([x.mean((1, 2)), x.var((1, 2))], 1), 1e-4)
