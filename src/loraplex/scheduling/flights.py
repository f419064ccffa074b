"""Plans that were launched and have not landed, with the sequences of their rows."""

import dataclasses
from collections import Counter

from loraplex.core.plan import StepPlan
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.roster import Roster


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """A plan in flight."""

    plan: StepPlan
    sequences: list[ActiveSequence]
    """Of its rows, in their order."""
    num_preempted: int
    offloaded: list[ActiveSequence]
    """Whose KV it brings to the host."""


class Flights:
    """At most two, in the order in which they were launched; they land in this order.

    Invariant: a sequence's `num_in_flight` is the number of flights with a row of it.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def only(self) -> Flight:
        """There must be one, and no other."""
        (flight,) = self._flights
        return flight

    def of(self, plan: StepPlan) -> Flight:
        """The plan must be in flight."""
        for flight in self._flights:
            if flight.plan is plan:
                return flight
        raise AssertionError(f"plan {plan.step_id} is not in flight")

    def depart(self, flight: Flight) -> None:
        for active in flight.sequences:
            active.num_in_flight += 1
        self._flights.append(flight)

    def land(self, plan: StepPlan) -> Flight:
        """The oldest one, which must be this plan's. What waited for that is given back."""
        flight = self._flights.pop(0)
        assert flight.plan is plan, "plans land in their order"
        for active in flight.sequences:
            self._roster.landed(active)
        return flight

    def num_rows(self) -> Counter[ActiveSequence]:
        """How many flights have a row of a sequence."""
        return Counter(active for flight in self._flights for active in flight.sequences)
