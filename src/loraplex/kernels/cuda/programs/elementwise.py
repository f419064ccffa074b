"""Norms, scaled sums and numbers, rotary embedding, activations, and rows of tables.

Sums of norms are float32; whole rows lie in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, bias, eps, is_column, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    """x [rows, BLOCK] in the model's dtype, zero beyond SIZE; weight, bias [1 or rows, BLOCK].

    Without a bias it is the RMS norm. Then a weight of x's dtype has its result rounded twice, as
    the reference does it, after the norm and after the weight; the product of two narrow numbers is
    exact in float32. All else is rounded once.
    """
    wide = x.to(tl.float32)
    if HAS_BIAS:
        mean = tl.sum(wide, axis=1) / SIZE
        centered = tl.where(is_column[None, :], wide - mean[:, None], 0.0)
        variance = tl.sum(centered * centered, axis=1) / SIZE
        wide = centered * tl.rsqrt(variance + eps)[:, None]
        result = wide * weight.to(tl.float32) + bias.to(tl.float32)
    else:
        mean = tl.sum(wide * wide, axis=1) / SIZE
        wide = wide * tl.rsqrt(mean + eps)[:, None]
        if weight.dtype == x.dtype:
            wide = wide.to(x.dtype).to(tl.float32)
        result = wide * weight.to(tl.float32)
    return result.to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def norm(
    output,
    x,
    weight,
    bias,  # or None
    num_rows,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] of the rows of x [tokens, HEADS, SIZE]. Grid: groups of ROWS rows.

    weight, bias [HEADS, SIZE] if IS_PER_HEAD, else [SIZE]; contiguous.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    starts = rows // HEADS * token_stride + rows % HEADS * head_stride
    values = tl.load(x + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    if IS_PER_HEAD:
        places = (rows % HEADS * SIZE)[:, None] + columns[None, :]
        weights = tl.load(weight + places, mask=inside, other=0.0)
        biases = tl.load(bias + places, mask=inside, other=0.0)
    else:
        weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
        biases = bias
        if HAS_BIAS:
            biases = tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    normed = _normed(values, weights, biases, eps, is_column, HAS_BIAS, SIZE)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_norm(
    output,
    total,
    x,
    residual,
    weight,
    bias,  # or None
    num_rows,
    x_stride,
    residual_stride,
    factor,
    eps,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = residual + factor * x, rounded; output = its norm; each [num_rows, SIZE]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    x_places = (rows * x_stride)[:, None] + columns[None, :]
    residual_places = (rows * residual_stride)[:, None] + columns[None, :]
    wide = tl.load(x + x_places, mask=inside, other=0.0).to(tl.float32) * factor
    wide += tl.load(residual + residual_places, mask=inside, other=0.0).to(tl.float32)
    values = wide.to(x.dtype.element_ty)
    weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    biases = bias
    if HAS_BIAS:
        biases = tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    places = (rows * SIZE)[:, None] + columns[None, :]
    tl.store(total + places, values, mask=inside)
    normed = _normed(values, weights, biases, eps, is_column, HAS_BIAS, SIZE)
    tl.store(output + places, normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm(
    output,
    x,
    gate,
    weight,
    num_rows,
    x_stride,
    x_group_stride,
    gate_stride,
    gate_group_stride,
    eps,
    IS_GATED_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] = RMS norm of x [tokens, GROUPS, SIZE], and its gate's factor.

    The norm is rounded, and so is its product with the weight ([GROUPS, SIZE] if IS_PER_GROUP).
    Grid: groups of ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    tokens, groups = rows // GROUPS, rows % GROUPS
    x_starts = tokens * x_stride + groups * x_group_stride
    narrow = tl.load(x + x_starts[:, None] + columns[None, :], mask=inside, other=0.0)
    gate_starts = tokens * gate_stride + groups * gate_group_stride
    gates = tl.load(gate + gate_starts[:, None] + columns[None, :], mask=inside, other=0.0)
    factor = activated(gates.to(tl.float32), "silu")
    wide = narrow.to(tl.float32)
    if IS_GATED_FIRST:
        wide = wide * factor
    mean = tl.sum(wide * wide, axis=1) / SIZE
    unit = (wide * tl.rsqrt(mean + eps)[:, None]).to(narrow.dtype).to(tl.float32)
    if IS_PER_GROUP:
        own = (groups * SIZE)[:, None] + columns[None, :]
        weights = tl.load(weight + own, mask=inside, other=0.0)
    else:
        weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    result = (unit * weights.to(tl.float32)).to(narrow.dtype)
    if not IS_GATED_FIRST:
        result = (result.to(tl.float32) * factor).to(narrow.dtype)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], result, mask=inside)


@triton.jit
def tanh(x):
    """tanh of float32 numbers to their last bits: near zero by its series, where 1 - e loses them.

    (The library function of a GPU has no interpreter.)
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 - square * (17 / 315)))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.04, series, tl.where(x < 0, -far, far))


@triton.jit
def add(
    output,
    x,
    residual,
    x_stride,
    residual_stride,
    factor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [rows, SIZE] = residual + factor * x, rounded once. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * x_stride + columns, mask=inside)
    total = tl.load(residual + row * residual_stride + columns, mask=inside).to(tl.float32)
    total += added.to(tl.float32) * factor
    tl.store(output + row * SIZE + columns, total.to(added.dtype), mask=inside)


@triton.jit
def multiply(output, x, factor, x_stride, factor_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """output [rows, SIZE] = x * factor, rounded once. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    narrow = tl.load(x + row * x_stride + columns, mask=inside)
    by = tl.load(factor + row * factor_stride + columns, mask=inside)
    product = narrow.to(tl.float32) * by.to(tl.float32)
    tl.store(output + row * SIZE + columns, product.to(narrow.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def sigmoid_gate(
    output,
    x,
    gate,
    num_rows,
    x_stride,
    x_head_stride,
    gate_stride,
    gate_head_stride,
    gate_element_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] = x * sigmoid(gate) of x, gate [tokens, HEADS, SIZE], each rounded.

    Grid: groups of ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    tokens, heads = rows // HEADS, rows % HEADS
    x_places = (tokens * x_stride + heads * x_head_stride)[:, None] + columns[None, :]
    narrow = tl.load(x + x_places, mask=inside, other=0.0)
    gate_starts = tokens * gate_stride + heads * gate_head_stride
    gate_places = gate_starts[:, None] + columns[None, :] * gate_element_stride
    wide = tl.load(gate + gate_places, mask=inside, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-wide))).to(narrow.dtype)
    product = narrow.to(tl.float32) * factor.to(tl.float32)
    places = (rows * SIZE)[:, None] + columns[None, :]
    tl.store(output + places, product.to(narrow.dtype), mask=inside)


@triton.jit
def scale(
    x,
    row_stride,
    factor,
    soft_cap,
    HAS_SOFT_CAP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, SIZE] = soft_cap * tanh(factor * x / soft_cap), in place. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = x + row * row_stride + columns
    narrow = tl.load(places, mask=inside)
    wide = narrow.to(tl.float32) * factor
    if HAS_SOFT_CAP:
        wide = soft_cap * tanh(wide / soft_cap)
    tl.store(places, wide.to(narrow.dtype), mask=inside)


@triton.jit
def _turn(
    heads,
    cos,
    sin,
    first_head,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate a token's heads from first_head on, at `heads`. cos, sin [1, BLOCK]."""
    which = first_head + tl.arange(0, HEADS)
    starts = heads + (which * head_stride)[:, None]
    is_head = (which < NUM_HEADS)[:, None]
    if IS_INTERLEAVED:
        # Pairs lie side by side: they are loaded and stored whole, so that accesses are wide.
        dims = tl.arange(0, 2 * BLOCK)[None, :]
        inside = is_head & (dims < 2 * HALF)
        stored = tl.load(starts + dims, mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(stored.to(tl.float32), (HEADS, BLOCK, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, (HEADS, 2 * BLOCK)).to(stored.dtype)
        tl.store(starts + dims, turned, mask=inside)
    else:
        dims = tl.arange(0, BLOCK)[None, :]
        inside = is_head & (dims < HALF)
        stored = tl.load(starts + dims, mask=inside)
        first = stored.to(tl.float32)
        second = tl.load(starts + HALF + dims, mask=inside).to(tl.float32)
        turned_first = (first * cos - second * sin).to(stored.dtype)
        turned_second = (second * cos + first * sin).to(stored.dtype)
        tl.store(starts + dims, turned_first, mask=inside)
        tl.store(starts + HALF + dims, turned_second, mask=inside)


@triton.jit
def rotary(
    query,
    key,
    cos,
    sin,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    angle_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (tokens, groups of HEADS query heads, then groups of HEADS key heads).

    Of a head the first 2 * HALF numbers turn.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_QUERY_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, BLOCK)
    angles = token * angle_stride + dims
    cosines = tl.load(cos + angles, mask=dims < HALF, other=0.0)[None, :]
    sines = tl.load(sin + angles, mask=dims < HALF, other=0.0)[None, :]
    if group < query_groups:
        _turn(
            *(query + token * query_stride, cosines, sines, group * HEADS, query_head_stride),
            *(NUM_QUERY_HEADS, HALF, IS_INTERLEAVED, HEADS, BLOCK),
        )
    else:
        _turn(
            *(key + token * key_stride, cosines, sines, (group - query_groups) * HEADS),
            *(key_head_stride, NUM_KEY_HEADS, HALF, IS_INTERLEAVED, HEADS, BLOCK),
        )


@triton.jit
def activated(wide, ACTIVATION: tl.constexpr):
    """The activation, one of kernels.activations by value, of float32 numbers."""
    if ACTIVATION == "silu":
        result = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == "gelu":
        result = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh u) / 2 = x / (1 + e^(-2 u))
        result = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    else:
        result = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "squared_relu":
            result = result * result
        else:
            tl.static_assert(ACTIVATION == "relu")
    return result


@triton.jit
def _clamped_swiglu(wide, up):
    """(up + 1) wide sigmoid(1.702 wide) of float32 numbers; wide at most 7, up within 7."""
    every: tl.constexpr = tl.PropagateNan.ALL
    wide = tl.minimum(wide, 7.0, propagate_nan=every)
    up = tl.maximum(tl.minimum(up, 7.0, propagate_nan=every), -7.0, propagate_nan=every)
    return (up + 1.0) * wide / (1.0 + tl.exp(-1.702 * wide))


@triton.jit
def gate(
    output, gate_up, row_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output [rows, SIZE] = activation(gate_up[:, :SIZE]) * gate_up[:, SIZE:]. Grid: (rows, parts).

    Rounded twice, as the reference does it, but for CLAMPED_SWIGLU. The product of two narrow
    numbers is exact in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = gate_up + row * row_stride + columns
    first, up = tl.load(places, mask=inside), tl.load(places + SIZE, mask=inside)
    if ACTIVATION == "clamped_swiglu":
        product = _clamped_swiglu(first.to(tl.float32), up.to(tl.float32)).to(first.dtype)
    else:
        result = activated(first.to(tl.float32), ACTIVATION).to(first.dtype)
        product = (result.to(tl.float32) * up.to(tl.float32)).to(first.dtype)
    tl.store(output + row * SIZE + columns, product, mask=inside)


@triton.jit
def activate(
    output, x, row_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output [rows, SIZE] of x [rows, SIZE]. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    narrow = tl.load(x + row * row_stride + columns, mask=inside)
    result = activated(narrow.to(tl.float32), ACTIVATION)
    tl.store(output + row * SIZE + columns, result.to(narrow.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def take_rows(
    output,
    table,
    indices,
    num_rows,
    table_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] = table[indices]. Grid: (groups of ROWS rows, parts of a row)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    inside = is_row[:, None] & (columns < SIZE)[None, :]
    starts = tl.load(indices + rows, mask=is_row, other=0) * table_stride
    values = tl.load(table + starts[:, None] + columns[None, :], mask=inside)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], values, mask=inside)
