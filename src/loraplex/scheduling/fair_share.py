"""What shares get of an engine: turns by counters of served tokens, and shorter steps.

The counters are the Virtual Token Counter (VTC) of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024, arXiv:2401.00588), with a virtual time for shares that return after a
pause. So no stream of new shares keeps a request waiting for ever.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Final

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import StepTiming
from loraplex.core.request import EngineRequest
from loraplex.core.scheduler_settings import Batching, FairShare, SchedulerSettings
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.request import ShareKey

NUM_REMEMBERED = 64
"""Number of idle shares above which stale ones are sought and removed."""
_UNITS: Final = 2.0**72
"""Units of the sum of weights in 1. A product of two weights is 2**-20 or more, so a float64 of it
is a whole number of units: the sum neither drifts nor loses a light share next to heavy ones."""
REMEMBERED_NS: Final = 60_000_000_000
"""How long after a change of tenants the steps are shared: the next one is likely."""
LEAST_PART: Final = 8
"""A step may compute this part (1 / 8) of a full step's tokens of prompts however long that takes:
shorter chunks would read all weights for little."""
_NEWEST_PART: Final = 0.25
"""Weight of the newest step in the estimate."""


@dataclasses.dataclass(slots=True)
class _Share:
    counter: float = 0.0
    """Weighted tokens served, divided by the weight."""
    weight: float = 1.0
    units: int = 0
    """The weight in units of the sum."""
    num_requests: int = 0


def shares_slots(settings: SchedulerSettings) -> bool:
    """Return whether the slots are shared fairly, and not only the tokens.

    A static batch admits nothing while it runs, and without fair shares requests do not share.
    """
    return settings.batching is not Batching.STATIC and settings.share_kind is not FairShare.NONE


def max_seqs_per_request(settings: SchedulerSettings, max_num_seqs: int) -> int:
    """Return the maximum number of slots that one request's sequences take at a time.

    It is three quarters of them, so that a request with many sequences leaves slots for later
    requests.
    """
    if not shares_slots(settings):
        return max_num_seqs
    return max(1, max_num_seqs - max(1, max_num_seqs // 4))


class FairShares:
    """A counter for each share; the share with the smallest counter is next.

    A share's counter grows by the service that it gets, divided by its weight. The virtual time
    grows by all service, divided by the weight of all shares that have requests: it is the counter
    of a share that was served exactly its part. A share that had no waiting request starts at the
    virtual time or later: idling earns nothing. The virtual time is never below all counters of
    waiting shares (the lift of VTC), and no share is put after all of them.

    Because the virtual time passes every counter, a waiting request is overtaken by a bounded
    number of tokens: see docs/invariants.md.
    """

    def __init__(
        self,
        kind: FairShare,
        input_weight: float,
        output_weight: float,
        resident_lead: float = 0.0,
    ) -> None:
        self.resident_lead = resident_lead if kind is not FairShare.NONE else 0.0
        """Lead of a share over others whose adapters are not on the device."""
        self._kind = kind
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._shares: dict[ShareKey, _Share] = {}
        self._virtual_time = 0.0
        self._active_units = 0
        """Sum of the weights of the shares that have requests."""
        self._num_active = 0
        self._floor: float | None = None
        """Start of newcomers while shares wait and none is served or leaves."""

    @property
    def virtual_time(self) -> float:
        return self._virtual_time

    @property
    def _active_weight(self) -> float:
        return self._active_units / _UNITS

    @property
    def num_active(self) -> int:
        """Return how many shares have requests."""
        return self._num_active

    def __len__(self) -> int:
        """Return the number of known shares."""
        return len(self._shares)

    def key(self, request: EngineRequest, handles: tuple[AdapterHandle, ...]) -> ShareKey:
        match self._kind:
            case FairShare.NONE:
                return ()
            case FairShare.ADAPTER:
                return handles
            case FairShare.TENANT:
                return (request.tenant,)
            case FairShare.TENANT_ADAPTER:
                return (request.tenant, *handles)

    def counter(self, key: ShareKey) -> float:
        """Return the counter of a share; smaller is sooner. It is 0 for FairShare.NONE."""
        share = self._shares.get(key)
        return 0.0 if share is None else share.counter

    def part(self, key: ShareKey, num_slots: int) -> int:
        """Return how many of the slots are a share's part: at least one.

        They are divided by weight among the shares that have requests.
        """
        if self._kind is FairShare.NONE:
            return num_slots
        return max(1, int(num_slots * self._shares[key].weight / self._active_weight))

    def enter(self, key: ShareKey, weight: float, waiting: Collection[ShareKey]) -> None:
        """Add a request; `waiting` are the shares that have a waiting request already.

        The share has the weight of the newest of its requests: the product of at most two that
        `weight_problem` allows.
        """
        if self._kind is FairShare.NONE:
            return
        share = self._shares.setdefault(key, _Share())
        if share.num_requests:
            self._active_units -= share.units
        else:
            self._num_active += 1
        share.weight, share.units = weight, int(weight * _UNITS)
        assert share.units > 0, f"weight {weight} of a share"
        self._active_units += share.units
        share.num_requests += 1
        if key in waiting:
            return
        start = self._virtual_time
        if waiting:
            # A newcomer starts at the floor or later, so it lowers no floor: thousands that come in
            # one step need it computed once.
            if self._floor is None:
                counters = [self._shares[other].counter for other in waiting]
                self._virtual_time = max(self._virtual_time, min(counters))
                self._floor = min(self._virtual_time, max(counters))
            start = self._floor
        share.counter = max(share.counter, start)

    def leave(self, key: ShareKey) -> None:
        """Remove a request that ended."""
        if self._kind is FairShare.NONE:
            return
        self._floor = None
        share = self._shares[key]
        share.num_requests -= 1
        if share.num_requests:
            return
        self._num_active -= 1
        self._active_units -= share.units
        if len(self._shares) > 2 * self._num_active + NUM_REMEMBERED:
            self._forget_stale()

    def charge(self, key: ShareKey, num_input: int, num_output: int) -> None:
        """Charge served tokens to a share.

        Do not count tokens from the prefix cache, or those computed again after a preemption.
        """
        if self._kind is FairShare.NONE:
            return
        self._floor = None
        cost = self._input_weight * num_input + self._output_weight * num_output
        share = self._shares[key]
        share.counter += cost / share.weight
        self._virtual_time += cost / self._active_weight

    def check(self, num_requests: dict[ShareKey, int]) -> None:
        """Assert the invariants; `num_requests`: unfinished requests of each share."""
        if self._kind is FairShare.NONE:
            return
        active = {key: s.num_requests for key, s in self._shares.items() if s.num_requests}
        assert active == num_requests, "requests of shares"
        assert self._num_active == len(active)
        units = sum(share.units for share in self._shares.values() if share.num_requests)
        assert units == self._active_units, "weight of shares"

    def _forget_stale(self) -> None:
        """Remove idle shares that the virtual time has passed: they would start like new ones."""
        self._shares = {
            key: share
            for key, share in self._shares.items()
            if share.num_requests or share.counter > self._virtual_time
        }


class SharedSteps:
    """Knows whether tenants share the server at present, and how many tokens a step then has.

    A request that arrives waits for the steps in flight and for its own, and no step in flight can
    be cut short. So while tenants share the server, a step has the prompt tokens that fit into the
    target time, by the steps measured so far. Alone, a tenant has full steps: they read the
    weights less often. But next to rows that decode, pooled prompts have the shorter steps always.
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
        return self._num_left(num_other) if self._are_on(now_ns) else None

    def max_pooled_tokens(self, num_other: int) -> int | None:
        """Return the most tokens of pooled prompts for a step that also decodes; None: no limit.

        Texts that are read as they are written wait for each step, vectors for their last one.
        """
        return self._num_left(num_other)

    def _num_left(self, num_other: int) -> int | None:
        if not self._target_ns:
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
