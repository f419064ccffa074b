"""Usage of the requests of one call: tokens, times, and the adapters that were used."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from loraplex.core.output import RequestOutput, RequestTiming, ResolvedAdapter
from loraplex.frontends.openai.responses import (
    AdapterUsed,
    Details,
    PromptTokensDetails,
    Timing,
    Usage,
)


class UsageCounter:
    """Adds up the requests of one call, from their latest outputs."""

    def __init__(self, notes: Sequence[str] = ()) -> None:
        """notes: what was left out of the request."""
        self._notes = list(notes)
        self._latest: dict[int, RequestOutput] = {}

    def see(self, request_index: int, output: RequestOutput) -> None:
        self._latest[request_index] = output

    def usage(self) -> Usage:
        outputs = self._latest.values()
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_output_tokens = sum(output.num_output_tokens for output in outputs)
        timings = [output.timing for output in outputs if output.timing is not None]
        num_cached_tokens = sum(timing.num_cached_tokens for timing in timings)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens) if timings else UNSET,
        )

    def details(self) -> Details | UnsetType:
        """Once all requests have ended."""
        outputs = [self._latest[index] for index in sorted(self._latest)]
        timings = [output.timing for output in outputs]
        if not outputs or None in timings:
            return UNSET
        return Details(
            adapters=[AdapterUsed(a.name, a.digest, a.scale) for a in _adapters_of(outputs)],
            timing=[_timing(timing) for timing in timings if timing is not None],
            notes=self._notes or UNSET,
        )


def _adapters_of(outputs: Sequence[RequestOutput]) -> Iterable[ResolvedAdapter]:
    """Each once: the prompts of one call have the same, or one of their own each."""
    return dict.fromkeys(adapter for output in outputs for adapter in output.adapters)


def _timing(timing: RequestTiming) -> Timing:
    return Timing(
        queue_seconds=timing.queue_seconds,
        adapter_wait_seconds=timing.adapter_wait_seconds,
        adapter_load_seconds=timing.adapter_load_seconds,
        adapter_copy_seconds=timing.adapter_copy_seconds,
        prefill_seconds=timing.prefill_seconds,
        first_token_seconds=timing.first_token_seconds,
        seconds_per_token=timing.seconds_per_token,
        total_seconds=timing.total_seconds,
        preemptions=timing.num_preemptions,
        cached_tokens=timing.num_cached_tokens,
        draft_tokens=timing.num_draft_tokens,
        accepted_draft_tokens=timing.num_accepted_tokens,
        restarts=timing.num_restarts,
    )
