"""Output vectors of adapters, such as DoRA's factors, as kernels.adapter_parts places them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from loraplex.kernels.adapter_parts import FACTOR, FLAGS, MAX_VECTORS, SHIFT
from loraplex.kernels.cuda.programs.modules import module_of_tile, pick

_FACTOR = tl.constexpr(FACTOR)
_SHIFT = tl.constexpr(SHIFT)
_FLAGS = tl.constexpr(FLAGS)
_MAX_VECTORS = tl.constexpr(MAX_VECTORS)


class Users(NamedTuple):
    """The adapter of each token in one wave."""

    entries: Any
    """Table entries; -1: none."""
    scales: Any


@triton.jit
def with_vectors(
    changed,  # outputs of one row with the vectors of earlier adapters, float32
    base,  # the base's own, float32
    pool,
    vectors,
    cell,
    scale,  # of the request
    outputs,
    out_features,
    DTYPE: tl.constexpr,  # of the outputs: they are rounded after each vector
    UNIT: tl.constexpr,
):
    """Outputs of one row, with the vectors of one adapter for one module."""
    words = vectors + cell * _MAX_VECTORS
    word = tl.load(words)
    if word > 0:
        is_output = outputs < out_features
        for number in tl.static_range(_MAX_VECTORS):
            word = tl.load(words + number)
            if word > 0:
                flags = word % _FLAGS
                vector = pool + (word // _FLAGS).to(tl.int64) * UNIT
                has_factor, has_shift = flags >= _FACTOR, flags % _FACTOR == _SHIFT
                factor = tl.load(vector + outputs, mask=is_output & has_factor, other=0.0)
                share = base * factor.to(tl.float32)
                shift = vector + tl.where(has_factor, out_features, 0) + outputs
                share += tl.load(shift, mask=is_output & has_shift, other=0.0).to(tl.float32)
                changed = (changed + share * scale).to(DTYPE).to(tl.float32)
    return changed


@triton.jit(do_not_specialize=["num_tokens", "num_pieces"])
def spread_users(users, pieces, num_tokens, num_pieces, BLOCK_T: tl.constexpr):
    """Write each piece's adapter to its tokens: users [waves, num_tokens]. One program: a piece."""
    piece = tl.program_id(0)
    first_user = (piece // num_pieces).to(tl.int64) * num_tokens
    entry = tl.load(pieces.entries + piece)
    start = tl.load(pieces.starts + piece)
    slots = start + tl.arange(0, BLOCK_T)
    is_token = slots < start + tl.load(pieces.counts + piece)
    tokens = first_user + tl.load(pieces.token_indices + slots, mask=is_token, other=0)
    scales = tl.load(pieces.token_scales + slots, mask=is_token, other=0.0)
    tl.store(users.entries + tokens, tl.full((BLOCK_T,), 0, tl.int32) + entry, mask=is_token)
    tl.store(users.scales + tokens, scales, mask=is_token)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "num_waves", "num_tokens"])
def add_vectors(
    y,  # [T, any]
    pool,
    vectors,
    users,  # [num_waves, T]
    stride_y,
    cells_of_entry,
    first_cell,
    num_waves,
    num_tokens,
    COLUMNS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    UNIT: tl.constexpr,  # elements in which `vectors` counts
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N outputs of one module, one token. Every share is of the base's own."""
    program = tl.program_id(0)
    token = program // NUM_TILES
    module, tile = module_of_tile(program % NUM_TILES, OUT_FEATURES, BLOCK_N)
    out_features = pick(module, OUT_FEATURES)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    places = y + token.to(tl.int64) * stride_y + pick(module, OUT_OFFSETS) + outputs
    base = tl.load(places, mask=outputs < out_features, other=0.0).to(tl.float32)
    changed = base
    for wave in range(num_waves):
        user = wave * num_tokens + token
        entry = tl.load(users.entries + user)
        if entry >= 0:
            cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
            scale = tl.load(users.scales + user)
            changed = with_vectors(
                *(changed, base, pool, vectors, cell, scale, outputs, out_features),
                *(y.dtype.element_ty, UNIT),
            )
    tl.store(places, changed.to(y.dtype.element_ty), mask=outputs < out_features)
