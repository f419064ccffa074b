"""Two phases give what one gives, also with steps in flight."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.core.errors import ErrorInfo
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.plan import RowAdded, RowResult, RowStep, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.pending_samples import PendingSample, TokenFeed
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.accelerator import HostAccelerator
from support.delayed_accelerator import DelayedAccelerator

VOCAB, CPU = 60, torch.device("cpu")
BLIND = {
    0: SamplingParams(temperature=0.0),
    1: SamplingParams(temperature=1.0),
    2: SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
    3: SamplingParams(temperature=2.0, min_p=0.05),
    4: SamplingParams(temperature=0.0, top_p_decay=0.5),
}
KNOWING = {
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "decay": SamplingParams(temperature=1.0, top_p=0.9, top_p_decay=0.5),
    "bias": SamplingParams(temperature=1.0, logit_bias=((3, 5.0),)),
    "min tokens": SamplingParams(temperature=1.0, min_tokens=5),
}


class Pair:
    """One sampler that does all at once, and one in two phases."""

    def __init__(
        self, samplings: dict[int, SamplingParams], masks: "type[Masks] | None" = None
    ) -> None:
        self.accelerator = DelayedAccelerator(seed=2)
        self.masks = [] if masks is None else [masks(), masks()]
        self.plain, self.phased = (
            Sampler(VOCAB, device=CPU, grammars=grammars) for grammars in self.masks or [None] * 2
        )
        self.feed = TokenFeed(self.accelerator, 8)
        for slot, sampling in samplings.items():
            row = RowAdded(
                slot,
                slot,
                Generate(sampling, seed=7 * slot),
                0,
                (1, 2, 3),
                3,
            )
            self.plain.add_row(row)
            self.phased.add_row(row)

    def launch(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> PendingSample:
        return self.phased.launch(logits.clone(), steps, self.feed)

    def expected(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        return self.plain.sample(logits.clone(), steps)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(BLIND)
    with pair.accelerator.compute():
        yield pair


def logits_of(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=generator) * 2


@pytest.mark.parametrize("slots", [(0, 1, 2, 3, 4), (3, 2, 1), (0, 4), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_in_flight(
    pair: Pair, generator: torch.Generator, slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    steps = [[RowStep(slot, 3 + moved, 1) for slot in slots] for moved in range(3)]
    logits = [logits_of(len(slots), generator).to(dtype) for _ in steps]
    pending = [pair.launch(*step) for step in zip(logits, steps, strict=True)]
    assert not any(sample.is_late for sample in pending)
    assert all(pair.phased.last_token(slot) is None for slot in slots)
    newest = [pair.feed.newest[slot].item() for slot in slots]
    for sample, of_step, step in zip(pending, logits, steps, strict=True):
        sample.wait()
        assert sample.finish() == pair.expected(of_step, step)
    assert newest == [pair.plain.last_token(slot) for slot in slots]
    assert newest == [pair.phased.last_token(slot) for slot in slots]


def test_logits_that_are_not_finite_fail_their_rows_only(
    pair: Pair, generator: torch.Generator
) -> None:
    steps = [RowStep(slot, 3, 1) for slot in BLIND]
    logits = logits_of(len(BLIND), generator)
    logits[0, 5] = torch.nan
    logits[2] = torch.nan
    logits[3, 0] = torch.inf
    results = pair.launch(logits, steps).finish()
    assert results == pair.expected(logits, steps)
    assert [result.error is None for result in results] == [False, True, False, False, True]
    assert [pair.phased.last_token(slot) for slot in (0, 2, 3)] == [3, 3, 3]


def test_chunks_of_prompts_draw_nothing(pair: Pair, generator: torch.Generator) -> None:
    steps = [
        RowStep(1, 0, 2, token_ids=(1, 2), wanted=Wanted.NONE),
        RowStep(2, 0, 3, token_ids=(1, 2, 3)),
        RowStep(0, 0, 1, token_ids=(1,), wanted=Wanted.NONE),
    ]
    logits = logits_of(1, generator)
    assert pair.launch(logits, steps).finish() == pair.expected(logits, steps)
    none = [steps[0]]
    assert pair.launch(logits[:0], none).finish() == [RowResult(1)]


@pytest.mark.parametrize("name", KNOWING)
def test_rows_that_need_the_host_wait_for_it(name: str, generator: torch.Generator) -> None:
    pair = Pair({**BLIND, 5: KNOWING[name]})
    with pair.accelerator.compute():
        for moved in range(4):
            steps = [RowStep(slot, 3 + moved, 1) for slot in (0, 1, 5)]
            logits = logits_of(3, generator)
            sample = pair.launch(logits, steps)
            assert sample.is_late
            assert pair.phased.last_token(5) == pair.plain.last_token(5)
            assert sample.finish() == pair.expected(logits, steps)


@pytest.mark.parametrize(
    "step",
    [
        RowStep(1, 3, 1, num_logprobs=2),
        RowStep(1, 3, 1, num_candidates=3),
        RowStep(1, 0, 3, token_ids=(1, 2, 3), wanted=Wanted.ALL),
    ],
)
def test_steps_with_more_options_need_the_host(
    pair: Pair, generator: torch.Generator, step: RowStep
) -> None:
    logits = logits_of(step.num_tokens, generator)
    sample = pair.launch(logits, [step])
    assert sample.is_late
    assert sample.finish() == pair.expected(logits, [step])


def test_draft_tokens_are_verified_without_a_wait(pair: Pair, generator: torch.Generator) -> None:
    """The next step may have the rows without draft tokens, whose newest tokens are there."""
    for moved in range(20):
        logits = logits_of(7, generator)
        likeliest = logits.argmax(dim=1).tolist()
        start = len(pair.plain._rows[0].token_ids)
        steps = [
            RowStep(0, start, 3, draft_token_ids=(likeliest[0], moved)),
            RowStep(4, 3 + moved, 1),
            RowStep(3, 3, 1, token_ids=(3,), wanted=Wanted.NONE),
            RowStep(1, 3, 3, draft_token_ids=(moved, likeliest[5])),
        ]
        sample = pair.launch(logits, steps)
        assert not sample.is_late
        assert pair.phased.last_token(4) is None
        newest = pair.feed.newest[4].item()
        expected = pair.expected(logits, steps)
        assert sample.finish() == expected
        assert (newest,) == expected[1].token_ids


class Masks:
    """Implements RowGrammars: a third of the tokens may come; slot 6 has none left."""

    def __init__(self) -> None:
        self.late: frozenset[int] = frozenset()
        self.accepted: list[tuple[int, tuple[int, ...]]] = []

    def add_row(self, row: RowAdded) -> None: ...

    def remove_row(self, slot: int) -> None: ...

    def begin(self, steps: Sequence[RowStep]) -> None: ...

    def close(self) -> None: ...

    def unready(self, slots: Iterable[int], *, has_others: bool) -> frozenset[int]:
        return self.late & set(slots)

    def bitmasks(self, positions: Sequence[tuple[int, tuple[int, ...]]]) -> Any:
        assert not self.late & {slot for slot, _ in positions}
        bits = np.zeros((len(positions), 64), dtype=np.uint8)
        for line, (slot, drafts) in zip(bits, positions, strict=True):
            if slot != 6:
                line[(slot + sum(drafts)) % 3 : VOCAB : 3] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def problem(self, slot: int) -> ErrorInfo | None:
        return ErrorInfo("grammar", "it has ended")

    def accept(self, slot: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        self.accepted.append((slot, tuple(token_ids)))
        return (7,) if slot == 5 else ()


GRAMMAR = Grammar(GrammarKind.LLGUIDANCE, "{}")
CONSTRAINED = {
    5: SamplingParams(temperature=0.0, grammar=GRAMMAR),
    6: SamplingParams(temperature=1.0, grammar=GRAMMAR),
    7: SamplingParams(temperature=0.9, top_p=0.9, grammar=GRAMMAR),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_a_grammar_makes_no_step_wait_for_the_host(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    pair = Pair({**BLIND, **CONSTRAINED}, Masks)
    with pair.accelerator.compute():
        for moved in range(10):
            logits = logits_of(8, generator).to(dtype)
            if moved == 4:
                logits[4, 7] = torch.nan
            steps = [
                RowStep(1, 3 + moved, 1),
                RowStep(5, 3, 3, draft_token_ids=(2, moved)),
                RowStep(7, 3, 2, draft_token_ids=(1 + 3 * moved,)),
                RowStep(6, 3, 1),
                RowStep(0, 3 + moved, 1),
            ]
            sample = pair.launch(logits, steps)
            assert not sample.is_late
            results = sample.finish()
            assert results == pair.expected(logits, steps)
            assert results[3].error is not None
            assert (results[2].error is None) == (moved != 4)
        assert pair.masks[0].accepted == pair.masks[1].accepted


@pytest.mark.parametrize("has_feed", [False, True])
def test_a_row_whose_masks_are_late_is_left_out(generator: torch.Generator, has_feed: bool) -> None:
    """The others have the tokens that they would have with it, and so has it, later."""
    pair = Pair({**BLIND, **CONSTRAINED}, Masks)
    steps = [
        RowStep(1, 3, 1),
        RowStep(5, 3, 2, draft_token_ids=(2,)),
        RowStep(0, 0, 2, token_ids=(1, 2), wanted=Wanted.NONE),
        RowStep(7, 3, 1),
        RowStep(2, 3, 1),
    ]
    logits = logits_of(5, generator)
    expected = pair.expected(logits, steps)
    with pair.accelerator.compute():
        pair.masks[1].late = frozenset({5})
        feed = pair.feed if has_feed else None
        results = pair.phased.launch(logits.clone(), steps, feed).finish()
        assert results == [expected[0], RowResult(5, is_deferred=True), *expected[2:]]
        assert pair.phased.last_token(5) == 3
        pair.masks[1].late = frozenset()
        again = pair.phased.launch(logits[1:3].clone(), steps[1:2], feed).finish()
        assert again == [expected[1]]


def test_without_an_accelerator_all_is_done_at_once(generator: torch.Generator) -> None:
    pair = Pair(BLIND)
    steps = [RowStep(slot, 3, 1) for slot in BLIND]
    logits = logits_of(len(BLIND), generator)
    sample = pair.phased.launch(logits.clone(), steps, None)
    assert not sample.is_late
    assert pair.phased.last_token(0) is not None
    assert sample.finish() == pair.expected(logits, steps)


def test_copies_that_are_early_do_no_harm() -> None:
    """The other extreme: the second step's tokens are there before the first one's are taken."""
    feed = TokenFeed(HostAccelerator(), 4)
    first = feed.put([0, 1], torch.tensor([5, 6]))
    second = feed.put([0, 1], torch.tensor([7, 8]))
    assert first.take() == [5, 6]
    assert second.take() == [7, 8]
    assert feed.newest.tolist() == [7, 8, 0, 0, 0]
