"""Deadlines: the first one first, and none of a request that ended."""

import types

from loraplex.scheduling.deadlines import MAX_ENDED_ENTRIES, Deadlines


def request(request_id, deadline_ns):
    engine_request = types.SimpleNamespace(deadline_ns=deadline_ns)
    return types.SimpleNamespace(request_id=request_id, engine_request=engine_request)


def test_the_first_one_of_those_that_live_is_next():
    alive = {i: request(i, ns) for i, ns in ((1, 30), (2, 10), (3, None), (4, 20))}
    deadlines = Deadlines(alive.get)
    for one in alive.values():
        deadlines.add(one)
    assert deadlines.next_ns() == 10
    del alive[2]
    assert deadlines.next_ns() == 20
    assert deadlines.take_due(19) == []
    assert deadlines.take_due(30) == [alive[4], alive[1]]
    assert deadlines.next_ns() is None
    assert len(deadlines) == 0


def test_an_early_end_leaves_no_entry_for_ever():
    """A long timeout of many short requests must not fill the memory."""
    alive = {}
    deadlines = Deadlines(alive.get)
    for i in range(20 * MAX_ENDED_ENTRIES):
        alive[i] = request(i, 10**15 + i)
        deadlines.add(alive[i])
        alive.pop(i - 3, None)
        assert len(deadlines) <= MAX_ENDED_ENTRIES + 2 * (len(alive) + 1)
    assert [one.request_id for one in deadlines.take_due(10**16)] == sorted(alive)
