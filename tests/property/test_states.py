"""States of sequences under random schedules, and planted bugs that the schedules must find."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from loraplex.core.plan import NO_BLOCK, CacheGroupCapacity, RowStep
from loraplex.execution.steps import tensors
from loraplex.execution.steps.input_batch import InputBatch, NewBlocks
from loraplex.memory.cache_policy import _StatesPolicy
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling import beam_scheduling
from support.fake_runner import FakeRow
from support.state_schedules import Schedule, StateRunner

NUM_STEPS = 150
"""Steps of a schedule, until no more requests come."""


def run(seeds: range, beam_share: float = 0.15) -> Counter[str]:
    tally: Counter[str] = Counter()
    for seed in seeds:
        tally.update(dataclasses.asdict(Schedule(seed, beam_share).run(NUM_STEPS)))
    return tally


def check_variety(tally: Counter[str]) -> None:
    assert min(tally.values()) > 0, f"not all that the schedules are for has happened: {tally}"


def test_outputs_are_those_of_requests_alone() -> None:
    tally = run(range(9))
    assert tally["steps"] > 2_000
    check_variety(tally)


@pytest.mark.soak
def test_outputs_in_long_schedules() -> None:
    tally = run(range(1_000, 1_450))
    assert tally["steps"] > 100_000
    check_variety(tally)


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep one state of a row, which each step advances."""

    def only_block(row: FakeRow, group: int) -> int:
        return next(block_id for block_id in row.block_tables[group] if block_id != NO_BLOCK)

    def store(
        self: StateRunner, row: FakeRow, group: int, _position: int, _place: int, state: bytes
    ) -> None:
        self._kv[group][only_block(row, group)][0] = state

    monkeypatch.setattr(
        StateRunner, "_state_block", lambda _self, row, group, _index: only_block(row, group)
    )
    monkeypatch.setattr(StateRunner, "_store", store)


def write_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any block for a gap, as groups of positions do, which write to none of them."""
    extend = InputBatch._extend_block_tables

    def without_gaps(self: InputBatch, steps: Sequence[RowStep]) -> list[NewBlocks]:
        extended = extend(self, steps)
        for group in self._states:
            tables = self._block_tables[group]
            tables[tables == NO_BLOCK] = 0
        return extended

    monkeypatch.setattr(InputBatch, "_extend_block_tables", without_gaps)


def write_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad numbers with the one that would be a block."""
    padded = tensors._padded
    monkeypatch.setattr(tensors, "_padded", lambda values, num, _fill: padded(values, num, 0))


def hit_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin where the prefix cache has blocks of positions, whether it has a state or not."""
    monkeypatch.setattr(_StatesPolicy, "serves", lambda _self, _table, num_blocks: num_blocks)


def keep_a_draft_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a state once, though draft tokens before it were rejected."""
    store = StateRunner._store
    written: dict[tuple[int, int], FakeRow] = {}

    def store_once(
        self: StateRunner, row: FakeRow, group: int, position: int, place: int, state: bytes
    ) -> None:
        key = id(row), position
        if key not in written:
            written[key] = row  # kept, so that no other row has its id
            store(self, row, group, position, place, state)

    monkeypatch.setattr(StateRunner, "_store", store_once)


def share_between_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let preempted beams read states that others of them still compute."""
    longest_shared, one_group = beam_scheduling._longest_shared, CacheGroupCapacity(num_blocks=1)

    def shared(texts: list[list[int]], kv: KVBlocks) -> list[tuple[int, int]]:
        return longest_shared(texts, KVBlocks(kv.block_size, (one_group,)))

    monkeypatch.setattr(beam_scheduling, "_longest_shared", shared)


@pytest.mark.parametrize(
    ("plant", "found", "beam_share"),
    [
        (write_in_place, "does not hold state", 0.15),
        (write_a_gap, "does not hold state", 0.15),
        (write_padding, "does not hold state", 0.15),
        (hit_without_a_state, "has no state to go on from", 0.15),
        (keep_a_draft_state, "does not hold state", 0.15),
        (share_between_beams, "state", 0.6),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: str,
    beam_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run(range(100), beam_share)
