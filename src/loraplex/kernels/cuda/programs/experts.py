"""Choice of experts, the order of their rows, and the sum of what they give.

A pair is one of the k experts of one token: pair t * k + j is token t's j-th (kernels.routing).
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)
"""Lower bound of scores that are compared: what is out of the choice is -inf."""


@triton.jit
def _comparable(scores):
    """The scores with LEAST instead of NaN and of what is smaller."""
    return tl.where(scores > LEAST, scores, LEAST)


@triton.jit
def _without_other_groups(
    scores,
    is_left,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Scores, LEAST for experts outside the groups with the largest sums of their best scores."""
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    experts, groups = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_G)
    sums = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        members = tl.where(is_left & (experts // GROUP_SIZE == group), scores, float("-inf"))
        total, best = tl.max(members, 0, return_indices=True)
        if NUM_BEST == 2 and GROUP_SIZE > 1:
            total += tl.max(tl.where(experts == best, float("-inf"), members), 0)
        sums = tl.where(groups == group, _comparable(total), sums)
    is_in = tl.zeros((BLOCK_E,), tl.int32)
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        chosen = tl.argmax(sums, 0)
        sums = tl.where(groups == chosen, float("-inf"), sums)
        is_in |= (experts // GROUP_SIZE == chosen).to(tl.int32)
    return tl.where(is_in > 0, scores, LEAST)


@triton.jit
def _shares(row, MODE: tl.constexpr):
    """What the weights of experts are taken from, by their logits."""
    if MODE == "softmax":
        powers = tl.exp(row - tl.max(row, 0))
        shares = powers / tl.sum(powers, 0)
    elif MODE == "sigmoid":
        shares = 1.0 / (1.0 + tl.exp(-row))
    else:
        shares = row
    return shares


@triton.jit
def _weight_of(expert, largest, row, shares, numbers, is_left, jitter, MODE: tl.constexpr):
    """Weight of an expert whose score is the largest of those that are left."""
    if MODE == "sparse_mixer":
        distance = (largest - row) / tl.maximum(tl.abs(row), largest)
        # Not "<=": of equal logits of 0 the distance is NaN, and they are near.
        is_near = is_left & ~(distance > 2.0 * jitter)
        weight = 1.0 / tl.sum(tl.where(is_near, tl.exp(row - largest), 0.0), 0)
    else:
        weight = tl.sum(tl.where(numbers == expert, shares, 0.0), 0)
    return weight


@triton.jit
def choose_experts(
    experts,  # [T, NUM_CHOSEN] int32
    weights,  # [T, NUM_CHOSEN] float32
    logits,  # [T, NUM_EXPERTS]
    selection_bias,  # [NUM_EXPERTS] float32, or None
    expert_factors,  # of the weights [NUM_EXPERTS] float32, or None
    row_stride,
    factor,
    jitter,
    floor,  # addend of the sum that weights are divided by
    MODE: tl.constexpr,  # a RoutingMode by value
    NORMALIZES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One program: one token.

    Without a bias logits are ranked, whose order a softmax keeps: its sums could make two equal.
    """
    token = tl.program_id(0).to(tl.int64)
    numbers, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_left = numbers < NUM_EXPERTS
    row = tl.load(logits + token * row_stride + numbers, mask=is_left, other=float("-inf"))
    row = row.to(tl.float32)
    shares = _shares(row, MODE)
    if selection_bias is not None:
        scores = shares + tl.load(selection_bias + numbers, mask=is_left, other=0.0)
    else:
        scores = shares if MODE == "sigmoid" else row
    scores = _comparable(scores)
    if NUM_GROUPS > 1:
        scores = _without_other_groups(
            *(scores, is_left, NUM_EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS),
            *(2 if MODE == "sigmoid" else 1, BLOCK_E, BLOCK_G),
        )
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    given = tl.zeros((BLOCK_K,), tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        largest, expert = tl.max(tl.where(is_left, scores, float("-inf")), 0, return_indices=True)
        weight = _weight_of(expert, largest, row, shares, numbers, is_left, jitter, MODE)
        chosen = tl.where(places == place, expert, chosen)
        given = tl.where(places == place, weight, given)
        is_left = is_left & (numbers != expert)
    is_place = places < NUM_CHOSEN
    if MODE == "chosen_softmax":
        given = tl.where(is_place, given, float("-inf"))
        given = tl.exp(given - tl.max(given, 0))
        given /= tl.sum(given, 0)
    if NORMALIZES:
        given /= tl.sum(given, 0) + floor
    has_nan = tl.max((row != row).to(tl.int32), 0) > 0
    given = tl.where(has_nan, float("nan"), given * factor)
    if expert_factors is not None:
        given *= tl.load(expert_factors + chosen)
    tl.store(experts + token * NUM_CHOSEN + places, chosen, mask=is_place)
    tl.store(weights + token * NUM_CHOSEN + places, given, mask=is_place)


@triton.jit
def sort_pairs(pairs, starts, experts, num_pairs, BLOCK: tl.constexpr):
    """One program: the pairs of one expert, ascending; the last program has no expert.

    Each program counts the pairs of the experts before, so the order depends on nothing but the
    experts: there are no atomics.
    """
    expert = tl.program_id(0)
    indices = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        is_pair = first + indices < num_pairs
        chosen = tl.load(experts + first + indices, mask=is_pair, other=expert)
        before += (chosen < expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts + expert, start)
    if expert == tl.num_programs(0) - 1:
        return
    for first in range(0, num_pairs, BLOCK):
        is_pair = first + indices < num_pairs
        chosen = tl.load(experts + first + indices, mask=is_pair, other=-1)
        is_own = (chosen == expert).to(tl.int32)
        places = pairs + start + tl.cumsum(is_own, 0) - 1
        tl.store(places, first + indices, mask=is_own > 0)
        start += tl.sum(is_own, 0)


@triton.jit
def combine_experts(
    output,  # [T, SIZE]
    y,  # [T * NUM_CHOSEN, SIZE]
    weights,  # [T, NUM_CHOSEN] float32
    shared,  # [T, SIZE], or None
    shared_gate,  # [T, 1], or None
    shared_stride,
    gate_stride,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output = sum of a token's rows by their weights + sigmoid(gate) * shared. Grid: (T, parts).

    In float32, one addend after another, rounded once.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    rows = y + token * NUM_CHOSEN * SIZE + columns
    weights += token * NUM_CHOSEN
    total = tl.load(weights) * tl.load(rows, mask=inside).to(tl.float32)
    for choice in tl.static_range(1, NUM_CHOSEN):
        row = tl.load(rows + choice * SIZE, mask=inside).to(tl.float32)
        total += tl.load(weights + choice) * row
    if shared is not None:
        row = tl.load(shared + token * shared_stride + columns, mask=inside).to(tl.float32)
        if shared_gate is not None:
            gate = tl.load(shared_gate + token * gate_stride).to(tl.float32)
            row *= 1.0 / (1.0 + tl.exp(-gate))
        total += row
    tl.store(output + token * SIZE + columns, total.to(output.dtype.element_ty), mask=inside)
