"""Parts of an adapter other than LoRA, in the pool: storage, and the kernels' arguments."""

from typing import Any

import pytest
import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, LoraTarget, TargetPart
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart
from loraplex.execution.adapters.layout import write_piece
from loraplex.execution.adapters.resident_parts import PartsViews
from loraplex.kernels.adapter_parts import AdapterParts

BIAS = torch.tensor([1.0, -2.0, 3.0, 4.0])
KEY = (1, "q_proj")


class Base:
    """A base whose one linear layer has a bias."""

    def bias(self, layer: int, module: str) -> torch.Tensor:
        assert (layer, module) == KEY
        return BIAS.double()


def written(*parts: HostPart, ties=False, factors: Any = None, **result) -> AdapterParts:
    adapter = HostAdapter("digest", (), parts, factors or {})
    views = PartsViews(ties_embeddings=ties)
    for part in parts:
        place = torch.zeros(part.target.num_elements)
        write_piece(adapter, Base(), part, place)  # type: ignore[arg-type]
        views.add(part, place)
    return views.result(**{"has_head_lora": False} | result)


def vector(part: TargetPart, values: list[float], first=0, num_vectors=1, **fields) -> HostPart:
    target = LoraTarget(*KEY, num_vectors, 0, len(values), part, first)
    return HostPart(target, torch.tensor(values), **fields)


def rows(module: str, part: TargetPart, values: torch.Tensor, first=0, **fields) -> HostPart:
    target = LoraTarget(OUTSIDE_LAYERS, module, len(values), 0, values.shape[1], part, first)
    return HostPart(target, values, **fields)


def test_a_bias_is_stored_as_what_it_differs_from_the_base_s():
    parts = written(vector(TargetPart.BIAS, [5.0, 7.0], first=2))
    ((vector_of,),) = parts.vectors.values()
    assert (vector_of.first, vector_of.factor) == (2, None)
    assert vector_of.shift.tolist() == [2.0, 3.0]


def test_a_shift_is_scaled():
    parts = written(vector(TargetPart.SHIFT, [5.0, 7.0, 0.0, 1.0], scale=0.5))
    assert parts.vectors[KEY][0].shift.tolist() == [2.5, 3.5, 0.0, 0.5]


@pytest.mark.parametrize("num_vectors", [1, 2])
def test_a_factor_is_stored_less_one_and_takes_its_share_of_a_bias_back(num_vectors):
    factor = torch.tensor([1.5, 0.5, 2.0, 1.0])
    given = vector(TargetPart.FACTOR, [9.0, 9.0], first=1, num_vectors=num_vectors)
    (found,) = written(given, factors={KEY: factor.double()}).vectors[KEY]
    assert found.first == 1
    assert found.factor.tolist() == [-0.5, 1.0]
    if num_vectors == 1:
        assert found.shift is None
    else:
        y = torch.tensor([7.0, 8.0])
        expected = BIAS[1:3] + factor[1:3] * (y - BIAS[1:3])
        assert torch.equal(y + found.factor * y + found.shift, expected)


def test_copies_are_put_in_order():
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0)
    parts = written(
        rows("lm_head", TargetPart.ROWS, second, first=2), rows("lm_head", TargetPart.ROWS, first)
    )
    pieces = parts.weights["lm_head"]
    assert [piece.first for piece in pieces] == [0, 2]
    assert torch.equal(torch.cat([piece.rows for piece in pieces]), torch.cat([first, second]))


@pytest.mark.parametrize("is_base", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_tied_parameter_changes_in_both_places_a_trained_copy_in_one(module, ties, is_base):
    parts = written(rows(module, TargetPart.ROWS, torch.ones(2, 3), is_base=is_base), ties=ties)
    both = {"lm_head", "embed_tokens"}
    assert set(parts.weights) == (both if ties and is_base else {module})


@pytest.mark.parametrize(("ties", "places"), [(False, 1), (True, 2)])
def test_tokens_are_sorted_and_those_of_a_tied_embedding_are_the_head_s(ties, places):
    values = torch.arange(6.0).view(3, 2)
    pieces = [
        rows("embed_tokens", TargetPart.TOKENS, values[:2], indices=torch.tensor([9, 4])),
        rows("embed_tokens", TargetPart.TOKENS, values[2:], first=2, indices=torch.tensor([6])),
    ]
    tokens = written(*pieces, ties=ties).tokens
    assert len(tokens) == places
    for found in tokens.values():
        assert found.token_ids.tolist() == [4, 6, 9]
        assert torch.equal(found.rows, values[[1, 2, 0]])


def test_tokens_of_a_head_do_not_become_the_embedding_s():
    head = rows("lm_head", TargetPart.TOKENS, torch.ones(1, 2), indices=torch.tensor([3]))
    assert set(written(head, ties=True).tokens) == {"lm_head"}


def test_lora_of_the_embedding():
    a = rows("embed_tokens", TargetPart.EMBEDDING_A, torch.ones(4, 2), scale=0.5)
    more = rows("embed_tokens", TargetPart.EMBEDDING_A, torch.zeros(1, 2), first=4, scale=0.5)
    b = rows("embed_tokens", TargetPart.EMBEDDING_B, torch.full((2, 3), 7.0))
    parts = written(more, b, a, has_head_lora=True)
    assert parts.has_head_lora
    lora = parts.embedding_lora
    assert lora is not None
    assert ([piece.first for piece in lora.a], lora.scale) == ([0, 4], 0.5)
    assert torch.equal(lora.b, b.values)
    empty = written()
    assert (empty.vectors, empty.weights, empty.tokens) == ({}, {}, {})
    assert (empty.embedding_lora, empty.has_head_lora) == (None, False)
