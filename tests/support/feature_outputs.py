"""Complete output of a request, without its timing, and checks of its consistency."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from loraplex.core.errors import ErrorInfo
from loraplex.core.output import (
    EngineOutput,
    FinishReason,
    LogitsFile,
    PromptLogprobs,
    TokenLogprob,
)


@dataclasses.dataclass(slots=True)
class SequenceCompletion:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    logits: bytes = b""
    finish: tuple[FinishReason, int | None] | None = None
    """Finish reason and stop token."""
    cumulative_logprob: float | None = None

    @property
    def is_aborted(self) -> bool:
        return self.finish is not None and self.finish[0] is FinishReason.ABORT

    def begins(self, other: "SequenceCompletion") -> bool:
        """Is the other one equal to this one, and may go on?"""
        return (
            other.token_ids[: len(self.token_ids)] == self.token_ids
            and other.logprobs[: len(self.logprobs)] == self.logprobs
            and other.logits.startswith(self.logits)
        )


@dataclasses.dataclass(slots=True)
class Completion:
    sequences: dict[int, SequenceCompletion]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_logits: bytes = b""
    is_finished: bool = False
    error: ErrorInfo | None = None

    @classmethod
    def of(cls, outputs: Iterable[EngineOutput]) -> "Completion":
        """Return the output of one request. Reads its files of logits.

        Raises AssertionError for outputs that are out of order.
        """
        completion = cls(defaultdict(SequenceCompletion))
        for output in outputs:
            completion._take(output)
        return completion

    def differences(self, expected: "Completion", *, may_fail: bool) -> Iterator[str]:
        """may_fail: if it failed, it need only be right as far as it went; as if aborted."""
        is_cut = self.error is not None and may_fail
        if not self.is_finished:
            yield "has no end"
        if self.error is not None and not may_fail:
            yield f"failed: {self.error}"
        is_cut = is_cut or any(sequence.is_aborted for sequence in self.sequences.values())
        if not (is_cut or self.sequences.keys() == expected.sequences.keys()):
            yield f"has sequences {sorted(self.sequences)}, alone {sorted(expected.sequences)}"
        scores = (self.prompt_logprobs, self.prompt_logits)
        if scores != (expected.prompt_logprobs, expected.prompt_logits) and not (
            is_cut and scores == (None, b"")
        ):
            yield "has other log probabilities or logits of its prompt"
        for index, sequence in self.sequences.items():
            yield from _sequence_differences(index, sequence, expected.sequences[index])

    def _take(self, output: EngineOutput) -> None:
        assert not self.is_finished, "an output after the last one"
        self.is_finished = output.finished
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log probabilities came twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.prompt_logits += _read(output.prompt_logits)
        if output.error is not None:
            self.error = output.error
        for delta in output.deltas:
            sequence = self.sequences[delta.index]
            assert sequence.finish is None, "tokens after the end"
            sequence.token_ids += delta.token_ids
            sequence.logprobs += delta.logprobs
            sequence.logits += _read(delta.logits)
            if delta.cumulative_logprob is not None:
                sequence.cumulative_logprob = delta.cumulative_logprob
            if delta.finish_reason is not None:
                sequence.finish = (delta.finish_reason, delta.stop_token_id)


def _sequence_differences(
    index: int, sequence: SequenceCompletion, expected: SequenceCompletion
) -> Iterator[str]:
    if sequence.finish is None or sequence.is_aborted:
        is_right = sequence.begins(expected)
    else:
        is_right = sequence == expected
    if not is_right:
        yield f"sequence {index}: {_reported(sequence)}, alone {_reported(expected)}"


def _reported(sequence: SequenceCompletion) -> str:
    logits = f", logits {hash(sequence.logits)}" if sequence.logits else ""
    return (
        f"{sequence.token_ids} {sequence.finish} {sequence.cumulative_logprob} "
        f"{[(entry.logprob, entry.rank) for entry in sequence.logprobs]}{logits}"
    )


def _read(files: Iterable[LogitsFile]) -> bytes:
    return b"".join(Path(file.path).read_bytes() for file in files)
