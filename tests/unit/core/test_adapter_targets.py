"""Targets of neighbouring experts as one."""

import msgspec
import pytest

from loraplex.core.adapter import (
    AdapterSource,
    LoraTarget,
    TargetPart,
    each_expert,
    join_experts,
)


def up(expert: int, layer: int = 0, rank: int = 4, num_experts: int = 1) -> LoraTarget:
    return LoraTarget(layer, "experts.up_proj", rank, 8, 6, expert=expert, num_experts=num_experts)


def test_neighbours_are_joined() -> None:
    targets = [up(0), up(1), up(2), up(5), up(6), up(0, layer=1)]
    assert list(join_experts(targets)) == [
        up(0, num_experts=3),
        up(5, num_experts=2),
        up(0, layer=1),
    ]


@pytest.mark.parametrize(
    "other",
    [
        up(1, rank=5),
        up(1, layer=1),
        up(2),
        up(0),
        LoraTarget(0, "experts.down_proj", 4, 8, 6, expert=1),
        LoraTarget(0, "experts.up_proj", 4, 8, 6, TargetPart.SHIFT, 0, 1),
    ],
)
def test_targets_of_other_forms_stay_apart(other: LoraTarget) -> None:
    assert list(join_experts([up(0), other])) == [up(0), other]


def test_each_expert_comes_back() -> None:
    plain = LoraTarget(0, "q_proj", 4, 8, 8, first=8)
    targets = [plain, *(up(expert) for expert in range(128))]
    joined = list(join_experts(targets))
    assert joined == [plain, up(0, num_experts=128)]
    assert list(each_expert(joined)) == targets


def test_an_adapter_of_many_experts_is_a_short_message() -> None:
    """Each of thousands of adapters has one, in serving and in the engine."""
    targets = [
        LoraTarget(layer, module, 4, 8, 8, expert=expert)
        for layer in range(48)
        for module in ("experts.down_proj", "experts.gate_proj", "experts.up_proj")
        for expert in range(128)
    ]
    source = AdapterSource("d", "p", 1, tuple(join_experts(targets)))
    assert len(msgspec.msgpack.encode(source)) < 20_000
    assert list(each_expert(source.targets)) == targets
