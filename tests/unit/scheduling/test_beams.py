"""The search by hand: scores, ties, diversity, when it is over. transformers is in tests/golden."""

import pytest

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.output import FinishReason
from loraplex.scheduling.beams import BeamSearcher
from loraplex.scheduling.request import Stop

END = 9


def searcher(*, max_tokens=10, num_stop_tokens=1, num_top=0, **beam):
    def stop_of(token_ids):
        if token_ids[-1] == END:
            return Stop(FinishReason.STOP, END)
        return Stop(FinishReason.LENGTH) if len(token_ids) >= max_tokens else None

    return BeamSearcher(
        BeamSearch(**beam),
        max_tokens=max_tokens,
        num_stop_tokens=num_stop_tokens,
        stop_of=stop_of,
        num_top=num_top,
    )


def tokens(search):
    return [beam.token_ids for beam in search.beams]


def test_the_best_of_all_beams_go_on():
    search = searcher(width=2, num_top=1)
    assert search.num_candidates == 4
    assert search.advance([[(1, -0.5), (2, -1.0), (3, -3.0)]]) == [0, 0]
    assert tokens(search) == [(1,), (2,)]
    assert search.advance([[(1, -2.0), (2, -2.5)], [(4, -0.1), (5, -1.6)]]) == [1, 0]
    assert tokens(search) == [(2, 4), (1, 1)]
    assert search.beams[0].logprob == pytest.approx(-1.1)
    assert [(s.token_id, s.logprob, s.rank, s.top) for s in search.beams[0].scores] == [
        (2, -1.0, 2, ((1, -0.5),)),
        (4, -0.1, 1, ((4, -0.1),)),
    ]


def test_equal_scores_go_by_the_lowest_index():
    search = searcher(width=3)
    search.advance([[(7, -1.0), (5, -1.0), (6, -1.0), (1, -1.0)]])
    assert tokens(search) == [(7,), (5,), (6,)]
    assert search.advance([[(1, -1.0), (2, -1.0)], [(3, -1.0)], [(4, -0.5)]]) == [2, 0, 0]


def test_diversity_costs_later_candidates_but_no_log_probability():
    candidates = [[(1, -0.1), (2, -0.2)], [(3, -0.4), (4, -0.5)]]
    for rate, expected in ((0.0, [(1, 1), (1, 2)]), (1.0, [(1, 1), (2, 3)])):
        search = searcher(width=2, diversity_rate=rate)
        search.advance([[(1, -1.0), (2, -1.0)]])
        search.advance(candidates)
        assert tokens(search) == expected
    assert search.beams[1].logprob == pytest.approx(-1.4)


def test_an_end_below_the_width_is_no_hypothesis():
    search = searcher(width=1)
    search.advance([[(1, -0.1), (END, -0.2)]])
    assert not search.hypotheses
    search.advance([[(END, -0.1), (1, -0.2)]])
    assert [h.beam.token_ids for h in search.hypotheses] == [(1, END)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        (EarlyStopping.AT_ONCE, 1.0, True),
        # The hypothesis has -0.4 / 1; the beam may reach -0.5 / 1 now, and -0.5 / 10 later.
        (EarlyStopping.WHEN_UNLIKELY, 1.0, True),
        (EarlyStopping.NEVER, 1.0, False),
        (EarlyStopping.NEVER, 0.0, True),
        (EarlyStopping.NEVER, -1.0, True),
    ],
)
def test_when_it_is_over(early_stopping, length_penalty, is_over):
    search = searcher(width=1, early_stopping=early_stopping, length_penalty=length_penalty)
    search.advance([[(END, -0.4), (1, -0.5)]])
    assert search.is_over == is_over


def test_a_later_hypothesis_takes_the_place_of_a_worse_one():
    search = searcher(width=1, early_stopping=EarlyStopping.NEVER, max_tokens=3)
    search.advance([[(END, -0.4), (1, -0.5)]])
    search.advance([[(END, -0.1), (1, -0.2)]])
    assert search.hypotheses[0].score == pytest.approx(-0.3)
    search.advance([[(1, -5.0), (END, -6.0)]])
    assert search.is_over
    assert [h.beam.token_ids for h in search.hypotheses] == [(1, END)]


def test_all_ends_at_once():
    search = searcher(width=2, max_tokens=1)
    assert search.advance([[(1, -0.1), (END, -0.2), (3, -0.3)]]) == []
    assert search.is_over
    assert [(h.beam.token_ids, h.stop.reason) for h in search.hypotheses] == [
        ((1,), "length"),
        ((END,), "stop"),
    ]
