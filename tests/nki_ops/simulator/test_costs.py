"""Modelled costs against the documented formulas, worked out by hand; memory accounting; runs without data."""

import json

import numpy as np
import pytest

from nki_ops.simulator import NkiValidationError, TensorSpec, costs, nki, profile, simulate
from nki_ops.simulator.accounting import SBUF_BYTES

nl, nisa = nki.language, nki.isa
OVERHEAD = 60


def cycles(chip, body, engine):
    """Cycles that `body(chip)` keeps an engine busy beyond what its tensors' set-up costs."""
    _, report = profile(lambda: body(chip) and None)()
    return report.engine_cycles.get(engine, 0.0)


ENGINE_CYCLES = {
    # TensorE: columns of the moving operand, at least min(64, stationary columns); float32 four times.
    "matmul": ("tensor", 512, lambda c: nisa.nc_matmul(c.ps(128, 512), bf(c, 128, 128), bf(c, 128, 512))),
    "matmul of few columns": ("tensor", 64, lambda c: nisa.nc_matmul(c.ps(128, 1), bf(c, 128, 128), bf(c, 128, 1))),
    "matmul of float32": ("tensor", 2048, lambda c: nisa.nc_matmul(c.ps(128, 512), c.sb(128, 128), c.sb(128, 512))),
    "matmul by ones": (
        "tensor",
        1024,
        lambda c: nisa.nc_matmul(c.ps(128, 512), c.sb(128, 128), c.sb(128, 512), is_stationary_onezero=True),
    ),
    "transpose": ("tensor", 128, lambda c: nisa.nc_transpose(c.ps(128, 128, dtype="bfloat16"), bf(c, 128, 128))),
    # ScalarE: one element a cycle; reading the sums costs 64 more.
    "activation": ("scalar", 60 + 1024, lambda c: nisa.activation(bf(c, 128, 1024), nl.exp, c.ps(128, 1024))),
    "activation with sum": (
        "scalar",
        60 + 512 + 64,
        lambda c: nisa.activation_reduce(bf(c, 128, 512), nl.exp, c.ps(128, 512), nl.add, c.sb(128, 1)),
    ),
    "scalar copy": ("scalar", 60 + 256, lambda c: nisa.tensor_copy(bf(c, 8, 256), bf(c, 8, 256), nisa.engine.scalar)),
    # VectorE: performance modes of bf16, two cycles for two inputs, eight for a reciprocal.
    "copy bf16": ("vector", 60 + 256, lambda c: nisa.tensor_copy(bf(c, 8, 1024), bf(c, 8, 1024))),
    "copy bf16 strided": ("vector", 60 + 256, lambda c: nisa.tensor_copy(bf(c, 8, 512), bf(c, 8, 1024)[:, ::2])),
    "copy bf16 from psum": (
        "vector",
        60 + 512,
        lambda c: nisa.tensor_copy(bf(c, 8, 1024), c.ps(8, 1024, dtype="bfloat16")),
    ),
    "copy float32": ("vector", 60 + 1024, lambda c: nisa.tensor_copy(c.sb(8, 1024), c.sb(8, 1024))),
    "long stride": ("vector", 60 + 2 * 128, lambda c: nisa.tensor_copy(c.sb(8, 128), c.sb(8, 1024)[:, ::8])),
    "two bf16": (
        "vector",
        60 + 1024,
        lambda c: nisa.tensor_tensor(bf(c, 8, 1024), bf(c, 8, 1024), bf(c, 8, 1024), nl.add),
    ),
    "two float32": (
        "vector",
        60 + 2048,
        lambda c: nisa.tensor_tensor(c.sb(8, 1024), c.sb(8, 1024), c.sb(8, 1024), nl.add),
    ),
    "one in psum": (
        "vector",
        60 + 1024,
        lambda c: nisa.tensor_tensor(c.sb(8, 1024), c.ps(8, 1024), c.sb(8, 1024), nl.add),
    ),
    "scalar_tensor_tensor": (
        "vector",
        60 + 2048,
        lambda c: nisa.scalar_tensor_tensor(c.sb(8, 1024), c.sb(8, 1024), nl.add, 1.0, nl.add, c.sb(8, 1024)),
    ),
    "reciprocal": ("vector", 60 + 8 * 128, lambda c: nisa.reciprocal(c.sb(8, 128), c.sb(8, 128))),
    "reduce bf16": ("vector", 60 + 512, lambda c: nisa.tensor_reduce(bf(c, 8, 1), nl.add, bf(c, 8, 1024), 1)),
    "reduce float32": ("vector", 60 + 1024, lambda c: nisa.tensor_reduce(c.sb(8, 1), nl.add, bf(c, 8, 1024), 1)),
    "memset zero": ("vector", 60 + 512, lambda c: nisa.memset(bf(c, 8, 1024), 0.0)),
    "bn_aggr": ("vector", 60 + 13 * 6, lambda c: nisa.bn_aggr(c.sb(8, 2), c.sb(8, 18))),
    "dynamic offset": (
        "vector",
        60 + 600,
        lambda c: nisa.tensor_copy(
            bf(c, 8, 64), bf(c, 8, 128).ap([[128, 8], [1, 64]], scalar_offset=nisa.register_alloc(3), indirect_dim=1)
        ),
    ),
    # GpSimdE: 150 cycles to start, then one a cycle.
    "iota": ("gpsimd", 150 + 512, lambda c: nisa.iota(c.sb(8, 512, dtype="int32"), [[1, 512]])),
    "integer add": (
        "gpsimd",
        150 + 64,
        lambda c: nisa.tensor_tensor(*(c.sb(8, 64, dtype="int32") for _ in range(3)), nl.add),
    ),
}


def bf(chip, *shape):
    return chip.sb(*shape, dtype="bfloat16")


@pytest.mark.parametrize("name", ENGINE_CYCLES)
def test_engine_cycles(chip, name):
    engine, expected, body = ENGINE_CYCLES[name]
    assert cycles(chip, body, engine) == pytest.approx(expected)


def test_dma_efficiency_follows_the_plot():
    assert costs.dma_efficiency(32) == pytest.approx(0.014)
    assert costs.dma_efficiency(2048) == pytest.approx(0.81)
    assert costs.dma_efficiency(3072) == pytest.approx(0.89)
    assert costs.dma_efficiency(1 << 20) == 1.0
    assert costs.dma_efficiency(2) == pytest.approx(0.014 / 16)
    shares = [costs.dma_efficiency(2.0**e) for e in range(20)]
    assert shares == sorted(shares)


def dma_report(chip, body):
    return profile(lambda: body(chip) and None)()[1]


def test_dma_time_counts_engines_and_descriptors(chip):
    full = dma_report(chip, lambda c: nisa.dma_copy(c.sb(128, 8192), c.hbm(128, 8192)))
    assert full.engine_seconds["dma"] == pytest.approx(128 * 32768 / 368e9)
    assert full.engine_seconds["hbm"] == pytest.approx(128 * 32768 / 362.5e9)
    assert full.dma_runs == {32768: 128 * 32768} and full.dma_bytes == {"hbm->sbuf": 128 * 32768}
    assert full.dma_efficiency == pytest.approx(1.0) and full.small_run_share == 0.0

    # 8 partitions are one engine of 16; the document's example of 32 KiB in 1416 ns has 23 B/ns.
    few = dma_report(chip, lambda c: nisa.dma_copy(c.sb(4, 4096, dtype="bfloat16"), c.hbm(4, 4096, dtype="bfloat16")))
    assert few.engine_seconds["dma"] == pytest.approx(1416e-9, rel=0.05)

    # Stride 2 elements of 2 bytes: every element is a descriptor.
    spread = dma_report(
        chip, lambda c: nisa.dma_copy(c.sb(128, 64, dtype="bfloat16"), c.hbm(128, 128, dtype="bfloat16")[:, ::2])
    )
    assert spread.dma_runs == {2: 128 * 64 * 2} and spread.small_run_share == 1.0
    assert spread.dma_efficiency == pytest.approx(0.014 * 2 / 32)

    # Eight consecutive rows to a partition make one run.
    grouped = dma_report(chip, lambda c: nisa.dma_copy(c.sb(128, 8, 128), c.hbm(1024, 128)))
    assert grouped.dma_runs == {4096: 1024 * 128 * 4}
    # HBM to HBM loads the memory twice, and its rows spread over the engines.
    block = dma_report(chip, lambda c: nisa.dma_copy(c.hbm(128, 4680), c.hbm(128, 4680)))
    assert block.engine_seconds["hbm"] == pytest.approx(2 * 128 * 4680 * 4 / 362.5e9)
    assert block.dma_runs == {18720: 128 * 4680 * 4}
    heads = dma_report(chip, lambda c: nisa.dma_copy(c.hbm(3, 128 * 1560), c.hbm(3, 128 * 1560)))
    assert heads.engine_seconds["dma"] == pytest.approx(16 / 3 * block.engine_seconds["dma"], rel=0.02)


def test_dma_transpose_reaches_ninety_percent_from_hbm_and_half_in_sbuf(chip):
    size = 128 * 128 * 2
    outside = dma_report(chip, lambda c: nisa.dma_transpose(bf(c, 128, 128), c.hbm(128, 128, dtype="bfloat16")))
    assert outside.engine_seconds["dma"] == pytest.approx(size / (368e9 * 0.9))
    inside = dma_report(chip, lambda c: nisa.dma_transpose(bf(c, 128, 128), bf(c, 128, 128)))
    assert inside.engine_seconds["dma"] == pytest.approx(size / (368e9 * 0.5))
    assert inside.dma_bytes == {"sbuf->sbuf transposed": size}
    tail = dma_report(chip, lambda c: nisa.dma_transpose(bf(c, 64, 520), c.hbm(520, 64, dtype="bfloat16")))
    assert tail.engine_seconds["dma"] == pytest.approx(128 * 528 * 2 / (368e9 * 0.9))  # padded to full tiles


def test_dynamic_addresses_cost_descriptors(chip):
    def copy(c, mode=nisa.dge_mode.unknown):
        nisa.dma_copy(c.sb(4, 4), c.hbm(4, 4, 4).select(0, nisa.register_alloc(0)), dge_mode=mode)

    assert dma_report(chip, copy).engine_seconds["dge"] == pytest.approx(300e-9)
    assert "dge" not in dma_report(chip, lambda c: copy(c, nisa.dge_mode.swdge)).engine_seconds


# ---- memory


def test_sbuf_peak_counts_what_is_live_together(chip):
    def kernel():
        a = chip.sb(128, 256, value=0.0)  # 1 KiB
        b = chip.sb(128, 512)  # 2 KiB
        nisa.tensor_copy(b[:, 0:256], a)
        c = chip.sb(128, 1024)  # 4 KiB, after the last use of a
        nisa.tensor_copy(c[:, 0:512], b)
        return chip.down(c[:, 0:4])

    assert profile(kernel)()[1].sbuf_peak == (2 + 4) * 1024


def test_capacity_is_a_rule(chip):
    half = SBUF_BYTES // 8 + 100  # float32 elements: a bit more than half a partition

    def too_much():
        tiles = [chip.sb(128, half, value=0.0, name=f"tile{i}") for i in range(2)]
        nisa.tensor_copy(tiles[0][:, 0:1], tiles[1][:, 0:1])

    def in_turn():
        for _ in range(3):
            chip.sb(128, half, value=0.0)

    simulate(in_turn)()
    with pytest.raises(NkiValidationError, match=rf"sbuf needs \d+ bytes per partition at once and has {SBUF_BYTES}"):
        simulate(too_much)()
    with pytest.raises(NkiValidationError, match="of a sbuf partition, which has 212728"):
        simulate(lambda: chip.sb(128, 60000) and None)()
    with pytest.raises(NkiValidationError, match="bytes 212000..214048 of a sbuf partition"):
        simulate(lambda: chip.sb(128, 512, address=(0, 212000)) and None)()


def test_psum_counts_whole_banks(chip):
    def kernel(banks):
        tiles = [chip.ps(128, 4) for _ in range(banks)]
        for t in tiles:
            nisa.memset(t, 0.0)
        for t in tiles:
            nisa.tensor_copy(chip.sb(128, 4), t)

    assert profile(kernel)(8)[1].psum_peak == 8 * 2048
    with pytest.raises(NkiValidationError, match="psum needs 18432 bytes per partition at once and has 16384"):
        simulate(kernel)(9)


def test_what_a_loop_uses_stays_live_all_through_it(chip):
    def kernel(cost_only=False):
        kept = chip.sb(128, 1024, value=0.0)

        def body(i):
            first = chip.sb(128, 256)
            nisa.tensor_copy(first, kept[:, 0:256])
            nisa.memset(chip.sb(128, 2048), 0.0)  # kept is not read after this, but is in the next pass

        nl.fori_loop(0, 3, body)

    assert profile(kernel)()[1].sbuf_peak == (4 + 8) * 1024
    assert profile(kernel, cost_only=True)()[1].sbuf_peak == (4 + 8) * 1024


def rotated(chip, read_old):
    a = chip.sb(128, 64, address=(0, 1024), name="a")
    b = chip.sb(128, 32, address=(0, 1024 + 128), name="b")
    nisa.memset(a, 1.0)
    nisa.memset(b, 2.0)
    nisa.tensor_copy(chip.sb(128, 32), a[:, read_old])


def test_tensors_at_one_address_must_not_be_read_once_overwritten(chip):
    """Rotating buffers share addresses; reading the old tensor after the new one was written is the bug."""
    with pytest.raises(NkiValidationError, match="where tensor b has been written since"):
        simulate(lambda: rotated(chip, slice(32, 64)))()
    simulate(lambda: rotated(chip, slice(0, 32)))()

    def rotates():
        for i in range(4):
            tile = chip.sb(128, 64, address=(0, 256 * (i % 2)), value=float(i))
            nisa.tensor_scalar(tile, tile, nl.add, 1.0)

    _, report = profile(rotates)()
    assert report.sbuf_peak == 512

    def stale_in_place():
        old = chip.sb(128, 64, address=(0, 0), value=1.0)
        chip.sb(128, 64, address=(0, 0), value=2.0)
        nisa.tensor_scalar(old, old, nl.add, 1.0)

    with pytest.raises(NkiValidationError, match="data reads"):
        simulate(stale_in_place)()


# ---- runs without data


def scaled_rows(a, count, chip):
    """A loop over rows with its bound in a tensor."""
    out, reg = nl.ndarray(a.shape, a.dtype, nl.shared_hbm), nisa.register_alloc()
    nisa.register_load(reg, chip.up(count))

    def body(i):
        tile = chip.sb(1, 64)
        nisa.dma_copy(tile, a.select(0, i))
        nisa.activation(tile, nl.exp, tile)
        nisa.dma_copy(out.select(0, i), tile)

    nl.fori_loop(0, reg, body)
    return out


def test_cost_only_equals_the_full_run(chip, rng):
    """Without data the loop body runs once and counts as often; the costs come out the same."""
    x, count = rng.standard_normal((20, 64)).astype(np.float32), np.array([[20]], np.int32)
    out, report = profile(scaled_rows)(x, count, chip)
    spec, model = profile(scaled_rows, cost_only=True)(TensorSpec((20, 64), "float32"), count, chip)
    np.testing.assert_allclose(out, np.exp(x), rtol=1e-6)
    assert spec == TensorSpec((20, 64), "float32")
    assert model.instructions == report.instructions and model.instructions["activation"] == 20
    assert model.engine_seconds == pytest.approx(report.engine_seconds)
    assert (model.dma_bytes, model.dma_runs) == (report.dma_bytes, report.dma_runs)
    assert (model.sbuf_peak, model.psum_peak) == (report.sbuf_peak, report.psum_peak)


def test_cost_only_leaves_arrays_alone(chip):
    cache = np.zeros((4, 8), np.float32)

    def kernel(c):
        nisa.dma_copy(c, chip.sb(4, 8, value=1.0))
        return c

    profile(kernel, cost_only=True)(cache)
    assert not cache.any()


def test_cost_only_handles_sizes_that_would_not_fit(chip):
    def kernel(a):
        for i in range(8):
            tile = chip.sb(128, 4096)
            nisa.dma_copy(tile, a[i * 128 : (i + 1) * 128, 0:4096])
            nisa.dma_copy(a[i * 128 : (i + 1) * 128, 4096:8192], tile)
        return a

    spec, report = profile(kernel, cost_only=True)(TensorSpec((2**20, 2**16), "float32"))
    assert spec.shape == (2**20, 2**16) and report.dma_bytes["hbm->sbuf"] == 8 * 128 * 4096 * 4


def unknown_bound(chip, a):
    reg = nisa.register_alloc()
    nisa.register_load(reg, a)
    nl.fori_loop(0, reg, lambda i: None)


def test_cost_only_says_what_it_cannot_know(chip):
    spec = TensorSpec((1, 1), "int32")
    with pytest.raises(NkiValidationError, match="is unknown: pass the input that holds it as an array with data"):
        profile(lambda a: unknown_bound(chip, a), cost_only=True)(spec)
    profile(lambda a: unknown_bound(chip, a), cost_only=True)(np.array([[3]], np.int32))
    with pytest.raises(NkiValidationError, match="cannot be modelled without data"):
        profile(lambda: nl.while_loop(nisa.register_alloc(1), lambda r: r), cost_only=True)()
    with pytest.raises(NkiValidationError, match="src and dst overlap"):
        profile(lambda a: nisa.dma_copy(a[0:6], a[2:8]) and None, cost_only=True)(TensorSpec((8, 8), "float32"))
    # An index that nobody knows costs the same as any.
    profile(lambda a, i: nisa.dma_copy(chip.sb(8, 8), a.select(0, chip.up(i))) and None, cost_only=True)(
        TensorSpec((4, 8, 8), "float32"), spec
    )


# ---- the report


def test_short_descriptors_are_named_by_their_place(chip):
    def kernel(h):
        nisa.dma_copy(chip.sb(128, 64), h[:, 0:128:2], name="strided load")
        nisa.dma_copy(chip.sb(128, 64), h[:, 0:64])
        nisa.dma_copy(chip.sb(128, 128), h)
        nisa.dma_copy(chip.sb(128, 64), h[:, 64:128])

    _, report = profile(kernel)(np.zeros((128, 128), np.float32))
    line = kernel.__code__.co_firstlineno
    assert [*report.dma_sites] == ["strided load", *(f"test_costs.py:{line + i}" for i in (2, 3, 4))]
    assert [s.run for s in report.dma_sites.values()] == [4, 256, 512, 256]
    assert [*report.small_run_sites][0] == "strided load" and len(report.small_run_sites) == 3
    assert "strided load: 4 B a descriptor" in report.table()
    assert json.loads(json.dumps(report.to_dict()))["dma_sites"]["strided load"]["bytes"] == 128 * 64 * 4


def test_report_scales_adds_and_prints(chip):
    def kernel():
        nisa.activation(chip.sb(128, 512), nl.exp, chip.sb(128, 512, value=0.0))
        nisa.dma_copy(chip.sb(128, 512), chip.hbm(128, 512))

    _, one = profile(kernel)()
    triple = one.scaled(3)
    assert triple.seconds == pytest.approx(3 * one.seconds) and triple.bound == one.bound
    assert triple.instructions["dma_copy"] == 3 and triple.sbuf_peak == one.sbuf_peak
    both = one + triple
    assert both.engine_seconds["scalar"] == pytest.approx(4 * one.engine_seconds["scalar"])
    assert both.engine_cycles["scalar"] == pytest.approx(4 * (OVERHEAD + 512))
    assert one.bound == "dma" and one.seconds == one.engine_seconds["dma"]
    assert json.loads(json.dumps(one.to_dict()))["bound"] == "dma"
    assert one.operation_seconds["scalar activation"] == one.engine_seconds["scalar"]
    assert both.dma_sites.keys() == one.dma_sites.keys() and [s.run for s in both.dma_sites.values()] == [2048]
    text = one.table()
    assert "bound by dma" in text and "PSUM 0 of 8 banks" in text and "81% of peak" in text
    _, nothing = profile(lambda: None)()
    assert (nothing.seconds, nothing.bound, nothing.dma_efficiency) == (0.0, "none", 1.0)
