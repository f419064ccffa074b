"""RMS norms and layer norms. Sums are float32; whole rows lie in registers."""

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """x [rows, BLOCK] in the model's dtype, zero beyond SIZE; weight [1, BLOCK].

    A weight of this dtype: rounded twice, as the reference does it, after the norm and after the
    weight; the product of two narrow numbers is exact in float32. A float32 weight: rounded once.
    """
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    wide = wide * tl.rsqrt(mean + eps)[:, None]
    if weight.dtype == x.dtype:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm(
    output,
    x,
    weight,
    num_rows,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] of the rows of x [tokens, HEADS, SIZE]. Grid: groups of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    starts = rows // HEADS * token_stride + rows % HEADS * head_stride
    values = tl.load(x + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    normed = _normed(values, weights, eps, SIZE)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], normed, mask=inside)


@triton.jit
def _summed(x, residual, rows, columns, inside, x_stride, residual_stride, factor):
    """residual + factor * x [rows, columns], rounded to the model's dtype."""
    x_places = (rows * x_stride)[:, None] + columns[None, :]
    residual_places = (rows * residual_stride)[:, None] + columns[None, :]
    values = tl.load(x + x_places, mask=inside, other=0.0).to(tl.float32) * factor
    values += tl.load(residual + residual_places, mask=inside, other=0.0).to(tl.float32)
    return values.to(x.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm(
    output,
    total,
    x,
    residual,
    weight,
    num_rows,
    x_stride,
    residual_stride,
    factor,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = residual + factor * x, rounded; output = its norm; each [num_rows, SIZE]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    values = _summed(x, residual, rows, columns, inside, x_stride, residual_stride, factor)
    weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    places = (rows * SIZE)[:, None] + columns[None, :]
    tl.store(total + places, values, mask=inside)
    tl.store(output + places, _normed(values, weights, eps, SIZE), mask=inside)


@triton.jit
def _standardized(x, weight, bias, eps, is_column, SIZE: tl.constexpr):
    """x [rows, BLOCK] in the model's dtype, zero beyond SIZE; weight, bias [1 or rows, BLOCK].

    Rounded once, as the reference does it.
    """
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=1) / SIZE
    centered = tl.where(is_column[None, :], wide - mean[:, None], 0.0)
    variance = tl.sum(centered * centered, axis=1) / SIZE
    wide = centered * tl.rsqrt(variance + eps)[:, None]
    return (wide * weight.to(tl.float32) + bias.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm(
    output,
    x,
    weight,
    bias,
    num_rows,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
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
        biases = tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    normed = _standardized(values, weights, biases, eps, is_column, SIZE)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_layer_norm(
    output,
    total,
    x,
    residual,
    weight,
    bias,
    num_rows,
    x_stride,
    residual_stride,
    factor,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = residual + factor * x, rounded; output = its norm; each [num_rows, SIZE]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    values = _summed(x, residual, rows, columns, inside, x_stride, residual_stride, factor)
    weights = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    biases = tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    normed = _standardized(values, weights, biases, eps, is_column, SIZE)
    places = (rows * SIZE)[:, None] + columns[None, :]
    tl.store(total + places, values, mask=inside)
    tl.store(output + places, normed, mask=inside)
