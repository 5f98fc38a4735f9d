"""Every rule of the compute instructions, broken once each."""

import pytest

from nki_ops.simulator import NkiValidationError, nki, simulate

nl, nisa = nki.language, nki.isa
E, CMD = nisa.engine, nisa.reduce_cmd

# Each entry: what it breaks -> (kernel body on the `chip` helpers, message).
TENSOR_ENGINE = {
    "inputs in sbuf": (lambda c: nisa.nc_matmul(c.ps(8, 8), c.ps(8, 8), c.sb(8, 8)), "stationary must be in sbuf"),
    "dst in psum": (lambda c: nisa.nc_matmul(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8)), "dst must be in psum"),
    "contraction": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(16, 8)),
        "moving has 16 partitions, stationary has 8",
    ),
    "stationary size": (
        lambda c: nisa.nc_matmul(c.ps(128, 8), c.sb(8, 256), c.sb(8, 8)),
        "stationary free size 256 exceeds maximum 128",
    ),
    "moving size": (
        lambda c: nisa.nc_matmul(c.ps(8, 512), c.sb(8, 8), c.sb(8, 1024)),
        "moving free size 1024 exceeds maximum 512",
    ),
    "dst shape": (lambda c: nisa.nc_matmul(c.ps(8, 4), c.sb(8, 8), c.sb(8, 8)), r"must hold \(8, 8\)"),
    "dst dtype": (
        lambda c: nisa.nc_matmul(c.ps(8, 8, dtype="bfloat16"), c.sb(8, 8), c.sb(8, 8)),
        "dst dtype bfloat16 must be float32",
    ),
    "input dtype": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8, dtype="int8"), c.sb(8, 8)),
        "stationary dtype int8 must be one of",
    ),
    "float32 with bf16": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8, dtype="bfloat16")),
        "float32 goes with float32 only",
    ),
    "one bank": (
        lambda c: nisa.nc_matmul(c.ps(8, 1024)[:, 256:768], c.sb(8, 8), c.sb(8, 512)),
        "must fit one bank of 2048",
    ),
    "memset then accumulate": (
        lambda c: (
            nisa.memset(p := c.ps(8, 8), 0.0),
            nisa.nc_matmul(p, c.sb(8, 8, value=1.0), c.sb(8, 8, value=1.0), accumulate=True),
        ),
        "accumulate=True on PSUM where no matmul has written",
    ),
    "memset then add": (
        lambda c: (
            nisa.memset(p := c.ps(8, 8), 1.0),
            nisa.nc_matmul(p, c.sb(8, 8, value=1.0), c.sb(8, 8, value=1.0)),
        ),
        "initialised by another instruction than a matmul",
    ),
    "accumulate on nothing": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8), accumulate=True),
        "the first matmul must overwrite",
    ),
    "accumulate on a part": (
        lambda c: (
            nisa.nc_matmul((p := c.ps(8, 8))[:, 0:4], c.sb(8, 8), c.sb(8, 4)),
            nisa.nc_matmul(p, c.sb(8, 8), c.sb(8, 8), accumulate=True),
        ),
        "accumulate=True on PSUM where no matmul",
    ),
    "tiling half set": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8), tile_position=(0, 0)),
        "must be set together",
    ),
    "column tiling": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8), tile_position=(0, 64), tile_size=(32, 64)),
        "start_column must be 0 and column_size 128",
    ),
    "row tiling": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8), tile_position=(16, 0), tile_size=(32, 128)),
        "does not fit row tiles of 32",
    ),
    "tile too small": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(64, 8), c.sb(64, 8), tile_position=(32, 0), tile_size=(32, 128)),
        "stationary has 64 partitions, tile_size allows 32",
    ),
    "double_row dtype": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 2, 8), c.sb(8, 2, 8), perf_mode=nisa.matmul_perf_mode.double_row),
        "must be one of float8_e4m3, float8_e5m2",
    ),
    "double_row shape": (
        lambda c: nisa.nc_matmul(
            c.ps(8, 8),
            c.sb(8, 16, dtype="float8_e4m3"),
            c.sb(8, 2, 8, dtype="float8_e4m3"),
            perf_mode=nisa.matmul_perf_mode.double_row,
        ),
        "first free dimension of 2",
    ),
    "transpose accumulates": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8), is_transpose=True, accumulate=True),
        "is_transpose excludes",
    ),
    "transpose dtype": (
        lambda c: nisa.nc_matmul(c.ps(8, 8, dtype="bfloat16"), c.sb(8, 8), c.sb(8, 8), is_transpose=True),
        "must be float32 or that of stationary",
    ),
    "no identity": (
        lambda c: nisa.nc_matmul(c.ps(8, 8), c.sb(8, 8), c.sb(8, 8, value=1.0), is_transpose=True),
        "moving must be the identity",
    ),
    "transpose size": (
        lambda c: nisa.nc_transpose(c.ps(128, 8), c.sb(8, 256)),
        r"exceeds maximum \(128, 128\) of the tensor engine",
    ),
    "vector transpose size": (
        lambda c: nisa.nc_transpose(c.sb(64, 8), c.sb(8, 64)),
        r"exceeds maximum \(32, 32\) of the vector engine",
    ),
    "transpose result dtype": (
        lambda c: nisa.nc_transpose(c.ps(8, 8), c.sb(8, 8, dtype="bfloat16")),
        "dst dtype float32 must be that of data",
    ),
    "transpose result shape": (lambda c: nisa.nc_transpose(c.ps(8, 4), c.sb(8, 8)), r"must hold \(8, 8\)"),
    "transpose to sbuf": (
        lambda c: nisa.nc_transpose(c.sb(8, 8), c.sb(8, 8), engine=E.tensor),
        "dst must be in psum",
    ),
    "transpose engine": (
        lambda c: nisa.nc_transpose(c.ps(8, 8), c.sb(8, 8), engine=E.gpsimd),
        "engine must be tensor or vector, got gpsimd",
    ),
}

VECTOR_ENGINE = {
    "both in psum": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.ps(8, 8), c.ps(8, 8), nl.add),
        "data1 and data2 cannot both be in PSUM",
    ),
    "no operator": (lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), nl.exp), "no binary operator"),
    "divide": (lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), nl.divide), "no binary operator"),
    "trn3 operator": (
        lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.abs_max, 1.0),
        "nl.abs_max needs NeuronCore-v4",
    ),
    "trn3 unary": (lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.square), "nl.square needs NeuronCore-v4"),
    "power on vector": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), nl.power, engine=E.vector),
        "runs on the GpSimd Engine",
    ),
    "power in psum": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.ps(8, 8), c.sb(8, 8), nl.power),
        "GpSimd Engine cannot access",
    ),
    "tensor_tensor engine": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), nl.add, engine=E.scalar),
        "engine must be vector or gpsimd",
    ),
    "bits of floats": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), nl.bitwise_and),
        "dtype float32 must be one of",
    ),
    "tensor_tensor number": (
        lambda c: nisa.tensor_tensor(c.sb(8, 8), c.sb(8, 8), 1.0, nl.add),
        "data2 must be a tensor",
    ),
    "operand dtype": (
        lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.add, c.sb(8, 1, dtype="bfloat16")),
        "operand0 dtype bfloat16 must be one of float32",
    ),
    "mixed kinds": (
        lambda c: nisa.tensor_scalar(
            c.sb(8, 8, dtype="int32"), c.sb(8, 8, dtype="int32"), nl.bitwise_and, 1, op1=nl.add, operand1=1
        ),
        "both bitvec or both arithmetic",
    ),
    "scalar engine pair": (
        lambda c: nisa.tensor_scalar(
            c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, op1=nl.multiply, operand1=2.0, engine=E.scalar
        ),
        "not supported by the Scalar Engine",
    ),
    "gpsimd tensor_scalar": (
        lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, engine=E.gpsimd),
        "does nl.rsqrt only",
    ),
    "operand without op": (
        lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, operand1=2.0),
        "operand1 must be None without op1",
    ),
    "op without operand": (lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.add), "nl.add needs an operand"),
    "unary with operand": (
        lambda c: nisa.tensor_scalar(c.sb(8, 8), c.sb(8, 8), nl.abs, 2.0),
        "nl.abs is unary; its operand must be None or 0",
    ),
    "stt bits": (
        lambda c: nisa.scalar_tensor_tensor(c.sb(8, 8), c.sb(8, 8), nl.bitwise_and, 1, nl.add, c.sb(8, 8)),
        "bitvec operators are not supported",
    ),
    "stt in psum": (
        lambda c: nisa.scalar_tensor_tensor(c.sb(8, 8), c.ps(8, 8), nl.add, 1.0, nl.add, c.ps(8, 8)),
        "data and operand1 cannot both be in PSUM",
    ),
    "copy on gpsimd": (
        lambda c: nisa.tensor_copy(c.sb(8, 8), c.ps(8, 8), engine=E.gpsimd),
        "src is in PSUM, which GpSimd Engine cannot access",
    ),
    "predicate dtype": (
        lambda c: nisa.tensor_copy_predicated(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8)),
        "predicate dtype float32 must be one of uint16, uint32, uint8",
    ),
    "predicated dtypes": (
        lambda c: nisa.tensor_copy_predicated(c.sb(8, 8), c.sb(8, 8, dtype="bfloat16"), c.sb(8, 8, dtype="uint8")),
        "src dtype bfloat16 must be that of dst",
    ),
    "predicated psum": (
        lambda c: nisa.tensor_copy_predicated(c.sb(8, 8), c.ps(8, 8), c.ps(8, 8, dtype="uint8")),
        "src and predicate cannot both be in PSUM",
    ),
    "memset type": (
        lambda c: nisa.memset(c.sb(8, 8, dtype="int32"), 2.0),
        "value 2.0 must be an integer for dst dtype int32",
    ),
    "memset tensor": (lambda c: nisa.memset(c.sb(8, 8), c.sb(1, 1)), "compile-time number"),
    "memset engine": (lambda c: nisa.memset(c.sb(8, 8), 0.0, engine=E.scalar), "engine must be vector or gpsimd"),
    "reduce axis": (lambda c: nisa.tensor_reduce(c.sb(8, 4), nl.add, c.sb(8, 4, 2), 1), "must be the last free"),
    "reduce partition": (
        lambda c: nisa.tensor_reduce(c.sb(1, 1), nl.add, c.sb(8, 4), (0, 1)),
        "must be the last free",
    ),
    "reduce operator": (lambda c: nisa.tensor_reduce(c.sb(8, 1), nl.power, c.sb(8, 4), 1), "no reduction operator"),
    "reduce shape": (lambda c: nisa.tensor_reduce(c.sb(8, 2), nl.add, c.sb(8, 4), 1), "must hold 1 elements"),
    "reduce negate": (
        lambda c: nisa.tensor_reduce(
            c.sb(8, 1, dtype="int32"), nl.bitwise_or, c.sb(8, 4, dtype="int32"), 1, negate=True
        ),
        "negate goes with arithmetic",
    ),
    "tsr reverse": (
        lambda c: nisa.tensor_scalar_reduce(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, nl.add, reverse0=True),
        "reverse0 is not supported",
    ),
    "tsr bits": (
        lambda c: nisa.tensor_scalar_reduce(c.sb(8, 8), c.sb(8, 8), nl.bitwise_and, 1, nl.add),
        "bitvec operators are not supported",
    ),
    "tsr reduce_op": (
        lambda c: nisa.tensor_scalar_reduce(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, nl.subtract),
        "must be add, multiply, maximum, minimum",
    ),
    "tsr idle": (
        lambda c: nisa.tensor_scalar_reduce(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, nl.add, reduce_cmd=CMD.idle),
        "reduce_cmd idle must be",
    ),
    "tsr init": (
        lambda c: nisa.tensor_scalar_reduce(c.sb(8, 8), c.sb(8, 8), nl.add, 1.0, nl.add, reduce_init=1.0),
        "reduce_init goes with reduce_cmd.load_reduce",
    ),
    "select predicate": (
        lambda c: nisa.select_reduce(c.sb(8, 8), c.sb(8, 8, dtype="int32"), c.sb(8, 8), 0.0),
        "predicate dtype int32",
    ),
    "select on_true": (
        lambda c: nisa.select_reduce(c.sb(8, 8), c.sb(8, 8, dtype="int8"), c.sb(8, 8, dtype="int32"), 0.0),
        "on_true dtype int32",
    ),
    "select psum": (
        lambda c: nisa.select_reduce(c.sb(8, 8), c.ps(8, 8, dtype="int8"), c.ps(8, 8), 0.0),
        "on_true and predicate cannot both be in PSUM",
    ),
    "select reduce_op": (
        lambda c: nisa.select_reduce(c.sb(8, 8), c.sb(8, 8, dtype="int8"), c.sb(8, 8), 0.0, reduce_op=nl.add),
        "reduce_op nl.add must be nl.maximum",
    ),
    "select reduce_cmd": (
        lambda c: nisa.select_reduce(
            c.sb(8, 8), c.sb(8, 8, dtype="int8"), c.sb(8, 8), 0.0, reduce_cmd=CMD.load_reduce
        ),
        "reduce_cmd load_reduce must be idle",
    ),
    "range comparison": (
        lambda c: nisa.range_select(c.sb(8, 8), c.sb(8, 8), nl.not_equal, nl.less, c.sb(8, 1), c.sb(8, 1)),
        "comp_op0 nl.not_equal must be one of",
    ),
    "range false value": (
        lambda c: nisa.range_select(
            c.sb(8, 8), c.sb(8, 8), nl.equal, nl.less, c.sb(8, 1), c.sb(8, 1), on_false_value=0.0
        ),
        "on_false_value 0.0 must be -3.40",
    ),
    "range start": (
        lambda c: nisa.range_select(
            c.sb(8, 8), c.sb(8, 8), nl.equal, nl.less, c.sb(8, 1), c.sb(8, 1), range_start=2**24
        ),
        "must be a compile-time integer with all indices below",
    ),
    "range tile": (
        lambda c: nisa.range_select(c.sb(8, 8), c.sb(8, 8, dtype="int32"), nl.equal, nl.less, c.sb(8, 1), c.sb(8, 1)),
        "on_true_tile dtype int32",
    ),
    "range bound": (
        lambda c: nisa.range_select(c.sb(8, 8), c.sb(8, 8), nl.equal, nl.less, 0.0, c.sb(8, 1)),
        "bound0 must be a tensor",
    ),
    "range bound dtype": (
        lambda c: nisa.range_select(c.sb(8, 8), c.sb(8, 8), nl.equal, nl.less, c.sb(8, 1, dtype="int32"), c.sb(8, 1)),
        "bound0 dtype int32 must be one of float32",
    ),
    "cumulative op": (
        lambda c: nisa.tensor_scalar_cumulative(c.sb(8, 8), c.sb(8, 8), nl.add, nl.power, 1.0),
        "op1 nl.power must be add, subtract",
    ),
    "cumulative dtype": (
        lambda c: nisa.tensor_scalar_cumulative(c.sb(8, 8), c.sb(8, 8, dtype="int32"), nl.add, nl.add, 1.0),
        "src dtype int32",
    ),
    "cumulative start": (
        lambda c: nisa.tensor_scalar_cumulative(c.sb(8, 8), c.sb(8, 8), nl.add, nl.add, 1.0, imm1=1.0),
        "imm1 goes with reduce_cmd.load_reduce",
    ),
    "scan bits": (
        lambda c: nisa.tensor_tensor_scan(c.sb(8, 8), c.sb(8, 8), c.sb(8, 8), 0.0, nl.bitwise_or, nl.add),
        "bitvec operators are not supported",
    ),
    "scan psum": (
        lambda c: nisa.tensor_tensor_scan(c.sb(8, 8), c.ps(8, 8), c.ps(8, 8), 0.0, nl.add, nl.add),
        "data0 and data1 cannot both be in PSUM",
    ),
    "bn_stats size": (lambda c: nisa.bn_stats(c.sb(8, 6), c.sb(8, 513)), "free size 513 exceeds maximum 512"),
    "bn_stats dst": (lambda c: nisa.bn_stats(c.sb(8, 5), c.sb(8, 8)), "must hold 6 elements"),
    "bn_aggr size": (lambda c: nisa.bn_aggr(c.sb(8, 2), c.sb(8, 7)), "multiple of 3"),
    "bn_aggr dst": (lambda c: nisa.bn_aggr(c.sb(8, 3), c.sb(8, 6)), "must hold 2 elements"),
    "shuffle dtype": (
        lambda c: nisa.nc_stream_shuffle(c.sb(32, 8), c.sb(32, 8, dtype="bfloat16"), [0] * 32),
        "dst dtype float32 must be that of src",
    ),
    "shuffle size": (lambda c: nisa.nc_stream_shuffle(c.sb(32, 8), c.sb(32, 4), [0] * 32), "dst has 8 elements"),
    "shuffle start": (
        lambda c: nisa.nc_stream_shuffle(c.sb(64, 8)[32:64], c.sb(64, 8), [0] * 32),
        "dst start partition 32 with 64 partitions must be 0/64",
    ),
    "shuffle mask": (lambda c: nisa.nc_stream_shuffle(c.sb(32, 8), c.sb(32, 8), [32] * 32), "must have 32 entries"),
    "shuffle source": (
        lambda c: nisa.nc_stream_shuffle(c.sb(32, 8), c.sb(8, 8), [8] * 32),
        r"shuffle_mask\[0\] = 8 reads partition 8 of 8 in src",
    ),
    "max8 size": (lambda c: nisa.max8(c.sb(8, 8), c.sb(8, 7)), "free size 7 must be 8..16384"),
    "max8 dst": (lambda c: nisa.max8(c.sb(8, 7), c.sb(8, 16)), r"must hold \(8, 8\)"),
    "find dtype": (
        lambda c: nisa.nc_find_index8(c.sb(8, 8), c.sb(8, 16), c.sb(8, 8)),
        "dst dtype float32 must be one of uint16, uint32",
    ),
}

SCALAR_ENGINE = {
    "no function": (lambda c: nisa.activation(c.sb(8, 8), nl.add, c.sb(8, 8)), "no activation function"),
    "scale dtype": (
        lambda c: nisa.activation(c.sb(8, 8), nl.exp, c.sb(8, 8), scale=c.sb(8, 1, dtype="bfloat16")),
        "scale dtype bfloat16 must be one of float32",
    ),
    "bias dtype": (
        lambda c: nisa.activation(c.sb(8, 8), nl.exp, c.sb(8, 8), bias=c.sb(8, 1, dtype="tfloat32")),
        "bias dtype tfloat32",
    ),
    "reduce_op": (
        lambda c: nisa.activation_reduce(c.sb(8, 8), nl.exp, c.sb(8, 8), nl.maximum, c.sb(8, 1)),
        "reduce_op nl.maximum must be nl.add",
    ),
    "load_reduce": (
        lambda c: nisa.activation(c.sb(8, 8), nl.exp, c.sb(8, 8), reduce_op=nl.add, reduce_cmd=CMD.load_reduce),
        "load_reduce is not supported by the Scalar Engine",
    ),
    "reduce without op": (
        lambda c: nisa.activation(c.sb(8, 8), nl.exp, c.sb(8, 8), reduce_cmd=CMD.reduce),
        "needs reduce_op=nl.add",
    ),
}

GPSIMD_ENGINE = {
    "pattern dims": (lambda c: nisa.iota(c.sb(8, 8), [[1, 1]] * 5), "1 to 4 dimensions"),
    "pattern size": (lambda c: nisa.iota(c.sb(8, 8), [[1, 4]]), "has 4 elements, dst has 8 per partition"),
    "offset register": (lambda c: nisa.iota(c.sb(8, 8), [[1, 8]], offset=nisa.register_alloc()), "uninitialised"),
    "comparison": (
        lambda c: nisa.affine_select(c.sb(8, 8), [[1, 8]], 1, c.sb(8, 8), 0.0, cmp_op=nl.add),
        "must be a comparison",
    ),
    "false value": (
        lambda c: nisa.affine_select(c.sb(8, 8), [[1, 8]], 1, c.sb(8, 8), c.sb(8, 1)),
        "on_false_value must be a number",
    ),
    "select in psum": (lambda c: nisa.affine_select(c.sb(8, 8), [[1, 8]], 1, c.ps(8, 8), 0.0), "GpSimd Engine cannot"),
    "partition reduce op": (lambda c: nisa.tensor_partition_reduce(c.sb(1, 8), nl.minimum, c.sb(8, 8)), "must be add"),
    "partition reduce dst": (
        lambda c: nisa.tensor_partition_reduce(c.sb(8, 8), nl.add, c.sb(8, 8)),
        r"must hold \(1, 8\)",
    ),
    "gather indices": (
        lambda c: nisa.nc_n_gather(c.sb(8, 4), c.sb(8, 8), c.sb(8, 4, dtype="int32")),
        "indices dtype int32 must be one of uint32",
    ),
    "gather dtype": (
        lambda c: nisa.nc_n_gather(c.sb(8, 4, dtype="int8"), c.sb(8, 8), c.sb(8, 4, dtype="uint32")),
        "dst dtype int8 must be that of data",
    ),
    "gather bounds": (
        lambda c: nisa.nc_n_gather(c.sb(8, 4), c.sb(8, 8), c.sb(8, 4, dtype="uint32", value=8)),
        "index 8 is out of bounds",
    ),
    "nonzero src": (
        lambda c: nisa.nonzero_with_count(c.sb(16, 9, dtype="int32"), c.sb(16, 8, dtype="int8")),
        "src dtype int8",
    ),
    "nonzero dst": (
        lambda c: nisa.nonzero_with_count(c.sb(16, 8, dtype="int32"), c.sb(16, 8)),
        "must hold 9 elements",
    ),
    "local index dtype": (
        lambda c: nisa.local_gather(c.sb(16, 16), c.sb(16, 8), c.sb(16, 1, dtype="uint32")),
        "index dtype uint32",
    ),
    "local partitions": (
        lambda c: nisa.local_gather(c.sb(8, 16), c.sb(8, 8), c.sb(8, 1, dtype="uint16")),
        "must be a multiple of 16",
    ),
    "local elements": (
        lambda c: nisa.local_gather(c.sb(16, 48), c.sb(16, 8), c.sb(16, 1, dtype="uint16"), num_elem_per_idx=3),
        "must be 1, 2, 4, 8, 16 or 32",
    ),
    "local dtype": (
        lambda c: nisa.local_gather(c.sb(16, 16, dtype="int8"), c.sb(16, 8), c.sb(16, 1, dtype="uint16")),
        "dst dtype int8 must be that of src_buffer",
    ),
    "local valid": (
        lambda c: nisa.local_gather(c.sb(16, 17), c.sb(16, 8), c.sb(16, 1, dtype="uint16"), num_valid_indices=17),
        "num_valid_indices 17 must be 1..16",
    ),
    "local dst": (
        lambda c: nisa.local_gather(c.sb(16, 8), c.sb(16, 8), c.sb(16, 1, dtype="uint16")),
        "must hold 16 elements",
    ),
    "local bounds": (
        lambda c: nisa.local_gather(c.sb(16, 16), c.sb(16, 8), c.sb(16, 1, dtype="uint16", value=8)),
        "index 8 is out of bounds",
    ),
}

RULES = {
    f"{group}: {name}": rule
    for group, rules in [
        ("tensor", TENSOR_ENGINE),
        ("vector", VECTOR_ENGINE),
        ("scalar", SCALAR_ENGINE),
        ("gpsimd", GPSIMD_ENGINE),
    ]
    for name, rule in rules.items()
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(chip, rule):
    breaks, message = RULES[rule]
    with pytest.raises(NkiValidationError, match=message):
        simulate(lambda: breaks(chip) and None)()
