"""A FakeRunner whose rows generate a text that the test knows: tokens are bytes."""

import array
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import LogitsFile, TokenLogprob
from loraplex.core.plan import (
    CacheGroupCapacity,
    CacheGroupId,
    Capacity,
    PageGeometry,
    RowResult,
    RowStep,
    Wanted,
)
from loraplex.core.private_folder import PrivateFolder
from loraplex.core.request import RequestId
from loraplex.core.task import Pool, PoolKind
from support.byte_tokenizer import BYTE_TOKENIZER, EOS_TOKEN_ID, NUM_BYTES, VOCAB_SIZE
from support.fake_loader import FakeLoader
from support.fake_runner import FakeRow, FakeRunner

ECHO_SIZE = 16
"""Length of vectors, which are made of the prompt and the adapters (FakeModel)."""
_UNLIKELY = -100.0
"""Log probability of a candidate that continues no text."""


def echo_text(model: str, adapters: Sequence[str], prompt: str, index: int = 0) -> str:
    """Return the text of sequence `index`: `model+adapter: prompt`, then ` #index` from 1 on."""
    suffix = f" #{index}" if index else ""
    return f"{'+'.join((model, *adapters))}: {prompt}{suffix}"


def echo_logprob(token_id: int, num_top: int, *, num_adapters: int = 0) -> TokenLogprob:
    """Return a made-up log probability: the token is the most likely one, its successors follow.

    The token has -(token_id % 7 + 1) / 16, and 0.5 less for each adapter; each next one is 1 lower.
    All are exact in binary.
    """
    logprob = -(token_id % 7 + 1) / 16 - num_adapters / 2
    top = tuple(
        ((token_id + step) % NUM_BYTES if step else token_id, logprob - step)
        for step in range(num_top)
    )
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=1, top=top)


def echo_logits(token_ids: Sequence[int]) -> bytes:
    """Return made-up logits, one row for each token: 1 for the token, 0 for all others."""
    rows = array.array("f", bytes(4 * VOCAB_SIZE * len(token_ids)))
    for index, token_id in enumerate(token_ids):
        rows[index * VOCAB_SIZE + token_id] = 1.0
    return rows.tobytes()


def echo_capacity(max_model_len: int) -> Capacity:
    """Return the capacity of a runner that computes any prompt in one step."""
    return Capacity(
        block_size=16,
        cache_groups=(CacheGroupCapacity(num_blocks=max(1024, max_model_len // 16 + 1)),),
        max_num_seqs=256,
        max_num_batched_tokens=max(4096, max_model_len),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        page_geometry=PageGeometry(slot_elements=8, slots_per_page=1024),
        pool_kinds=tuple(PoolKind),
        hidden_size=ECHO_SIZE,
        num_adapter_pages=16,
        adapter_page_bytes=2048,
        keeps_host_copy=True,
    )


@dataclasses.dataclass(frozen=True)
class EchoOutput:
    """What one request generates."""

    texts: Sequence[str]
    """Text of each sequence. It is generated, then the end token; it repeats while the sequence may
    not end yet."""
    error: Exception | None = None
    """Error after `after_outputs` tokens: of the row, or of the reader if it is none of ours."""
    after_outputs: int = 0

    @functools.cached_property
    def _token_ids(self) -> list[list[int]]:
        return [BYTE_TOKENIZER.encode(text, False) for text in self.texts]

    @property
    def wholes(self) -> list[list[int]]:
        """Tokens of each sequence that may end at once, the end token included."""
        return [[*token_ids, EOS_TOKEN_ID] for token_ids in self._token_ids]

    def next_token(self, index: int, num_outputs: int, min_outputs: float) -> int:
        """Return the token of sequence `index` after so many, of which it has at least so many."""
        token_ids = self._token_ids[index]
        if not token_ids:
            return EOS_TOKEN_ID
        place = num_outputs % len(token_ids)
        may_end = num_outputs >= max(1, min_outputs)
        return EOS_TOKEN_ID if may_end and not place else token_ids[place]


_OF_OTHERS = EchoOutput(("?",))


class EchoRunner(FakeRunner):
    """Implements engine.runner.Runner. `outputs` has what each request generates, by its id, which
    is also its seed."""

    def __init__(self, capacity: Capacity, loader: FakeLoader) -> None:
        super().__init__(capacity, loader=loader)
        self.outputs: dict[RequestId, EchoOutput] = {}
        self._folder: PrivateFolder | None = None
        self._names = itertools.count()

    def output_of(self, request_id: RequestId) -> EchoOutput:
        """Return what a request generates; one that the test did not send, such as a canary's, has
        a text of no meaning."""
        return self.outputs.get(request_id, _OF_OTHERS)

    def _logprob(self, row: FakeRow, token_id: int, num_top: int) -> TokenLogprob:
        return echo_logprob(token_id, num_top, num_adapters=len(row.adapters))

    def _check_context(self, row: FakeRow, step: RowStep, group: CacheGroupId) -> None:
        """Tests of the engine check the blocks; here it would take most of the time."""

    def _error_of(self, row: FakeRow) -> LoraplexError | None:
        if isinstance(row.added.task, Pool):
            return None
        output = self.output_of(row.added.generation.seed)
        if not isinstance(output.error, LoraplexError):
            return None
        return output.error if _num_outputs(row) == output.after_outputs else None

    def _next_token(self, row: FakeRow) -> int:
        sampling = row.added.sampling
        min_outputs = float("inf") if sampling.ignore_eos else sampling.min_tokens
        output = self.output_of(row.added.generation.seed)
        return output.next_token(row.added.sequence_index, _num_outputs(row), min_outputs)

    def _candidates(self, row: FakeRow, step: RowStep) -> tuple[tuple[int, float], ...]:
        """Return what continues the texts of which the row has the beginning, the first first."""
        made = row.token_ids[row.added.num_prompt_tokens :]
        found: dict[int, float] = {}
        for index, whole in enumerate(self.output_of(row.added.generation.seed).wholes):
            if whole[: len(made)] == made and len(whole) > len(made):
                found.setdefault(whole[len(made)], -float(index))
        for token_id in range(VOCAB_SIZE):
            if len(found) == step.num_candidates:
                break
            found.setdefault(token_id, _UNLIKELY)
        return tuple(found.items())[: step.num_candidates]

    def _result(self, row: FakeRow, step: RowStep) -> RowResult:
        result = super()._result(row, step)
        if isinstance(row.added.task, Pool):
            return result
        sampling, added = row.added.sampling, row.added
        logits = prompt_logits = None
        if sampling.return_logits and result.token_ids:
            logits = self._write_logits(result.token_ids)
        if sampling.return_prompt_logits and step.wanted is Wanted.ALL:
            last = min(step.start + step.num_tokens, added.num_prompt_tokens)
            prompt_logits = self._write_logits(row.token_ids[step.start : last])
        return msgspec.structs.replace(result, logits=logits, prompt_logits=prompt_logits)

    def _write_logits(self, token_ids: Sequence[int]) -> LogitsFile:
        if self._folder is None:
            self._folder = PrivateFolder()
            weakref.finalize(self, self._folder.remove)
        path = Path(self._folder.path, f"{next(self._names)}.f32")
        path.write_bytes(echo_logits(token_ids))
        return LogitsFile(str(path), len(token_ids))


def _num_outputs(row: FakeRow) -> int:
    return len(row.token_ids) - row.added.num_prompt_tokens
