"""Linear recurrences with decay: the gated delta rule, and the state space of Mamba2.

kernels.recurrence has the formula. A program computes the positions of one row in their order, for
some columns of one head's values; state, keys and written values since the last border lie in its
registers. So a position has one order of sums, however the row is cut into steps.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + e^x) to its last bits: near zero the rounding of 1 + e is divided out again."""
    e = tl.exp(-tl.abs(x))
    above = 1.0 + e
    is_lost = above == 1.0
    rounded = tl.where(is_lost, 1.0, above - 1.0)
    return tl.maximum(x, 0.0) + tl.where(is_lost, e, tl.log(above) * (e / rounded))


@triton.jit
def _unit(vector, FLOOR: tl.constexpr):
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + FLOOR)


@triton.jit
def _read(vector, factors, decayed, state, keys, written):
    """What a key or query reads: [values] of the state and of the positions since the border."""
    products = tl.sum(keys * vector[None, :], 1) * factors
    recent = tl.sum(products[:, None] * written, 0)
    return decayed * tl.sum(state * vector[:, None], 0) + recent


@triton.jit
def _products(keys, values, tail, EVERY: tl.constexpr):
    """[dims, columns]: the sum of a key times a value of each position, in their order.

    A product of matrices would have whole rows of both in the registers of each thread.
    """
    total = tl.zeros([keys.shape[1], values.shape[1]], tl.float32)
    for position in range(EVERY):
        is_here = (tail == position)[:, None]
        key = tl.sum(tl.where(is_here, keys, 0.0), 0)
        value = tl.sum(tl.where(is_here, values, 0.0), 0)
        total += key[:, None] * value[None, :]
    return total


@triton.jit
def recurrence(
    output,
    mixed,  # [tokens, channels], with queries, keys and values at QUERY, KEY and VALUE
    gates,  # [tokens, VALUE_HEADS]: a, or dt
    strengths,  # b [tokens, VALUE_HEADS], or None: a state space
    rates,  # [VALUE_HEADS]: a_log, or the rate
    dt_bias,
    skip,  # [VALUE_HEADS], or None: a delta rule
    query_start_loc,
    positions,
    reads,
    writes,
    places,
    table_starts,
    tables,
    stored_keys,  # [blocks, BLOCK_SIZE, KEY_HEADS * KEY_SIZE]
    stored_values,  # [blocks, BLOCK_SIZE, VALUE_HEADS * VALUE_SIZE]
    stored_sums,  # [blocks, BLOCK_SIZE, VALUE_HEADS]
    states,  # [any, VALUE_HEADS, KEY_SIZE, VALUE_SIZE]
    mixed_stride,
    gate_stride,
    strength_stride,
    smallest_dt,
    largest_dt,
    query_scale,
    LENGTH_FLOOR: tl.constexpr,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """output [tokens, VALUE_HEADS * VALUE_SIZE]. Grid: (rows, heads and parts of their values)."""
    row = tl.program_id(0)
    first = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    if first >= end:
        return
    parts: tl.constexpr = (VALUE_SIZE + VALUES - 1) // VALUES
    head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    stores_key = (part == 0) & (head % (VALUE_HEADS // KEY_HEADS) == 0)

    dims, columns = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    is_dim, is_column = dims < KEY_SIZE, columns < VALUE_SIZE
    key_dims, value_columns = key_head * KEY_SIZE + dims, head * VALUE_SIZE + columns
    in_state = head * KEY_SIZE * VALUE_SIZE + dims[:, None] * VALUE_SIZE + columns[None, :]
    is_in_state = is_dim[:, None] & is_column[None, :]
    state_size: tl.constexpr = VALUE_HEADS * KEY_SIZE * VALUE_SIZE
    source = tl.load(reads + row).to(tl.int64)
    state = tl.load(
        states + source * state_size + in_state, mask=is_in_state & (source >= 0), other=0.0
    )

    start = tl.load(positions + first)
    offset = start % EVERY
    tail = tl.arange(0, TAIL)
    is_stored = tail < offset
    since = start - offset + tail
    table = tables + tl.load(table_starts + row)
    block = tl.load(table + since // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
    place = block * BLOCK_SIZE + since % BLOCK_SIZE
    keys = tl.load(
        stored_keys + place[:, None] * (KEY_HEADS * KEY_SIZE) + key_dims[None, :],
        mask=is_stored[:, None] & is_dim[None, :],
        other=0.0,
    )
    written = tl.load(
        stored_values + place[:, None] * (VALUE_HEADS * VALUE_SIZE) + value_columns[None, :],
        mask=is_stored[:, None] & is_column[None, :],
        other=0.0,
    )
    sums = tl.load(stored_sums + place * VALUE_HEADS + head, mask=is_stored, other=0.0)
    total = tl.sum(tl.where(tail == offset - 1, sums, 0.0), 0)

    rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
    if strengths is not None:
        rate = -tl.exp(rate)
    for token in range(first, end):
        offset = (start + token - first) % EVERY
        inputs = mixed + token * mixed_stride
        query = tl.load(inputs + QUERY + key_dims, mask=is_dim, other=0.0).to(tl.float32)
        key = tl.load(inputs + KEY + key_dims, mask=is_dim, other=0.0).to(tl.float32)
        given = tl.load(inputs + VALUE + value_columns, mask=is_column, other=0.0).to(tl.float32)
        dt = _softplus(tl.load(gates + token * gate_stride + head).to(tl.float32) + bias)
        if strengths is None:
            every: tl.constexpr = tl.PropagateNan.ALL
            dt = tl.maximum(dt, smallest_dt, propagate_nan=every)
            dt = tl.minimum(dt, largest_dt, propagate_nan=every)
            value = dt * given
        else:
            query = _unit(query, LENGTH_FLOOR) * query_scale
            key = _unit(key, LENGTH_FLOOR)
            value = given
        total = tl.where(offset == 0, 0.0, total) + rate * dt
        is_here = tail == offset
        sums = tl.where(is_here, total, sums)
        keys = tl.where(is_here[:, None], key[None, :], keys)
        factors = tl.exp(tl.where(tail <= offset, total - sums, float("-inf")))
        decayed = tl.exp(total)
        if strengths is not None:
            narrow = tl.load(strengths + token * strength_stride + head)
            strength = 1.0 / (1.0 + tl.exp(-narrow.to(tl.float32)))
            found = _read(key, factors, decayed, state, keys, written)
            value = strength.to(narrow.dtype).to(tl.float32) * (value - found)
        written = tl.where(is_here[:, None], value[None, :], written)
        result = _read(query, factors, decayed, state, keys, written)
        if skip is not None:
            result += tl.load(skip + head) * given
        results = output + token * (VALUE_HEADS * VALUE_SIZE) + value_columns
        tl.store(results, result.to(output.dtype.element_ty), mask=is_column)

        target = tl.load(places + token)
        is_kept = target >= 0
        own_keys = stored_keys + target * (KEY_HEADS * KEY_SIZE) + key_dims
        tl.store(own_keys, key, mask=is_dim & stores_key & is_kept)
        own_values = stored_values + target * (VALUE_HEADS * VALUE_SIZE) + value_columns
        tl.store(own_values, value, mask=is_column & is_kept)
        tl.store(stored_sums + target * VALUE_HEADS + head, total, mask=(part == 0) & is_kept)

        if offset == EVERY - 1:
            state = decayed * state + _products(keys, factors[:, None] * written, tail, EVERY)
            border = tl.load(writes + token).to(tl.int64)
            tl.store(
                states + border * state_size + in_state, state, mask=is_in_state & (border >= 0)
            )
            keys = tl.zeros_like(keys)
            written = tl.zeros_like(written)
