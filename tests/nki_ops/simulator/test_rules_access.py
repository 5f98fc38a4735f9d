"""Every rule of operands, DMA, registers and addresses, broken once each."""

import numpy as np
import pytest

from nki_ops.simulator import NkiValidationError, nki, simulate
from nki_ops.simulator.errors import SimulatorError

nl, nisa = nki.language, nki.isa
E, DGE, OOB = nisa.engine, nisa.dge_mode, nisa.oob_mode


def gather_transpose(chip, dtype="bfloat16", rows=16, middle=(), kind="uint32", index=(16, 1), mode=DGE.unknown):
    """A transposing gather of `rows` rows of 8 elements, by an index tensor of shape `index`."""
    shape = (rows, *middle, 8)
    table = chip.hbm(64, *shape[1:], dtype=dtype)
    source = table.vector_select(0, chip.sb(rows, 1, dtype=kind, value=0))
    if index[0] != rows or index[1] != 1:
        source = table.ap(
            [[table.strides[d], n] for d, n in enumerate(shape)], vector_offset=chip.sb(*index, dtype=kind, value=0)
        )
    order = (3, 1, 2, 0) if middle else (1, 0)
    nisa.dma_transpose(chip.sb(*(shape[a] for a in order), dtype=dtype), source, dge_mode=mode)


# Each entry: what it breaks -> (kernel body on the `chip` helpers, message).
ACCESS = {
    "no tensor": (lambda c: nisa.tensor_copy(c.sb(4, 4), 3.0), "src must be a tensor"),
    "dst no tensor": (lambda c: nisa.memset(3.0, 0.0), "dst must be a tensor, got float"),
    "hbm operand": (lambda c: nisa.tensor_copy(c.sb(4, 4), c.hbm(4, 4)), "src is in private_hbm; compute engines"),
    "gpsimd and psum": (lambda c: nisa.iota(c.ps(4, 4, dtype="int32"), [[1, 4]]), "GpSimd Engine cannot access"),
    "start 128": (
        lambda c: nisa.memset(c.sb(128, 4)[32:128], 0.0),
        "partition 32 with 96 partitions must be 0$",
    ),
    "start 64": (lambda c: nisa.memset(c.sb(128, 4)[32:96], 0.0), "32 with 64 partitions must be 0/64"),
    "start 32": (
        lambda c: nisa.memset(c.sb(128, 4)[1:2], 0.0),
        "1 with 1 partitions must be 0/32/64/96",
    ),
    "start by address": (lambda c: nisa.memset(c.sb(16, 4, address=(16, 0)), 0.0), "start partition 16"),
    "free dims": (
        lambda c: nisa.memset(c.sb(4, 3, 3, 3, 3, 3)[:, 0:2, 0:2, 0:2, 0:2, 0:2], 0.0),
        "5 free dimensions, exceeds maximum 4",
    ),
    "count": (lambda c: nisa.memset(c.sb(4, 65536, dtype="uint8"), 0), "count 65536 exceeds maximum 65535"),
    "stride": (lambda c: nisa.memset(c.sb(4, 2, 40000, dtype="uint8")[:, :, 0], 0), "stride 40000 exceeds maximum"),
    "free size": (
        lambda c: nisa.memset(c.sb(4, 1, 2, dtype="uint8").broadcast(1, 40000), 0),
        "free size 80000 exceeds maximum 65536 in sbuf",
    ),
    "psum free size": (
        lambda c: nisa.memset(c.ps(4, 1, 4).broadcast(1, 2048), 0.0),
        "free size 8192 exceeds maximum 4096 in psum",
    ),
    "partitions differ": (lambda c: nisa.tensor_copy(c.sb(4, 4), c.sb(8, 4)), "dst has 4 partitions, src has 8"),
    "elements differ": (lambda c: nisa.tensor_copy(c.sb(4, 4), c.sb(4, 8)), "dst has 4 elements per partition, src"),
    "column shape": (
        lambda c: nisa.tensor_scalar(c.sb(4, 4), c.sb(4, 4), nl.add, c.sb(4, 2)),
        r"operand0 shape \(4, 2\) must be \(4, 1\)",
    ),
    "column register": (
        lambda c: nisa.activation(c.sb(4, 4), nl.exp, c.sb(4, 4), bias=nisa.register_alloc(1)),
        "bias must be a number or a tensor",
    ),
    "raw enum": (lambda c: nisa.tensor_copy(c.sb(4, 4), c.sb(4, 4), engine=9), "engine must be a nisa.engine, got 9"),
    "float index": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(4, 4, 4).select(0, c.sb(1, 1, value=1.0))),
        "dynamic index must be a .1, 1. integer tensor in SBUF",
    ),
    "unset register": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(4, 4, 4).select(0, nisa.register_alloc())),
        "uninitialised register",
    ),
    "unset register on chip": (
        lambda c: nisa.tensor_copy(
            c.sb(4, 4), c.sb(4, 8).ap([[8, 4], [1, 4]], scalar_offset=nisa.register_alloc(), indirect_dim=1)
        ),
        "uninitialised register",
    ),
    "index on chip": (
        lambda c: nisa.tensor_copy(
            c.sb(4, 4), c.sb(4, 8).ap([[8, 4], [1, 4]], scalar_offset=nisa.register_alloc(5), indirect_dim=1)
        ),
        "runs out of a partition",
    ),
    "index in hbm": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(4, 4, 4).select(0, nisa.register_alloc(4))),
        "dynamic index 4 is out of bounds",
    ),
}

DMA = {
    "psum source": (lambda c: nisa.dma_copy(c.hbm(8, 8), c.ps(8, 8)), "src is in PSUM, which DMA cannot reach"),
    "psum destination": (lambda c: nisa.dma_copy(c.ps(8, 8), c.hbm(8, 8)), "dst is in PSUM, which DMA cannot reach"),
    "elements": (lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 4)), "src has 32 elements, dst has 64"),
    "number": (lambda c: nisa.dma_copy(c.sb(8, 8), 1.0), "src must be a tensor, got float"),
    "hwdge casts": (
        lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 8, dtype="bfloat16"), dge_mode=DGE.hwdge),
        "hwdge moves bytes: src dtype bfloat16",
    ),
    "engine": (
        lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 8), engine=E.sync),
        "only sync or scalar, and only with dge_mode.hwdge",
    ),
    "priority": (lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 8), priority=1), "priority needs NeuronCore-v4"),
    "raw dge": (lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 8), dge_mode="hw"), "dge_mode must be a nisa.dge_mode"),
    "skip without index": (
        lambda c: nisa.dma_copy(c.sb(8, 8), c.hbm(8, 8), oob_mode=OOB.skip),
        "oob_mode.skip goes with dynamic indices only",
    ),
    "static with index": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(4, 4, 4).select(0, nisa.register_alloc(0)), dge_mode=DGE.none),
        "a dynamic address needs swdge or hwdge",
    ),
    "gather by hardware": (
        lambda c: nisa.dma_copy(
            c.sb(4, 4), c.hbm(8, 4).vector_select(0, c.sb(4, 1, dtype="int32", value=0)), dge_mode=DGE.hwdge
        ),
        "a vector_offset needs swdge",
    ),
    "row bounds": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(8, 4).vector_select(0, c.sb(4, 1, dtype="int32", value=8))),
        "vector_offset index 8 is out of bounds",
    ),
    "row index dtype": (
        lambda c: nisa.dma_copy(c.sb(4, 4), c.hbm(8, 4).vector_select(0, c.sb(4, 1, value=0.0))),
        "vector_offset must be an integer tensor",
    ),
    "too few row indices": (
        lambda c: nisa.dma_copy(
            c.sb(4, 4), c.hbm(8, 4).ap([[4, 4], [1, 4]], vector_offset=c.sb(2, 1, dtype="int32", value=0))
        ),
        "vector_offset has 2 indices for 4 rows",
    ),
    "overlap": (lambda c: nisa.dma_copy((h := c.hbm(8, 4))[0:6], h[2:8]), "src and dst overlap"),
    "overlap in sbuf": (lambda c: nisa.dma_copy((t := c.sb(8, 8))[:, 0:6], t[:, 2:8]), "src and dst overlap"),
    "overlap by index": (
        lambda c: nisa.dma_copy((h := c.hbm(8, 4))[0:2], h.ap([[4, 2], [1, 4]], scalar_offset=nisa.register_alloc(1))),
        "src and dst overlap",
    ),
    "transpose axes": (lambda c: nisa.dma_transpose(c.sb(8, 8), c.hbm(8, 8), axes=(0, 1)), "axes .0, 1. of a 2-d src"),
    "transpose rank": (lambda c: nisa.dma_transpose(c.sb(8, 8), c.hbm(64)), "of a 1-d src"),
    "transpose to hbm": (lambda c: nisa.dma_transpose(c.hbm(8, 8), c.hbm(8, 8)), "dst must be in sbuf"),
    "transpose dtypes": (
        lambda c: nisa.dma_transpose(c.sb(8, 8), c.hbm(8, 8, dtype="bfloat16")),
        "dst dtype float32 must be that of src",
    ),
    "transpose bytes": (
        lambda c: nisa.dma_transpose(c.sb(8, 8, dtype="int8"), c.hbm(8, 8, dtype="int8")),
        "must have 2 or 4 bytes",
    ),
    "transpose shape": (
        lambda c: nisa.dma_transpose(c.sb(8, 4, 4), c.hbm(16, 8)),
        r"must be the transposed shape \(8, 16\) of src, rank included",
    ),
    "transpose mode": (
        lambda c: nisa.dma_transpose(c.sb(8, 8), c.hbm(8, 8), dge_mode=DGE.swdge),
        "dge_mode swdge must be unknown or hwdge",
    ),
    "hardware transpose rows": (
        lambda c: nisa.dma_transpose(c.sb(8, 8, dtype="bfloat16"), c.hbm(8, 8, dtype="bfloat16"), dge_mode=DGE.hwdge),
        "first dimension must be one of",
    ),
    "hardware transpose bytes": (
        lambda c: nisa.dma_transpose(c.sb(8, 16), c.hbm(16, 8), dge_mode=DGE.hwdge),
        "src dtype float32 must have 2 bytes",
    ),
    "gather transpose bytes": (lambda c: gather_transpose(c, "float32"), "must have 2 bytes with a vector_offset"),
    "gather transpose rows": (lambda c: gather_transpose(c, rows=24), "first dimension 24 must be divisible by 16"),
    "gather transpose middle": (lambda c: gather_transpose(c, middle=(2, 2)), "dimension 1 or 2 of a gathered src"),
    "gather transpose index dtype": (lambda c: gather_transpose(c, kind="int32"), "indices must be a 2-d uint32"),
    "gather transpose few": (lambda c: gather_transpose(c, rows=32), "does not fit a src of 32 rows"),
    "gather transpose columns": (lambda c: gather_transpose(c, index=(16, 2)), "indices shape .16, 2. does not fit"),
    "gather transpose mode": (lambda c: gather_transpose(c, mode=DGE.hwdge), "must be unknown or swdge"),
    "compute op": (lambda c: nisa.dma_compute(c.sb(8, 8), [c.hbm(8, 8)], nl.multiply), "must be nl.add"),
    "compute sources": (lambda c: nisa.dma_compute(c.sb(8, 8), [c.hbm(8, 8)] * 17, nl.add), "exceeds maximum 16"),
    "compute scales": (lambda c: nisa.dma_compute(c.sb(8, 8), [c.hbm(8, 8)], nl.add, scales=[2.0]), "must all be 1.0"),
    "compute unique": (
        lambda c: nisa.dma_compute(c.sb(8, 8), [c.hbm(8, 8)], nl.add, unique_indices=False),
        "unique_indices must be True",
    ),
    "compute elements": (lambda c: nisa.dma_compute(c.sb(8, 8), [c.hbm(8, 4)], nl.add), "has 32 elements, dst has 64"),
    "compute gather": (
        lambda c: nisa.dma_compute(
            c.sb(4, 4), [c.hbm(8, 4).vector_select(0, c.sb(4, 1, dtype="int32", value=0))], nl.add
        ),
        "with a dynamic index it takes 2 sources",
    ),
}

CONTROL = {
    "move to number": (lambda c: nisa.register_move(3, 4), "needs a register of nisa.register_alloc"),
    "load from many": (lambda c: nisa.register_load(nisa.register_alloc(), c.sb(1, 2)), "a tensor of one element"),
    "store to many": (lambda c: nisa.register_store(c.sb(1, 2), nisa.register_alloc(1)), "a tensor of one element"),
    "store unset": (
        lambda c: nisa.register_store(c.sb(1, 1, dtype="int32"), nisa.register_alloc()),
        "src is an uninitialised register",
    ),
    "barrier on one core": (lambda c: nisa.core_barrier(c.hbm(1), (0, 1)), "needs a launch on two cores"),
    "sendrecv on one core": (
        lambda c: nisa.sendrecv(c.sb(1, 1), c.sb(1, 1), 1, 1, 0),
        "needs a launch on two cores",
    ),
    "activate2": (lambda c: nisa.activate2(c.sb(1, 1)), "activate2 needs NeuronCore-v4"),
    "psum address": (lambda c: c.ps(8, 8, address=(0, 100)), "PSUM address 100 must start on a bank"),
    "hbm address": (lambda c: nl.ndarray((8, 8), nl.float32, nl.hbm, address=(0, 0)), "is for SBUF and PSUM"),
    "partition address": (lambda c: c.sb(64, 8, address=(96, 0)), "with 64 partitions exceeds 128"),
    "matmul wrapper": (lambda c: nl.matmul(c.sb(8, 8), c.sb(8, 8)), "transpose_x=True only"),
    "broadcasting wrapper": (lambda c: nl.add(c.sb(8, 8), c.sb(8, 1)), "broadcasting is not supported"),
    "scalar power": (lambda c: nl.power(c.sb(8, 8), 2.0), "does not support scalar exponents"),
    "division": (lambda c: nl.divide(c.sb(8, 8), c.sb(8, 8)), "no binary operator"),
    "softmax": (lambda c: nl.softmax(c.sb(8, 8, 8)), "along axis 1 of 2-D tiles"),
    "no function": (lambda c: nl.prelu(c.sb(8, 8)), "no function of one tile"),
}

RULES = {
    f"{group}: {name}": rule
    for group, rules in [("access", ACCESS), ("dma", DMA), ("control", CONTROL)]
    for name, rule in rules.items()
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(chip, rule):
    breaks, message = RULES[rule]
    with pytest.raises(NkiValidationError, match=message):
        simulate(lambda: breaks(chip) and None)()


def test_errors_are_assertion_errors_and_nki_s_own():
    assert issubclass(nisa.NkiValidationError, AssertionError)
    assert nisa.NkiValidationError is NkiValidationError


def test_instructions_need_a_kernel():
    with pytest.raises(SimulatorError, match="run it with nki.simulate"):
        nl.ndarray((8, 8), nl.float32)
    with pytest.raises(SimulatorError, match="run it with nki.simulate"):
        nisa.register_load(nisa.VirtualRegister(), None)


def test_what_is_known_and_not_simulated_says_so(chip):
    with pytest.raises(SimulatorError, match="nisa.rng is not simulated"):
        simulate(lambda: nisa.rng(chip.sb(8, 8)))()
    with pytest.raises(AttributeError, match="nki.isa has no frobnicate"):
        _ = nisa.frobnicate
    with pytest.raises(AttributeError, match="removed from NKI, use slices"):
        _ = nl.arange
    with pytest.raises(AttributeError, match="nl.cos is an experimental wrapper that is not simulated"):
        _ = nl.cos


def test_raw_numbers_of_enumerations_warn(chip):
    """AWS's own library still has some, though NKI refuses them since 0.3."""
    with pytest.warns(DeprecationWarning, match="dge_mode=3: NKI refuses raw numbers; use nisa.dge_mode.none"):
        simulate(lambda: nisa.dma_copy(chip.sb(8, 8), chip.hbm(8, 8), dge_mode=3) and None)()


def test_copying_onto_itself_is_a_fence(chip):
    """Public kernels end with dma_copy(out, out) to order their writes."""

    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        nisa.dma_copy(out, a)
        nisa.dma_copy(dst=out, src=out)
        return out

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(simulate(kernel)(x), x)


def test_interleaved_views_do_not_overlap(chip):
    def kernel(a):
        t = chip.up(a)
        nisa.dma_copy(t[:, 0::2], t[:, 1::2])
        return chip.down(t)

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.testing.assert_array_equal(simulate(kernel)(x), np.repeat(x[:, 1::2], 2, 1))
