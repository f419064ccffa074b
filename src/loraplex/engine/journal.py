"""Journal of an engine's commands, plans and results, in order: enough to replay it.

A journal is JSON lines: a header, then one entry for each command, plan and result. It has the
token ids of prompts and outputs.
"""

import math
import sys
from typing import Protocol, TypeVar

import msgspec

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import Capacity, RowAdded, RowResult, StepPlan, StepResult
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import MAX_LOGIT_BIAS
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.messages import AddRequest, EngineCommand

JOURNAL_VERSION = 5

_Message = TypeVar("_Message", EngineRequest, RowAdded)


class JournalHeader(msgspec.Struct, frozen=True, tag="header", kw_only=True):
    """Settings from which an equal engine is built."""

    version: int = JOURNAL_VERSION
    loraplex: str
    """Version of the engine: another one may plan differently."""
    capacity: Capacity
    settings: SchedulerSettings
    adapter_host_bytes: int
    eviction_policy: str
    overlap: bool = False
    run: str = ""
    """Id that distinguishes engines that wrote files of one name."""
    part: int = 0
    """Number of the part; a journal that grew too large continues in the next one."""


class CommandTaken(msgspec.Struct, frozen=True, tag="command"):
    now_ns: int
    """Time of the engine's clock for all consequences of the command."""
    command: EngineCommand


class LoadEnded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A load of an adapter into host memory that ended or failed. It is a HostLoad."""

    handle: AdapterHandle
    error: ErrorInfo | None = None
    load_ns: int = 0


class PlanMade(msgspec.Struct, frozen=True, tag="plan", omit_defaults=True):
    """A plan, made after the scheduler was notified of the loads that had ended."""

    now_ns: int
    loads: tuple[LoadEnded, ...] = ()
    plan: StepPlan | None = None
    """The plan; None if there was nothing to launch, or the scheduler failed."""


class StepEnded(msgspec.Struct, frozen=True, tag="result", omit_defaults=True):
    """End of the oldest plan in flight, with a result or an error of the whole step."""

    now_ns: int
    result: StepResult | None = None
    error: ErrorInfo | None = None


JournalEntry = JournalHeader | CommandTaken | PlanMade | StepEnded


class Journal(Protocol):
    """Receiver of the entries of one engine. It never raises once it has begun."""

    def begin(self, header: JournalHeader) -> None:
        """Begin a journal. Raises ConfigError if it cannot be written."""
        ...

    def write(self, entry: JournalEntry) -> None: ...

    def close(self) -> None: ...


def _row_without_bulk(row: RowResult) -> RowResult:
    if not (row.logprobs or row.prompt_logprobs or row.candidates):
        return row
    return msgspec.structs.replace(
        row,
        logprobs=tuple(map(_chosen, row.logprobs)),
        prompt_logprobs=tuple(map(_chosen, row.prompt_logprobs)),
        candidates=tuple((token_id, _finite(score)) for token_id, score in row.candidates),
    )


def _chosen(logprob: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(logprob.token_id, _finite(logprob.logprob), logprob.rank)


def _finite(score: float) -> float:
    """Replace infinities, which JSON does not have."""
    return score if math.isfinite(score) else -sys.float_info.max


def encodable(entry: JournalEntry) -> JournalEntry:
    """Return what the scheduler uses of an entry, with finite numbers, the only ones of JSON."""
    match entry:
        case StepEnded(result=StepResult() as result):
            rows = tuple(map(_row_without_bulk, result.rows))
            result = msgspec.structs.replace(result, rows=rows)
            return msgspec.structs.replace(entry, result=result)
        case CommandTaken(_, AddRequest(request)):
            return msgspec.structs.replace(entry, command=AddRequest(_with_finite_biases(request)))
        case PlanMade(plan=StepPlan() as plan) if plan.added:
            added = tuple(map(_with_finite_biases, plan.added))
            return msgspec.structs.replace(entry, plan=msgspec.structs.replace(plan, added=added))
    return entry


def _with_finite_biases(message: _Message) -> _Message:
    if not isinstance(message.task, Generate) or not message.sampling.logit_bias:
        return message
    sampling = message.sampling
    biases = tuple((token_id, max(bias, -MAX_LOGIT_BIAS)) for token_id, bias in sampling.logit_bias)
    return message.with_sampling(msgspec.structs.replace(sampling, logit_bias=biases))
