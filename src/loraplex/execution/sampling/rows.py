"""The rows of a step as the sampler sees them: what it knows of each, and what it is to draw."""

import dataclasses
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from loraplex.core.plan import RowAdded, RowStep, Slot, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.sampling.row_rules import RowRules


class DecayingTopP:
    """A function of the output so far, kept up to date.

    The first token has top_p. After each token it is max(top_p * decay, top_p_min), and after the
    reset token what it was at first. Source: computeToppDecay in TensorRT-LLM's
    samplingTopPKernels.cu.
    """

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        self._params = params
        self._value = params.top_p
        self.add(output)

    @staticmethod
    def matters(params: SamplingParams) -> bool:
        """Whether top_p ever changes."""
        return params.top_p_decay != 1.0 or params.top_p_min > params.top_p

    def add(self, token_ids: Sequence[int]) -> None:
        """They were produced."""
        self._value = self.after(token_ids)

    def after(self, token_ids: Sequence[int]) -> float:
        """Value if the tokens had been produced, too."""
        params, value = self._params, self._value
        for token_id in token_ids:
            if token_id == params.top_p_reset_id:
                value = params.top_p
            else:
                value = max(value * params.top_p_decay, params.top_p_min)
        return value


def num_logits_rows(step: RowStep) -> int:
    """How many of a row's last computed positions need logits: the rows that sample() expects.

    NONE and POOL: 0. LAST: 1, and one more per draft token. ALL: every computed position.
    """
    if step.wanted in (Wanted.NONE, Wanted.POOL):
        return 0
    if step.wanted is Wanted.ALL:
        return step.num_tokens
    return 1 + len(step.draft_token_ids)


def logits_rows_without(steps: Sequence[RowStep], slots: Container[Slot]) -> list[int]:
    """Indices of the logits of a step that belong to other slots."""
    is_kept = [step.slot not in slots for step in steps]
    kept: list[int] = np.flatnonzero(np.repeat(is_kept, list(map(num_logits_rows, steps)))).tolist()
    return kept


@dataclasses.dataclass(slots=True, eq=False)
class SampledRow:
    """What the sampler keeps of a sequence in a slot."""

    added: RowAdded
    sampling: SamplingParams
    token_ids: list[int]
    rules: RowRules | None
    """None: nothing is ever done to its logits."""
    top_p: DecayingTopP | None
    """None: it is the same for all tokens."""
    is_greedy: bool
    takes_likeliest: bool
    """Whatever the step: its next token is the likeliest, and needs no edit of the logits."""
    draws_blindly: bool
    """Whatever the step: its next token depends on the ones before it only by its grammar, whose
    masks are there before the logits."""
    num_pending: int = 0
    """Tokens that were drawn, and are not known here yet."""

    @classmethod
    def of(cls, added: RowAdded, vocab_size: int) -> "SampledRow":
        rules = RowRules.of(added, vocab_size)
        sampling, output = added.sampling, added.token_ids[added.num_prompt_tokens :]
        top_p = DecayingTopP(sampling, output) if DecayingTopP.matters(sampling) else None
        is_free = rules is None and not sampling.return_logits
        return cls(
            added=added,
            sampling=sampling,
            token_ids=list(added.token_ids),
            rules=rules,
            top_p=top_p,
            is_greedy=sampling.is_greedy,
            takes_likeliest=sampling.is_greedy and is_free and sampling.grammar is None,
            draws_blindly=is_free and (sampling.is_greedy or top_p is None),
        )

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) + self.num_pending - self.added.num_prompt_tokens

    @property
    def seed(self) -> int:
        return self.added.generation.seed

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self.rules is not None:
            self.rules.add(token_ids)
        if self.top_p is not None:
            self.top_p.add(token_ids)

    def top_p_after(self, accepted: Sequence[int]) -> float:
        return self.sampling.top_p if self.top_p is None else self.top_p.after(accepted)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
    """One row's step and where its logits begin."""

    step: RowStep
    row: SampledRow
    first: int

    @property
    def last(self) -> int:
        """The logits of its newest token."""
        return self.first + num_logits_rows(self.step) - 1

    @property
    def reaches_end(self) -> bool:
        """Whether its last position is that of the newest known token, or of the last draft."""
        if self.step.wanted is not Wanted.ALL:
            return self.step.wanted is Wanted.LAST
        num_known = len(self.row.token_ids) + len(self.step.draft_token_ids)
        return self.step.start + self.step.num_tokens == num_known

    @property
    def samples(self) -> bool:
        return self.reaches_end and not self.step.num_candidates

    @property
    def wants_candidates(self) -> bool:
        return self.reaches_end and self.step.num_candidates > 0


class Draw(NamedTuple):
    """One position to sample, under the assumption that the drafts before it were accepted."""

    logits_row: int
    row: SampledRow
    accepted: tuple[int, ...] = ()

    @property
    def output_index(self) -> int:
        return self.row.num_outputs + len(self.accepted)


def draws_of(rows: StepRow) -> list[Draw]:
    """The last position, and with drafts one more per draft token before it."""
    if not rows.samples:
        return []
    drafts = rows.step.draft_token_ids
    first = rows.last - len(drafts)
    return [Draw(first + i, rows.row, drafts[:i]) for i in range(len(drafts) + 1)]


def accept(drafts: Sequence[int], sampled: Sequence[int | None]) -> list[int]:
    """The sampled tokens up to the first that differs from its draft."""
    accepted: list[int] = []
    for index, token_id in enumerate(sampled):
        if token_id is None:
            break
        accepted.append(token_id)
        if index < len(drafts) and token_id != drafts[index]:
            break
    return accepted
