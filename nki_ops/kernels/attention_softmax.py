"""The softmax of one tile of queries over all keys, with transposed scores.

S^T = K Q^T has keys on partitions. exp() of it, straight from PSUM, is P^T: the stationary operand that P.V needs, so
P is never transposed. The mask, and any shift that all queries of the tile share, is the exp's per-partition bias. A
column of ones beside V makes P.V sum the rows of P as well.
"""

import nki.isa as nisa  # pyright: ignore[reportMissingImports]
import nki.language as nl  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.attention_keys import key_groups, note_largest_norm
from nki_ops.kernels.common import PARTITIONS

# exp's argument stays below this; e^70 times 10^6 keys times values up to e^4 is still finite in float32.
LARGEST_EXPONENT = 70.0
BANK = 512  # float32 numbers in a partition of a PSUM bank
# Key tiles that one exp covers. Two spread its overhead over 1024 elements and take half of PSUM, twice two banks;
# the sums of four sub-tiles of queries take the other half, a bank each.
GROUP = 2
# Groups between a weight's making and its use.
LAG = 2


def weigh_shifted(state, keys, block_tokens, scale):
    """Weighted values and sums of the weights, [queries, D + 1] for each sub-tile; one shift for the whole tile."""
    groups = []
    for place in range(keys.mask.shape[1]):
        groups.extend(key_groups(keys, block_tokens, place, GROUP))
    return _weigh(state, keys, groups, scale, [])


def _weigh(state, keys, groups, scale, lift):
    """Sums over the keys of `groups`, in PSUM. `lift`: nothing, or one number for every query to add to its scores."""
    sub_tiles, queries = state.columns.shape[1], state.columns.shape[2]
    columns = keys.values.shape[2]
    sums = []
    for _ in range(sub_tiles):
        sums.append(nl.ndarray((queries, columns), nl.float32, buffer=nl.psum))
    banks = []
    for _ in range(2):
        banks.append(nl.ndarray((PARTITIONS, GROUP, BANK), nl.float32, buffer=nl.psum))
    # While ScalarE makes weights, TensorE makes the next scores and uses the weights before; neither waits.
    weights = []
    for i in range(len(groups) + LAG):
        if i < len(groups):
            weights.append(_weights(banks[i % 2], state, keys, groups[i], scale, lift))
        if i >= LAG:
            _add_values(sums, keys, groups[i - LAG], weights[i - LAG], i == LAG)
    return sums


def _weights(bank, state, keys, group, scale, lift):
    """P^T [keys, tiles, sub-tiles, queries] of a group of key tiles."""
    place, partitions, tiles = group
    dim, sub_tiles, queries = state.columns.shape
    width = sub_tiles * queries
    q_columns = state.columns.reshape((dim, width))
    for i in range(len(tiles)):
        scores = bank[:partitions, i, :width]
        k_columns = keys.columns[:, nl.ds(tiles[i][0], partitions)]
        nisa.nc_matmul(dst=scores, stationary=k_columns, moving=q_columns, accumulate=False)
        for ones, numbers in lift:
            nisa.nc_matmul(dst=scores, stationary=ones[:, :partitions], moving=numbers, accumulate=True)
    weights = nl.ndarray((partitions, len(tiles), sub_tiles, queries), keys.values.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights.reshape((partitions, len(tiles), width)),
        op=nl.exp,
        data=bank[:partitions, : len(tiles), :width],
        bias=state.bias[:partitions, place : place + 1],
        scale=scale,
    )
    return weights


def _add_values(sums, keys, group, weights, is_first):
    _, partitions, tiles = group
    for i in range(len(tiles)):
        values = keys.values[:partitions, tiles[i][1], :]
        for j in range(len(sums)):
            fresh = is_first and i == 0
            nisa.nc_matmul(dst=sums[j], stationary=weights[:, i, j, :], moving=values, accumulate=not fresh)


# ---- one shift a tile


def set_shift(state, x, keys, k_peak, scale):
    """bias = mask - max(0, bound - 70), with no score of the queries x above bound = scale * max|q| * max|k|."""
    q_peak = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=q_peak, value=0.0)
    note_largest_norm(q_peak, x)
    shift = largest_of_all(q_peak)
    nisa.tensor_scalar(dst=shift, data=shift, op0=nl.multiply, operand0=k_peak, op1=nl.power, operand1=0.5)
    nisa.tensor_scalar(
        dst=shift, data=shift, op0=nl.multiply, operand0=scale, op1=nl.subtract, operand1=LARGEST_EXPONENT
    )
    nisa.tensor_scalar(dst=shift, data=shift, op0=nl.maximum, operand0=0.0)
    nisa.tensor_scalar(dst=state.bias, data=keys.mask, op0=nl.subtract, operand0=shift)


def largest_of_all(column):
    """[128, 1]: the maximum of a float32 column over its partitions, on every partition."""
    row = nl.ndarray((1, column.shape[0]), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=row, data=column, engine=nisa.engine.tensor)
    top = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=row, axis=1)
    ones = nl.ndarray((1, PARTITIONS), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    spread = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=ones, moving=top, accumulate=False)
    result = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=spread)
    return result


# ---- the running maximum of every row


def weigh_online(state, keys, block_tokens, scale):
    """As `weigh_shifted`, for scores of any range: online softmax (Milakov and Gimelshein 2018), a place at a time.

    The maximum of a row is no bias here, where rows lie along the free dimension. It enters the scores as one more
    product, ones (for every key) times minus the maximum (for every query), so it is rounded to the dtype of the keys;
    the weights stay finite for scores up to 3e4.
    """
    dim, sub_tiles, queries = state.columns.shape
    dtype = keys.values.dtype
    total = nl.ndarray((queries, sub_tiles, dim + 1), nl.float32, buffer=nl.sbuf)
    ones = nl.ndarray((1, PARTITIONS), dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    negated = None  # minus the maximum so far
    for place in range(keys.mask.shape[1]):
        # A place that does not count shows the block of the first place: it raises no maximum.
        top = _highest_scores(state, keys, place * block_tokens, block_tokens)
        rounded = nl.ndarray((queries, sub_tiles), dtype, buffer=nl.sbuf)
        if place == 0:
            nisa.tensor_scalar(dst=rounded, data=top, op0=nl.multiply, operand0=-1.0)
        else:
            nisa.scalar_tensor_tensor(
                dst=rounded, data=top, op0=nl.multiply, operand0=-1.0, op1=nl.minimum, operand1=negated
            )
        lower = nl.ndarray((queries, sub_tiles), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=lower, src=rounded)
        groups = key_groups(keys, block_tokens, place, GROUP)
        sums = _weigh(state, keys, groups, scale, [(ones, _as_row(rounded))])
        if place == 0:
            for i in range(sub_tiles):
                nisa.tensor_copy(dst=total[:, i, :], src=sums[i])
        else:
            _add_decayed(total, sums, lower, negated, scale)
        negated = lower
    results = []
    for i in range(sub_tiles):
        results.append(total[:, i, :])
    return results


def _highest_scores(state, keys, first, count):
    """float32 [queries, sub-tiles]: maxima over the keys first .. first + count, of scores that are not scaled."""
    sub_tiles, queries = state.columns.shape[1], state.columns.shape[2]
    step = GROUP * BANK
    chunks = (count + step - 1) // step
    top = nl.ndarray((queries, sub_tiles), nl.float32, buffer=nl.sbuf)
    for i in range(sub_tiles):
        highest = nl.ndarray((queries, chunks), nl.float32, buffer=nl.sbuf)
        for chunk in range(chunks):
            begin, end = chunk * step, min(chunk * step + step, count)
            scores = nl.ndarray((queries, step), nl.float32, buffer=nl.psum)
            for at in range(begin, end, BANK):
                size = min(BANK, end - at)
                nisa.nc_matmul(
                    dst=scores[:, nl.ds(at - begin, size)],
                    stationary=state.columns[:, i, :],
                    moving=keys.columns[:, nl.ds(first + at, size)],
                    accumulate=False,
                )
            nisa.tensor_reduce(dst=highest[:, chunk : chunk + 1], op=nl.maximum, data=scores[:, : end - begin], axis=1)
        nisa.tensor_reduce(dst=top[:, i : i + 1], op=nl.maximum, data=highest, axis=1)
    return top


def _as_row(x):
    """[1, sub-tiles * queries] of x [queries, sub-tiles]."""
    queries, sub_tiles = x.shape
    turned = nl.ndarray((1, sub_tiles, queries), x.dtype, buffer=nl.psum)
    for i in range(sub_tiles):
        nisa.nc_transpose(dst=turned[:, i, :], data=x[:, i : i + 1], engine=nisa.engine.tensor)
    row = nl.ndarray((1, sub_tiles, queries), x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=row, src=turned)
    return row.reshape((1, sub_tiles * queries))


def _add_decayed(total, sums, lower, negated, scale):
    """total = total * exp(scale * (old maximum - new maximum)) + sums."""
    change = nl.ndarray(lower.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=change, data1=lower, data2=negated, op=nl.subtract)
    decay = nl.ndarray(lower.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=decay, op=nl.exp, data=change, scale=scale)
    for i in range(len(sums)):
        nisa.scalar_tensor_tensor(
            dst=total[:, i, :],
            data=total[:, i, :],
            op0=nl.multiply,
            operand0=decay[:, i : i + 1],
            op1=nl.add,
            operand1=sums[i],
        )
