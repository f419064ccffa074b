"""Attention over paged keys and values in torch: gather, then two batched products.

Scores, softmax and sums are float32 whatever the storage holds.
"""

import dataclasses

import torch

from loraplex.kernels.attention_tiles import TileGroup, TokenWindow, tile_groups
from loraplex.kernels.ops import AttentionRules, RowLayout, Storage, from_stored


@dataclasses.dataclass(frozen=True, slots=True)
class _GroupIndices:
    """I tiles of n queries (padded by repeating the last) and L keys, as device tensors."""

    query_tokens: torch.Tensor  # [I, n] int64: rows of the batch
    block_ids: torch.Tensor  # [I, L / block_size] int64
    hidden: torch.Tensor  # [I, n, L] bool: keys that a query does not see
    unread: torch.Tensor  # [I, L] bool: keys that no query of the tile sees
    distances: torch.Tensor  # [I, n, L] float32: key position - query position
    real: torch.Tensor  # [num_real] int64: the queries that are no padding, in [I * n]
    output_tokens: torch.Tensor  # [num_real] int64: their rows of the batch


@dataclasses.dataclass(frozen=True, slots=True)
class TilePlan:
    groups: tuple[_GroupIndices, ...]
    rules: AttentionRules


def plan_tiles(
    rows: RowLayout, block_size: int, rules: AttentionRules, query_multiple: int
) -> TilePlan:
    """The indices of a step; they hold for every layer with these rules."""
    window = TokenWindow(rules.window, rules.num_sink_tokens, rules.is_causal)
    groups = tile_groups(
        rows.query_start_loc,
        rows.seq_lens,
        block_size=block_size,
        window=window,
        query_multiple=query_multiple,
    )
    return TilePlan(
        tuple(_indices(group, rows.block_tables, block_size, window) for group in groups), rules
    )


def attend(
    query: torch.Tensor,
    storage: Storage,
    plan: TilePlan,
    sink_logits: torch.Tensor | None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H, V]; storage [num_blocks, K, block_size, stored_size].

    V: size of the values, D but where these are the first part of the keys.
    """
    keys, values = storage.tensors
    narrower = keys.shape[-1] - values.shape[-1]
    output = query.new_empty((*query.shape[:2], query.shape[2] - narrower))
    for group in plan.groups:
        attended = _attend_group(query, storage, group, plan.rules, sink_logits, position_bias)
        output[group.output_tokens] = attended[group.real].to(output.dtype)
    return output


def _attend_group(
    query: torch.Tensor,
    storage: Storage,
    group: _GroupIndices,
    rules: AttentionRules,
    sink_logits: torch.Tensor | None,
    position_bias: torch.Tensor | None,
) -> torch.Tensor:
    """[I * n, H, D] float32."""
    num_tiles, num_queries = group.query_tokens.shape
    num_heads, head_dim = query.shape[1:]
    key, value = storage.tensors
    num_kv_heads = key.shape[1]
    grouped = (num_tiles, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = query[group.query_tokens].float().view(grouped).transpose(1, 2)
    queries = queries.reshape(num_tiles * num_kv_heads, -1, head_dim)
    keys = _gather(key, group.block_ids)
    values = _gather(value, group.block_ids)
    # A block's old content may be NaN, and 0 * NaN would spread it.
    values.masked_fill_(group.unread[:, None, :, None], 0.0)
    scores = _products(queries, keys.flatten(0, 1).transpose(1, 2)) * rules.scale
    if rules.soft_cap is not None:
        # float64: a tanh's bits differ with its place in a chunk.
        scores = (rules.soft_cap * torch.tanh(scores.double() / rules.soft_cap)).float()
    by_query = scores.view(num_tiles, num_kv_heads, num_queries, -1, scores.shape[-1])
    if rules.alibi_slopes:
        slopes = torch.tensor(rules.alibi_slopes, device=query.device).view(num_kv_heads, 1, -1, 1)
        by_query += slopes * group.distances[:, None, :, None, :]
    if position_bias is not None:
        by_query += _bias_by_query(position_bias, group.distances, num_kv_heads)
    by_query.masked_fill_(group.hidden[:, None, :, None, :], -torch.inf)
    if sink_logits is not None:
        sinks = sink_logits.view(num_kv_heads, 1, -1, 1).expand(*by_query.shape[:-1], 1)
        scores = torch.cat((by_query, sinks), dim=-1).view(*scores.shape[:-1], -1)
    probabilities = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    summed = _products(probabilities, values.flatten(0, 1))
    by_head = summed.view(num_tiles, num_kv_heads, num_queries, -1, summed.shape[-1])
    return by_head.transpose(1, 2).reshape(num_tiles * num_queries, num_heads, -1)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, n, k] and [B, k, m] -> [B, n, m]: a matrix has the same bits alone and in company.

    On some processors MKL cuts long sums of a single matrix for its threads, never of several.
    """
    if len(a) > 1 or a.device.type != "cpu":
        return torch.bmm(a, b)
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]


def _bias_by_query(
    position_bias: torch.Tensor, distances: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """position_bias [H, 2 C + 1], distances [I, n, L] -> [I, K, n, H / K, L]."""
    most = position_bias.shape[1] // 2
    by_head = position_bias[:, distances.long().clamp(-most, most) + most]
    return by_head.view(num_kv_heads, -1, *distances.shape).permute(2, 0, 3, 1, 4)


def _gather(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Stored vectors by block_ids [I, B] -> [I, K, B * block_size, D] float32."""
    num_kv_heads, stored_size = blocks.shape[1], blocks.shape[3]
    heads = torch.arange(num_kv_heads, device=blocks.device)
    pieces = block_ids.unsqueeze(1) * num_kv_heads + heads.unsqueeze(1)
    gathered = blocks.flatten(0, 1)[pieces.flatten()]
    return from_stored(gathered.view(len(block_ids), num_kv_heads, -1, stored_size))


def _indices(
    group: TileGroup, block_tables: torch.Tensor, block_size: int, window: TokenWindow
) -> _GroupIndices:
    device, shape, tiles = block_tables.device, group.shape, group.tiles
    offsets = torch.arange(shape.num_queries)
    num_queries = _column([tile.num_queries for tile in tiles])
    within = torch.minimum(offsets, num_queries - 1)
    query_tokens = _column([tile.first_token for tile in tiles]) + within
    positions = _column([tile.first_position for tile in tiles]) + within
    columns = torch.arange(shape.first_block, shape.first_block + shape.num_blocks)
    columns = torch.cat((torch.arange(shape.num_sink_blocks), columns))
    keys = (columns.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
    num_keys = _column([tile.seq_len for tile in tiles])
    columns = torch.minimum(columns, (num_keys - 1) // block_size)
    table_rows = _column([tile.row for tile in tiles])
    hidden = keys > positions.unsqueeze(-1)
    if not window.is_causal:
        hidden = (keys >= num_keys.unsqueeze(-1)).expand(*positions.shape, -1)
    if window.num_tokens is not None:
        is_behind = keys <= positions.unsqueeze(-1) - window.num_tokens
        hidden = hidden | (is_behind & (keys >= window.num_sink_tokens))
        if not window.is_causal:
            hidden |= keys >= positions.unsqueeze(-1) + window.num_tokens
    real = (offsets < num_queries).flatten().nonzero().squeeze(1)
    return _GroupIndices(
        query_tokens=query_tokens.to(device),
        block_ids=block_tables[table_rows.to(device), columns.to(device)],
        hidden=hidden.to(device),
        unread=hidden.all(1).to(device),
        distances=(keys - positions.unsqueeze(-1)).float().to(device),
        real=real.to(device),
        output_tokens=query_tokens.flatten()[real].to(device),
    )


def _column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).unsqueeze(1)
