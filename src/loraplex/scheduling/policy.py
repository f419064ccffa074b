"""In which order waiting sequences are considered, and running ones are kept."""

from typing import Protocol

from loraplex.core.sequence import Sequence, SequenceGroup

OrderKey = tuple[int, ...]
"""Smaller is sooner; unique among the sequences of an engine. Fair shares count between those with
the same first element."""

ShareKey = tuple[int | str, ...]
"""Whom fair shares tell apart: adapters, a tenant, both, or nothing."""


class Policy(Protocol):
    """A total order that does not change while a sequence lives.

    Because it does not change, the first sequence in it is never preempted and always makes
    progress; then the next one is the first.
    """

    def key(self, group: SequenceGroup, sequence: Sequence) -> OrderKey: ...


class PriorityThenArrival:
    """Lower priority values first, then first come, first served.

    A preempted sequence keeps its key: it was admitted before those behind it, so it is again in
    front of them.
    """

    def key(self, group: SequenceGroup, sequence: Sequence) -> OrderKey:
        request = group.request
        return (request.priority, request.arrival_ns, request.request_id, sequence.index)
