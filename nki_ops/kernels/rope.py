"""RMS norm and rotation of queries and keys, fused; and the rotation alone.

Tokens lie on partitions, so a pair of channels is two neighbours in one partition: rows are loaded as they are, and
the halves of the pairs are views of stride 2. Nothing is de-interleaved.

VectorE reads two float32 tiles of SBUF at half the rate of one of SBUF and one of PSUM. So the rotary tables go
through PSUM, where ScalarE puts them, and of the two products that a sum needs one is made in PSUM. The norm's factor
1 / rms is a number per token, as the tables are: it is multiplied into them, 2 * D/2 numbers instead of C.
"""

import nki  # pyright: ignore[reportMissingImports]
import nki.isa as nisa  # pyright: ignore[reportMissingImports]
import nki.language as nl  # pyright: ignore[reportMissingImports]

from nki_ops.kernels.common import PARTITIONS, core_share, token_tiles

# Pairs that one instruction turns, for each partition: a float32 product takes 3 of the 8 PSUM banks.
PAIRS = 1536


@nki.jit
def rms_norm_rope_3d(q, k, q_scale, k_scale, cos, sin, eps=1e-6):
    """Queries and keys as attention takes them: RMS norm over all heads at once, heads split, pairs rotated.

    Arithmetic is float32, rounded once at the end (the XLA form rounds after the norm too). On two cores each takes
    half of the tokens.

    Args:
        q, k: [B, T, C] projections, all heads side by side.
        q_scale, k_scale: [C] norm scales.
        cos, sin: float32 [T, D/2] rotary table of each token; its width fixes the head dim.
        eps: added to the mean square.

    Returns:
        Two tensors [B, T, N, D] in the dtype of q and k.
    """
    batch, tokens, channels = q.shape
    half = cos.shape[1]
    assert k.shape == q.shape and k.dtype == q.dtype, f"k {k.shape} {k.dtype} must be as q, {q.shape} {q.dtype}"
    assert channels % (2 * half) == 0, f"{channels} channels are no whole number of heads of {2 * half}"
    assert cos.shape[0] == tokens, f"the table has {cos.shape[0]} rows for {tokens} tokens"
    _check_table(cos, sin)
    heads = channels // (2 * half)
    q_out = nl.ndarray((batch, tokens, heads, 2 * half), q.dtype, buffer=nl.shared_hbm)
    k_out = nl.ndarray((batch, tokens, heads, 2 * half), k.dtype, buffer=nl.shared_hbm)
    q_scales, k_scales = _load_scales(q_scale), _load_scales(k_scale)
    first, count = core_share(tokens)
    for start, partitions, rows in token_tiles(count):
        here = nl.ds(first + start, partitions * rows)
        table = _load_table(cos, sin, here, partitions, rows)
        for b in range(batch):
            for x, scales, out in ((q, q_scales, q_out), (k, k_scales, k_out)):
                source = x[b, here, :].reshape((partitions, rows, channels))
                target = out[b, here, :, :].reshape((partitions, rows, channels))
                _norm_rotate(target, source, scales, table, heads, eps)
    return q_out, k_out


@nki.jit
def rotate(x, cos, sin):
    """Rotates the adjacent channel pairs of heads by a table: the sink's keys, moved to where the window sees them.

    Args:
        x: [..., S, D], heads before tokens.
        cos, sin: float32 [S, D/2], or [1, D/2] for the same angles at every token.

    Returns:
        The rotated tensor, in the dtype of x; the arithmetic is float32. On two cores each takes half of the tokens.
    """
    tokens, dim = x.shape[-2], x.shape[-1]
    heads = x.size // (tokens * dim)
    half = cos.shape[1]
    assert dim == 2 * half, f"the table has {half} columns, half of {dim} channels are {dim // 2}"
    assert cos.shape[0] in (1, tokens), f"the table has {cos.shape[0]} rows for {tokens} tokens; give 1 or {tokens}"
    _check_table(cos, sin)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    flat_x, flat_out = x.reshape((heads, tokens, dim)), out.reshape((heads, tokens, dim))
    first, count = core_share(tokens)
    for start, partitions, rows in token_tiles(count):
        here = nl.ds(first + start, partitions * rows)
        table = _load_table(cos, sin, here, partitions, rows if cos.shape[0] == tokens else 1)
        source = flat_x[:, here, :].reshape_dim(1, (partitions, rows)).permute((1, 0, 2, 3))
        target = flat_out[:, here, :].reshape_dim(1, (partitions, rows)).permute((1, 0, 2, 3))
        _rotate_heads(target, source, table)
    return out


def _check_table(cos, sin):
    assert cos.shape == sin.shape, f"sin {sin.shape} must have the shape of cos, {cos.shape}"
    assert cos.dtype == nl.float32 and sin.dtype == nl.float32, f"the table must be float32, is {cos.dtype}"
    assert cos.shape[1] <= PAIRS, f"{cos.shape[1]} pairs a head exceed {PAIRS}"


def _load_table(cos, sin, here, partitions, rows):
    """[partitions, 2, rows, D/2]: cos and sin of the tokens `here`; a table of one row, on every partition."""
    half = cos.shape[1]
    table = nl.ndarray((partitions, 2, rows, half), nl.float32, buffer=nl.sbuf)
    for i, column in ((0, cos), (1, sin)):
        if column.shape[0] == 1:
            source = column.reshape((1, 1, half)).broadcast(0, partitions)
        else:
            source = column[here, :].reshape((partitions, rows, half))
        nisa.dma_copy(dst=table[:, i, :, :], src=source)
    return table


def _at_once(heads, half):
    """(heads, rows) of which the pairs are turned at once."""
    group = min(heads, PAIRS // half)
    return group, max(1, PAIRS // (group * half))


def _load_scales(scale):
    """Norm scales times sqrt(C), float32 on every partition: the norm then divides by the root of the sum."""
    channels = scale.shape[0]
    raw = nl.ndarray((PARTITIONS, channels), scale.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=scale.reshape((1, channels)).broadcast(0, PARTITIONS))
    scales = nl.ndarray((PARTITIONS, channels), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scales, data=raw, op0=nl.multiply, operand0=channels**0.5)
    return scales


def _norm_rotate(target, source, scales, table, heads, eps):
    """One tile: HBM views [partitions, rows, C], a few rows at a time."""
    rows = source.shape[1]
    _, step = _at_once(heads, table.shape[3])
    starts = range(0, rows, step)
    # Rows are normed one step ahead, so that VectorE has pairs to turn while the other engines make the next factors.
    ready = []
    for i in range(len(starts) + 1):
        if i < len(starts):
            here = nl.ds(starts[i], min(step, rows - starts[i]))
            ready.append(_normed(source[:, here, :], scales, table[:, :, here, :], eps))
        if i > 0:
            scaled, turn, sin = ready[i - 1]
            here = nl.ds(starts[i - 1], scaled.shape[1])
            _turn_rows(target[:, here, :], scaled, turn, sin, heads)


def _normed(source, scales, table, eps):
    """(scaled, turn, sin) of a few rows: channels times their scales, tables times 1 / rms in PSUM, sin in SBUF."""
    partitions, rows, channels = source.shape
    half = table.shape[3]
    x = nl.ndarray((partitions, rows, channels), source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=source)
    factor = _inverse_norm(x, eps)
    turn = nl.ndarray((partitions, 2, rows, half), nl.float32, buffer=nl.psum)
    sin = nl.ndarray((partitions, rows, half), nl.float32, buffer=nl.sbuf)
    for row in range(rows):
        of_token = factor[:, row : row + 1]
        nisa.activation(dst=turn[:, :, row, :], op=nl.copy, data=table[:, :, row, :], scale=of_token)
        nisa.activation(dst=sin[:, row, :], op=nl.copy, data=table[:, 1, row, :], scale=of_token)

    scaled = nl.ndarray((partitions, rows, channels), nl.float32, buffer=nl.sbuf)
    weights = scales[:partitions, :].expand_dim(1).broadcast(1, rows)
    nisa.tensor_tensor(dst=scaled, data1=x, data2=weights, op=nl.multiply, engine=nisa.engine.gpsimd)
    return scaled, turn, sin


def _turn_rows(target, scaled, turn, sin, heads):
    """Turns the pairs of a few rows and stores them, as many heads at a time as PSUM has room for."""
    partitions, rows, channels = scaled.shape
    half = sin.shape[2]
    group, _ = _at_once(heads, half)
    y = nl.ndarray((partitions, rows, channels), target.dtype, buffer=nl.sbuf)
    scaled_heads = scaled.reshape((partitions, rows, heads, 2 * half))
    y_heads = y.reshape((partitions, rows, heads, 2 * half))
    for head in range(0, heads, group):
        here = nl.ds(head, min(group, heads - head))
        shape = (partitions, rows, min(group, heads - head), half)
        _turn_pairs(
            y_heads[:, :, here, :],
            scaled_heads[:, :, here, :],
            _over_heads(turn[:, 0, :, :], 2, shape),
            _over_heads(turn[:, 1, :, :], 2, shape),
            _over_heads(sin, 2, shape),
        )
    nisa.dma_copy(dst=target, src=y)


def _inverse_norm(x, eps):
    """[partitions, rows] 1 / sqrt(sum of squares + C * eps)."""
    partitions, rows, channels = x.shape
    sums = nl.ndarray((partitions, rows), nl.float32, buffer=nl.sbuf)
    squares = nl.ndarray((partitions, channels), x.dtype, buffer=nl.sbuf)  # nobody reads them
    for row in range(rows):
        nisa.activation_reduce(
            dst=squares, op=nl.square, data=x[:, row, :], reduce_op=nl.add, reduce_res=sums[:, row : row + 1]
        )
    inverse = nl.ndarray((partitions, rows), nl.float32, buffer=nl.sbuf)
    # VectorE's power, since a rsqrt on ScalarE would have it swap its function tables at every tile.
    nisa.tensor_scalar(
        dst=inverse,
        data=sums,
        op0=nl.add,
        operand0=channels * eps,
        op1=nl.power,
        operand1=-0.5,
        engine=nisa.engine.vector,
    )
    return inverse


def _rotate_heads(target, source, table):
    """One tile: HBM views [partitions, heads, rows, D], a few heads and rows at a time."""
    partitions, heads, rows, dim = source.shape
    half = dim // 2
    group, step = _at_once(heads, half)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        part = table if table.shape[2] == 1 else table[:, :, row : row + count, :]
        turn = nl.ndarray(part.shape, nl.float32, buffer=nl.psum)
        nisa.activation(dst=turn, op=nl.copy, data=part)
        for head in range(0, heads, group):
            shape = (partitions, min(group, heads - head), count, dim)
            x = nl.ndarray(shape, source.dtype, buffer=nl.sbuf)
            y = nl.ndarray(shape, source.dtype, buffer=nl.sbuf)
            here = nl.ds(head, shape[1])
            nisa.dma_copy(dst=x, src=source[:, here, row : row + count, :])
            halves = (partitions, shape[1], count, half)
            _turn_pairs(
                y,
                x,
                _over_heads(turn[:, 0, :, :], 1, halves),
                _over_heads(turn[:, 1, :, :], 1, halves),
                _over_heads(part[:, 1, :, :], 1, halves),
            )
            nisa.dma_copy(dst=target[:, here, row : row + count, :], src=y)


def _over_heads(column, dim, shape):
    """A table [partitions, rows, D/2] as `shape`, repeated over the heads, which are dimension `dim`."""
    view = column.expand_dim(dim)
    for d in (1, 2):
        if view.shape[d] < shape[d]:
            view = view.broadcast(d, shape[d])
    return view


def _turn_pairs(y, x, cos, sin, sin_in_sbuf):
    """y = x with each pair of the last axis turned; the tables are [..., D/2], `cos` and `sin` in PSUM."""
    shape = cos.shape
    x_even, x_odd = x[:, :, :, 0::2], x[:, :, :, 1::2]
    y_even, y_odd = y[:, :, :, 0::2], y[:, :, :, 1::2]
    # GpSimdE takes one of the four products; it would keep up at half of its modelled rate.
    odd_sin = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=odd_sin, data1=x_odd, data2=sin_in_sbuf, op=nl.multiply, engine=nisa.engine.gpsimd)
    even_cos = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.tensor_tensor(dst=even_cos, data1=x_even, data2=cos, op=nl.multiply, engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=y_even, data1=even_cos, data2=odd_sin, op=nl.subtract, engine=nisa.engine.vector)

    even_sin = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=even_sin, data1=x_even, data2=sin, op=nl.multiply, engine=nisa.engine.vector)
    odd_cos = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.tensor_tensor(dst=odd_cos, data1=x_odd, data2=cos, op=nl.multiply, engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=y_odd, data1=odd_cos, data2=even_sin, op=nl.add, engine=nisa.engine.vector)
