"""What the attention programs share: which keys are read, how they are read, the sums over them.

Keys go in tiles of BLOCK_N at multiples of it. Scores are in powers of two. A sum over keys is kept
as the largest score, the sum of the weights and the weighted sum of the values, all float32.

Storage: number d of head h of a block's token t is at block * BLOCK_STRIDE + (t * K + h) * D + d.
int8 has a float32 scale for each vector, [BLOCK_SIZE, K], after the numbers of each block.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.elementwise import tanh


class AttentionConstants(NamedTuple):
    """Constants of one layer's attention; each is a tl.constexpr."""

    K: Any
    """Number of KV heads."""
    G: Any
    """Query heads per KV head."""
    D: Any
    """Size of a head."""
    BLOCK_D: Any
    """D, rounded up to a power of two of at least 16."""
    BLOCK_SIZE: Any
    """Tokens per KV block."""
    BLOCK_STRIDE: Any
    """Numbers from one KV block to the next."""
    SCALE: Any
    """Factor of the product of a query and a key."""
    SOFT_CAP: Any
    """The bound to which tanh bends scores; 0: none."""
    HAS_SLOPES: Any
    """Whether scores have a term in proportion to distances."""
    MAX_DISTANCE: Any
    """Largest distance with a bias of its own; 0: scores have none by distance."""
    WINDOW: Any
    """Tokens that a query sees; 0: all."""
    NUM_SINKS: Any
    """First tokens that are seen in addition to the window."""
    IS_CAUSAL: Any
    """Whether a query sees no later token. Else its window reaches as far ahead as back."""


class Stored(NamedTuple):
    """Keys and values of one layer in their blocks."""

    key_numbers: Any
    value_numbers: Any
    key_scales: Any
    """The storage as float32, if it is int8; else None."""
    value_scales: Any


class Rows(NamedTuple):
    """Per row: its length, its line in the block tables; and the tables."""

    seq_lens: Any
    table_rows: Any
    block_tables: Any


class HeadTerms(NamedTuple):
    """What query heads add to scores, [H] float32 each, or None. No layer has slopes and biases."""

    slopes: Any
    """Times the distance from a query to an earlier key, negative: added to the score."""
    sink_logits: Any
    """One more score, of no key and no value."""
    position_bias: Any
    """[H, 2 * MAX_DISTANCE + 1]: added by key position - query position, from the least on."""


class Partials(NamedTuple):
    """Sums over one share of the keys, per (token, head, share)."""

    weighted: Any
    """[..., D] weighted sum of the values."""
    sums: Any
    """[..., 2] largest score and sum of the weights."""


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def end_of_keys(first_position, num_queries, seq_len, S):
    """The key after the last one that any of these queries of a row sees."""
    end = first_position + num_queries
    if not S.IS_CAUSAL:
        end = tl.minimum(seq_len, end - 1 + S.WINDOW) if S.WINDOW > 0 else seq_len
    return end


@triton.jit
def tiles_to_read(
    first_position,
    end,
    BLOCK_N: tl.constexpr,
    S,
):
    """Tiles with keys for the queries from first_position on: (sink tiles, first tile after them,
    number of all tiles). end: of their keys.
    """
    first = end * 0
    num_sink_tiles = end * 0
    if S.WINDOW > 0:
        first = tl.maximum(first_position - S.WINDOW + 1, 0) // BLOCK_N
        num_sink_tiles = tl.minimum(first, (S.NUM_SINKS + BLOCK_N - 1) // BLOCK_N)
    num_tiles = num_sink_tiles + tl.cdiv(end, BLOCK_N) - first
    return num_sink_tiles, first, num_tiles


@triton.jit
def tile_at(index, num_sink_tiles, first):
    """The tile that is read as number `index`."""
    return tl.where(index < num_sink_tiles, index, index - num_sink_tiles + first)


@triton.jit
def sees(positions, keys, end, S):
    """Whether a query at a position sees a key; both of a shape, or of shapes that broadcast.

    end: of the keys that any of the queries sees.
    """
    if S.IS_CAUSAL:
        seen = keys <= positions
    else:
        seen = keys < end
        if S.WINDOW > 0:
            seen = seen & (keys < positions + S.WINDOW)
    if S.WINDOW > 0:
        seen = seen & ((keys > positions - S.WINDOW) | (keys < S.NUM_SINKS))
    return seen


@triton.jit
def is_read(keys, first_position, end, S):
    """Whether any query from first_position on sees a key: no other may be touched."""
    read = keys < end
    if S.WINDOW > 0:
        read = read & ((keys > first_position - S.WINDOW) | (keys < S.NUM_SINKS))
    return read


@triton.jit
def load_vectors(numbers, blocks, offsets, read, kv_head, S, IS_MASKED: tl.constexpr):
    """[BLOCK_N, BLOCK_D] as stored; zeros where nothing is to be read."""
    dims = tl.arange(0, S.BLOCK_D)
    starts = blocks * S.BLOCK_STRIDE + (offsets * S.K + kv_head) * S.D
    pointers = numbers + starts[:, None] + dims[None, :]
    if IS_MASKED:
        vectors = tl.load(pointers, mask=read[:, None] & (dims < S.D)[None, :], other=0)
    elif S.D < S.BLOCK_D:
        vectors = tl.load(pointers, mask=(dims < S.D)[None, :], other=0)
    else:
        vectors = tl.load(pointers)
    return vectors


@triton.jit
def load_scales(scales, blocks, offsets, read, kv_head, S):
    """[BLOCK_N] scales of int8 vectors; `scales` is their storage, as float32."""
    starts = blocks * (S.BLOCK_STRIDE // 4) + S.BLOCK_SIZE * S.K * S.D // 4
    return tl.load(scales + starts + offsets * S.K + kv_head, mask=read, other=0.0)


@triton.jit
def scores_of(products, by_distance, keys, positions, S):
    """Scores, as exponents of 2, from products of queries and keys.

    by_distance: from terms_by_distance. All have one shape, or shapes that broadcast.
    """
    if S.SOFT_CAP > 0:
        scores = tanh(products * (S.SCALE / S.SOFT_CAP)) * (S.SOFT_CAP * LOG2_E)
    else:
        scores = products * (S.SCALE * LOG2_E)
    if S.HAS_SLOPES:
        scores += by_distance * (keys - positions).to(tl.float32)
    elif S.MAX_DISTANCE > 0:
        distances = tl.minimum(tl.maximum(keys - positions, -S.MAX_DISTANCE), S.MAX_DISTANCE)
        scores += tl.load(by_distance + distances) * LOG2_E
    return scores


@triton.jit
def terms_by_distance(terms, heads, is_head, S):
    """Slopes of heads as exponents of 2, or where the biases of distance 0 lie; zeros without."""
    if S.HAS_SLOPES:
        by_distance = tl.load(terms.slopes + heads, mask=is_head, other=0.0) * LOG2_E
    elif S.MAX_DISTANCE > 0:
        # A head that is none reads the first one's: its scores are used nowhere.
        first = tl.where(is_head, heads, 0) * (2 * S.MAX_DISTANCE + 1)
        by_distance = terms.position_bias + first + S.MAX_DISTANCE
    else:
        by_distance = 0.0 * heads
    return by_distance


@triton.jit
def first_sums(terms, heads, is_counted):
    """Largest score and sum of the weights before any key: of the heads' sink logits, if any.

    is_counted: which of the sums have it. Of several that are joined only one may.
    """
    maxima = tl.full(heads.shape, float("-inf"), tl.float32)
    sums = tl.zeros(heads.shape, tl.float32)
    if terms.sink_logits is not None:
        logits = tl.load(terms.sink_logits + heads, mask=is_counted, other=float("-inf"))
        maxima = logits * LOG2_E
        sums = tl.where(is_counted, 1.0, sums)
    return maxima, sums


@triton.jit
def finite_or_zero(maxima):
    """Maxima that may be subtracted from scores: where nothing was seen yet they are -inf."""
    return tl.where(maxima == float("-inf"), 0.0, maxima)


@triton.jit
def fold(maxima, sums, values, other_maxima, other_sums, other_values):
    """Join the sums over two sets of keys; exactly the first if no key of the other was seen."""
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
    by_distance,
    tile,
    first_position,
    end,
    kv_head,
    table,
    stored,
    S,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the keys of one tile to the sums of query [M, BLOCK_D]; positions, by_distance [M].
    The queries' positions begin at first_position, their keys end at `end`. IS_MASKED: some key may
    be hidden from some query. Products are of the query's type, values are rounded to it.
    """
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = is_read(keys, first_position, end, S)
    if IS_MASKED:
        blocks = tl.load(table + keys // S.BLOCK_SIZE, mask=read, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + keys // S.BLOCK_SIZE).to(tl.int64)
    at = keys % S.BLOCK_SIZE
    key = load_vectors(stored.key_numbers, blocks, at, read, kv_head, S, IS_MASKED)
    products = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    if stored.key_scales is not None:
        scales = load_scales(stored.key_scales, blocks, at, read, kv_head, S)
        products = products * scales[None, :]
    scores = scores_of(products, by_distance[:, None], keys[None, :], positions[:, None], S)
    if IS_MASKED:
        seen = sees(positions[:, None], keys[None, :], end, S)
        scores = tl.where(seen, scores, float("-inf"))
    joint = tl.maximum(maxima, tl.max(scores, 1))
    base = finite_or_zero(joint)
    factor = tl.exp2(maxima - base)
    weights = tl.exp2(scores - base[:, None])
    sums = sums * factor + tl.sum(weights, 1)
    value = load_vectors(stored.value_numbers, blocks, at, read, kv_head, S, IS_MASKED)
    if stored.value_scales is not None:
        scales = load_scales(stored.value_scales, blocks, at, read, kv_head, S)
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
