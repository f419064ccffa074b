"""Who was served how much: fair queueing by counters of tokens.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv:2401.00588), Virtual
Token Counter, with a virtual time for those who come back, so that no stream of newcomers keeps
anybody waiting for ever.
"""

import dataclasses
from collections.abc import Collection

from loraplex.core.adapter import AdapterHandle
from loraplex.core.request import EngineRequest
from loraplex.core.scheduler_settings import FairShare
from loraplex.scheduling.request import ShareKey

NUM_REMEMBERED = 64
"""Idle shares ahead of the virtual time that are kept before one looks for stale ones."""


@dataclasses.dataclass(slots=True)
class _Share:
    counter: float = 0.0
    """Weighted tokens served, divided by the weight."""
    weight: float = 1.0
    num_requests: int = 0


class FairShares:
    """A counter for each share; who has the smallest one is next.

    A share's counter grows by what it is served, divided by its weight. The virtual time grows by
    what all are served, divided by the weight of all shares that have requests: it is the counter
    of a share that was served as much as the others. A share that has nothing waiting, and so was
    not served for want of requests, starts at the virtual time at least: idling earns nothing.
    The virtual time is never below all counters of those that wait (the lift of VTC), and nobody
    is put behind all of them.

    Because the virtual time passes every counter, whoever waits is overtaken by a bounded number
    of tokens: see docs/invariants.md.
    """

    def __init__(
        self,
        kind: FairShare,
        input_weight: float,
        output_weight: float,
        resident_lead: float = 0.0,
    ) -> None:
        self.resident_lead = resident_lead if kind is not FairShare.NONE else 0.0
        """By so much a share may be ahead of others whose adapters are not on the device."""
        self._kind = kind
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._shares: dict[ShareKey, _Share] = {}
        self._virtual_time = 0.0
        self._active_weight = 0.0
        self._num_active = 0

    @property
    def virtual_time(self) -> float:
        return self._virtual_time

    def __len__(self) -> int:
        """Shares that are remembered."""
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
        """Smaller is sooner. 0 for all where nothing is shared."""
        share = self._shares.get(key)
        return 0.0 if share is None else share.counter

    def enter(self, key: ShareKey, weight: float, waiting: Collection[ShareKey]) -> None:
        """A request came; `waiting` are the shares that have one waiting already.

        The share has the weight (> 0) of the newest of its requests.
        """
        if self._kind is FairShare.NONE:
            return
        assert weight > 0, f"a share's weight must be more than 0, got {weight}"
        share = self._shares.setdefault(key, _Share())
        if share.num_requests:
            self._active_weight -= share.weight
        else:
            self._num_active += 1
        self._active_weight += weight
        share.weight = weight
        share.num_requests += 1
        if key not in waiting:
            share.counter = max(share.counter, self._floor(waiting))

    def leave(self, key: ShareKey) -> None:
        """A request ended."""
        if self._kind is FairShare.NONE:
            return
        share = self._shares[key]
        share.num_requests -= 1
        if share.num_requests:
            return
        self._num_active -= 1
        # Sums of fractions drift: start anew whenever nobody is there.
        self._active_weight = self._active_weight - share.weight if self._num_active else 0.0
        if len(self._shares) > 2 * self._num_active + NUM_REMEMBERED:
            self._forget_stale()

    def charge(self, key: ShareKey, num_input: int, num_output: int) -> None:
        """So many tokens were served. Tokens from the prefix cache, or computed again after a
        preemption, are not to be counted."""
        if self._kind is FairShare.NONE:
            return
        cost = self._input_weight * num_input + self._output_weight * num_output
        share = self._shares[key]
        share.counter += cost / share.weight
        self._virtual_time += cost / self._active_weight

    def check(self, num_requests: dict[ShareKey, int]) -> None:
        """`num_requests`: how many unfinished requests each share has."""
        if self._kind is FairShare.NONE:
            return
        active = {key: s.num_requests for key, s in self._shares.items() if s.num_requests}
        assert active == num_requests, "requests of shares"
        assert self._num_active == len(active)
        weight = sum(s.weight for s in self._shares.values() if s.num_requests)
        assert abs(weight - self._active_weight) <= 1e-6 * (1 + weight), "weight of shares"

    def _floor(self, waiting: Collection[ShareKey]) -> float:
        counters = [self._shares[key].counter for key in waiting]
        if not counters:
            return self._virtual_time
        self._virtual_time = max(self._virtual_time, min(counters))
        return min(self._virtual_time, max(counters))

    def _forget_stale(self) -> None:
        """An idle share that the virtual time has passed would start there like a new one."""
        self._shares = {
            key: share
            for key, share in self._shares.items()
            if share.num_requests or share.counter > self._virtual_time
        }
