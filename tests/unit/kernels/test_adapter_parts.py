"""Adapters' changes in addition to LoRA: formulas, and the same bits alone and in company."""

import dataclasses

import pytest
import torch

from loraplex.core.adapter import SCORE
from loraplex.kernels.adapter_parts import (
    EMBEDDING,
    LM_HEAD,
    AdapterParts,
    EmbeddingLora,
    OutputVector,
    PartsUse,
    TokenRows,
    WeightRows,
    add_vectors,
    embed,
    of_rows,
    replace_logits,
    scores,
)

VOCAB, HIDDEN, TOKENS = 37, 24, 21


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces(matrix: torch.Tensor, block: int) -> tuple[WeightRows, ...]:
    return tuple(WeightRows(i, matrix[i : i + block]) for i in range(0, len(matrix), block))


def use(parts: AdapterParts, indices: list[int], scale: float = 1.0) -> PartsUse:
    return PartsUse(parts, torch.tensor(indices), torch.full((len(indices),), scale))


PARTS = AdapterParts(
    vectors={(0, "q_proj"): [OutputVector(2, random(5, seed=1), random(5, seed=2))]},
    weights={EMBEDDING: pieces(random(VOCAB, HIDDEN, seed=3), 10),
             LM_HEAD: pieces(random(VOCAB, HIDDEN, seed=4), 10)},
    embedding_lora=EmbeddingLora(
        pieces(random(VOCAB, 3, seed=5), 10), random(3, HIDDEN, seed=6), 0.5
    ),
)  # fmt: skip


def test_a_factor_and_a_shift_are_of_the_base_s_output():
    y = random(4, 12)
    before = y.clone()
    both = [use(PARTS, [1, 3], 0.5), use(PARTS, [3])]
    add_vectors(y, both, 0, ("k_proj", "q_proj"), (0, 4))
    factor, shift = random(5, seed=1), random(5, seed=2)
    share = before[:, 6:11] * factor + shift
    expected = before.clone()
    expected[1, 6:11] += 0.5 * share[1]
    expected[3, 6:11] += 1.5 * share[3]
    torch.testing.assert_close(y, expected)
    assert torch.equal(y[[0, 2]], before[[0, 2]])


def test_whole_copies_take_the_base_s_place_exactly():
    ids = torch.tensor([0, 9, 10, 36])
    x = random(4, HIDDEN, seed=9)
    parts = AdapterParts(weights=PARTS.weights)
    embed(x, ids, [use(parts, [0, 1, 2, 3])])
    assert torch.equal(x, random(VOCAB, HIDDEN, seed=3)[ids])
    logits = torch.zeros(4, VOCAB)
    replace_logits(logits, x, [use(parts, [0, 2])])
    expected = x @ random(VOCAB, HIDDEN, seed=4).t()
    torch.testing.assert_close(logits[[0, 2]], expected[[0, 2]])
    assert not logits[[1, 3]].any()


def test_single_tokens_in_both_places():
    tokens = TokenRows(torch.tensor([2, 30]), random(2, HIDDEN, seed=7))
    parts = AdapterParts(tokens={EMBEDDING: tokens, LM_HEAD: tokens})
    base = random(4, HIDDEN, seed=9)
    x = base.clone()
    embed(x, torch.tensor([2, 3, 30, 36]), [use(parts, [0, 1, 2, 3])])
    assert torch.equal(x[[0, 2]], tokens.rows)
    assert torch.equal(x[[1, 3]], base[[1, 3]])
    logits = torch.zeros(4, VOCAB)
    replace_logits(logits, base, [use(parts, [1])])
    torch.testing.assert_close(logits[1, [2, 30]], tokens.rows @ base[1])
    assert logits.count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_alone_and_in_company(dtype):
    ids = torch.arange(TOKENS)
    x, y, logits = (random(TOKENS, size).to(dtype) for size in (HIDDEN, 12, VOCAB))
    together = [x.clone(), y.clone(), logits.clone()]
    everyone = [use(PARTS, list(range(TOKENS)), 0.75)]
    embed(together[0], ids, everyone)
    add_vectors(together[1], everyone, 0, ("q_proj",), (0,))
    replace_logits(together[2], x, everyone)
    for token in range(TOKENS):
        alone = [part[token : token + 1].clone() for part in (x, y, logits)]
        one = [use(PARTS, [0], 0.75)]
        embed(alone[0], ids[token : token + 1], one)
        add_vectors(alone[1], one, 0, ("q_proj",), (0,))
        replace_logits(alone[2], x[token : token + 1], one)
        for single, shared in zip(alone, together, strict=True):
            assert torch.equal(single[0], shared[token])


def test_the_uses_among_chosen_rows():
    places = torch.full((6,), -1)
    places[torch.tensor([5, 2])] = torch.tensor([0, 1])
    (kept,) = of_rows([use(PARTS, [2, 3, 5]), use(PARTS, [0, 1])], places)
    assert kept.token_indices.tolist() == [1, 0]


def test_no_value_is_read_on_the_host():
    """Meta tensors have no values: what a device computes, the host does not wait for."""
    tokens = TokenRows(torch.arange(3), random(3, HIDDEN))
    parts = dataclasses.replace(PARTS, tokens={EMBEDDING: tokens, LM_HEAD: tokens})
    with torch.device("meta"):
        y, x = torch.empty(TOKENS, VOCAB), torch.empty(TOKENS, HIDDEN)
        ids, rows = torch.empty(TOKENS, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
        applied = PartsUse(_on_meta(parts), rows, torch.empty(2))
    add_vectors(y, [applied], 0, ("q_proj",), (4,))
    embed(x, ids, [applied])
    replace_logits(y, x, [applied])


def _on_meta(value):
    """Copy nested parts to the meta device."""
    match value:
        case torch.Tensor():
            return value.to("meta")
        case AdapterParts():
            names = [field.name for field in dataclasses.fields(value)]
            return AdapterParts(**{name: _on_meta(getattr(value, name)) for name in names})
        case dict():
            return {key: _on_meta(item) for key, item in value.items()}
        case list():
            return [_on_meta(item) for item in value]
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(_on_meta, value))
        case tuple():
            return tuple(map(_on_meta, value))
    return value


def test_scores_of_several_heads():
    torch.default_generator.manual_seed(2)
    x, base = torch.randn(4, 8), torch.randn(4, 3)
    three, five = torch.randn(3, 8), torch.randn(5, 8)
    uses = [
        PartsUse(
            AdapterParts(weights={SCORE: (WeightRows(0, three),)}),
            torch.tensor([0, 2]),
            torch.tensor([1.0, 0.25]),
        ),
        PartsUse(
            AdapterParts(weights={SCORE: (WeightRows(0, five[:2]), WeightRows(2, five[2:]))}),
            torch.tensor([3]),
            torch.tensor([0.25]),
        ),
        PartsUse(AdapterParts(has_head_lora=True), torch.tensor([1]), torch.tensor([1.0])),
    ]
    expected = [x[0] @ three.t(), base[1], base[2] + 0.25 * (x[2] @ three.t() - base[2])]
    expected.append(x[3] @ five.t())  # of another number of labels there is no share
    for found, wanted in zip(scores(base, x, uses), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.equal(scores(base, x, uses[:1])[0], scores(base[:, :0], x, uses[:1])[0])
    assert [len(found) for found in scores(base[:, :0], x, uses)] == [3, 0, 3, 5]
    assert not uses[0].parts.changes_ends, "a head changes no step that generates"
