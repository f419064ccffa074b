"""Steps while several tenants have requests: shorter ones, with a slot for who has none."""

from collections.abc import Sequence
from typing import Final

from loraplex.core.plan import StepTiming
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.scheduling.beam_request import BeamRequest

REMEMBERED_NS: Final = 60_000_000_000
"""How long after a change of tenants the steps are shared: the next one is likely."""
LEAST_PART: Final = 8
"""A step may compute this part (1 / 8) of a full step's tokens of prompts however long that takes:
shorter chunks would read all weights for little."""
_NEWEST_PART: Final = 0.25
"""Weight of the newest step in the estimate."""


class SharedSteps:
    """Knows whether tenants share the server at present, and how many tokens a step then has.

    A request that arrives waits for the steps in flight and for its own, and no step in flight can
    be cut short. So while tenants share the server, a step has the prompt tokens that fit into the
    target time, by the steps measured so far. Alone, a tenant has full steps: they read the
    weights less often.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._target_ns = 1e9 * settings.shared_step_seconds
        self._keeps_slot = settings.share_kind is FairShare.TENANT
        self._tenant: str | None = None
        self._changed_ns: int | None = None
        """When a request of another tenant than the one before arrived last."""
        self._num_least = settings.max_num_batched_tokens // LEAST_PART
        self._num_in_target: float = settings.max_num_batched_tokens
        """Estimate of the tokens that a step computes in the target time."""
        self._num_turns = 0

    def arrived(self, tenant: str, now_ns: int) -> None:
        """Note a request."""
        if self._tenant not in (None, tenant):
            self._changed_ns = now_ns
        self._tenant = tenant

    def measured(self, num_tokens: int, timing: StepTiming) -> None:
        """Note how long a step took. Small ones are no measure of a prompt's tokens."""
        step_ns = timing.prepare_ns - timing.copy_ns + timing.forward_ns + timing.sample_ns
        if num_tokens >= self._num_least and step_ns > 0:
            newest = num_tokens * self._target_ns / step_ns
            self._num_in_target += _NEWEST_PART * (newest - self._num_in_target)

    def max_prompt_tokens(self, num_other: int, now_ns: int) -> int | None:
        """Return the most tokens of prompts for a step with so many others; None: no limit."""
        if not (self._target_ns and self._are_on(now_ns)):
            return None
        return max(self._num_least, 1, int(self._num_in_target) - num_other)

    def in_turn(self, searches: Sequence[BeamRequest], now_ns: int) -> Sequence[BeamRequest]:
        """Return the beam searches that a step computes.

        While tenants share the server, searches with many beams take turns: a beam takes far more
        time of the scheduler than another row.
        """
        if not (self._target_ns and self._are_on(now_ns)):
            return searches
        chosen: list[BeamRequest] = []
        self._num_turns += 1
        for search in sorted(searches, key=lambda search: search.last_turn):
            if chosen and sum(each.width for each in chosen) + search.width > self._num_least:
                break
            search.last_turn = self._num_turns
            chosen.append(search)
        return chosen

    def num_slots_kept(self, now_ns: int) -> int:
        """Return how many slots are only for tenants without one."""
        return int(self._keeps_slot and self._are_on(now_ns))

    def _are_on(self, now_ns: int) -> bool:
        return self._changed_ns is not None and now_ns - self._changed_ns < REMEMBERED_NS
