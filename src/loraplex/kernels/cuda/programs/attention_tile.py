"""What the attention programs share: which keys are read, how they are read, the sums over them.

Keys go in tiles of BLOCK_N at multiples of it. Scores are in powers of two. A sum over keys is kept
as the largest score, the sum of the weights and the weighted sum of the values, all float32.

Storage: number d of head h of a block's token t is at block * BLOCK_STRIDE + (t * K + h) * D + d.
int8 has a float32 scale for each vector, [BLOCK_SIZE, K], behind the numbers of each block.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def tiles_to_read(
    first_position,
    end,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
):
    """(of the sinks, first behind them, all) tiles with keys for the positions from the first on.

    end: behind the last position. WINDOW 0: there is none.
    """
    first = end * 0
    num_sink_tiles = end * 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
        num_sink_tiles = tl.minimum(first, (NUM_SINKS + BLOCK_N - 1) // BLOCK_N)
    num_tiles = num_sink_tiles + tl.cdiv(end, BLOCK_N) - first
    return num_sink_tiles, first, num_tiles


@triton.jit
def tile_at(index, num_sink_tiles, first):
    """The tile that is read as number `index`."""
    return tl.where(index < num_sink_tiles, index, index - num_sink_tiles + first)


@triton.jit
def sees(positions, keys, WINDOW: tl.constexpr, NUM_SINKS: tl.constexpr):
    """Whether a query at a position sees a key; both of a shape, or of shapes that broadcast."""
    seen = keys <= positions
    if WINDOW > 0:
        seen = seen & ((keys > positions - WINDOW) | (keys < NUM_SINKS))
    return seen


@triton.jit
def is_read(keys, first_position, end, WINDOW: tl.constexpr, NUM_SINKS: tl.constexpr):
    """Whether any query at first_position .. end - 1 sees a key: no other may be touched."""
    read = keys < end
    if WINDOW > 0:
        read = read & ((keys > first_position - WINDOW) | (keys < NUM_SINKS))
    return read


@triton.jit
def load_vectors(
    numbers,
    blocks,
    offsets,
    read,
    kv_head,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] as stored; zeros where nothing is to be read."""
    dims = tl.arange(0, BLOCK_D)
    starts = blocks * BLOCK_STRIDE + (offsets * K + kv_head) * D
    pointers = numbers + starts[:, None] + dims[None, :]
    if IS_MASKED:
        vectors = tl.load(pointers, mask=read[:, None] & (dims < D)[None, :], other=0)
    elif D < BLOCK_D:
        vectors = tl.load(pointers, mask=(dims < D)[None, :], other=0)
    else:
        vectors = tl.load(pointers)
    return vectors


@triton.jit
def load_scales(
    scales,
    blocks,
    offsets,
    read,
    kv_head,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """[BLOCK_N] of int8 vectors; `scales` is their storage, as float32."""
    starts = blocks * (BLOCK_STRIDE // 4) + BLOCK_SIZE * K * D // 4
    return tl.load(scales + starts + offsets * K + kv_head, mask=read, other=0.0)


@triton.jit
def in_powers_of_two(products, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Scores from products of queries and keys. SOFT_CAP 0: there is none."""
    if SOFT_CAP > 0:
        doubled = products * (2.0 * SCALE / SOFT_CAP)
        scores = (1.0 - 2.0 / (tl.exp(doubled) + 1.0)) * (SOFT_CAP * LOG2_E)
    else:
        scores = products * (SCALE * LOG2_E)
    return scores


@triton.jit
def finite_or_zero(maxima):
    """To subtract from scores: where nothing was seen yet, the largest is -inf."""
    return tl.where(maxima == float("-inf"), 0.0, maxima)


@triton.jit
def fold(maxima, sums, values, other_maxima, other_sums, other_values):
    """The sum over two sets of keys; exactly the first one's if no key of the other was seen."""
    joint = tl.maximum(maxima, other_maxima)
    base = finite_or_zero(joint)
    factor = tl.exp2(maxima - base)
    other_factor = tl.exp2(other_maxima - base)
    sums = sums * factor + other_sums * other_factor
    values = values * factor[:, None] + other_values * other_factor[:, None]
    return joint, sums, values


@triton.jit
def add_tile(
    maxima,
    sums,
    values,
    query,
    positions,
    tile,
    first_position,
    end,
    kv_head,
    table,
    key_numbers,
    value_numbers,
    key_scales,
    value_scales,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The sums of query [M, BLOCK_D] at positions [M], with those over the keys of one tile.

    first_position, end: of the queries' positions. IS_MASKED: some key may be hidden from some
    query. Products are of the query's type, values are rounded to it.
    """
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = is_read(keys, first_position, end, WINDOW, NUM_SINKS)
    if IS_MASKED:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
    at = keys % BLOCK_SIZE
    key = load_vectors(
        key_numbers, blocks, at, read, kv_head, K, D, BLOCK_D, BLOCK_STRIDE, IS_MASKED
    ).to(query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    if key_scales is not None:
        scales = load_scales(key_scales, blocks, at, read, kv_head, K, D, BLOCK_SIZE, BLOCK_STRIDE)
        products = products * scales[None, :]
    scores = in_powers_of_two(products, SCALE, SOFT_CAP)
    if IS_MASKED:
        seen = sees(positions[:, None], keys[None, :], WINDOW, NUM_SINKS)
        scores = tl.where(seen, scores, float("-inf"))
    joint = tl.maximum(maxima, tl.max(scores, 1))
    base = finite_or_zero(joint)
    factor = tl.exp2(maxima - base)
    weights = tl.exp2(scores - base[:, None])
    sums = sums * factor + tl.sum(weights, 1)
    value = load_vectors(
        value_numbers, blocks, at, read, kv_head, K, D, BLOCK_D, BLOCK_STRIDE, IS_MASKED
    )
    if value_scales is not None:
        scales = load_scales(
            value_scales, blocks, at, read, kv_head, K, D, BLOCK_SIZE, BLOCK_STRIDE
        )
        if query.dtype == tl.float16:
            # Weights times scales might be too small for it.
            value = value.to(tl.float32) * scales[:, None]
        else:
            weights = weights * scales[None, :]
    values = tl.dot(
        weights.to(query.dtype),
        value.to(query.dtype),
        acc=values * factor[:, None],
        input_precision="ieee",
    )
    return joint, sums, values
