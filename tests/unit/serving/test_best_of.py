"""Which of several completions are returned, and in which order."""

from loraplex.core.output import FinishReason, SequenceOutput, TokenLogprob
from loraplex.serving.best_of import BestOf, best_first


def piece(index, text, *logprobs, end=None):
    scores = tuple(TokenLogprob(7, value, 1) for value in logprobs)
    return SequenceOutput(index, text, (7,) * len(scores), scores, end)


def test_the_mean_decides_not_the_sum():
    long_and_likely, short_and_unlikely = [-1.0] * 10, [-2.0]
    assert best_first([short_and_unlikely, long_and_likely]) == [1, 0]


def test_of_equals_the_first_comes_first_and_an_empty_completion_last():
    assert best_first([[], [-1.0], [-1.0, -1.0], [-0.5]]) == [3, 1, 2, 0]


def test_the_best_are_numbered_by_rank_and_whole():
    best = BestOf(3, 2, shows_logprobs=True)
    best.add(piece(0, "a", -3.0))
    best.add(piece(1, "b", -1.0))
    best.add(piece(2, "c", -2.0, end=FinishReason.STOP))
    best.add(piece(0, "A", -3.0, end=FinishReason.LENGTH))
    best.add(piece(1, "B", -1.0, end=FinishReason.LENGTH))
    first, second = best.best()
    assert (first.index, first.text, first.token_ids) == (0, "bB", (7, 7))
    assert [entry.logprob for entry in first.logprobs] == [-1.0, -1.0]
    assert first.cumulative_logprob == -2.0
    assert (second.index, second.text, second.finish_reason) == (1, "c", FinishReason.STOP)


def test_log_probabilities_that_were_not_requested_are_not_shown():
    best = BestOf(2, 1, shows_logprobs=False)
    best.add(piece(0, "a", -3.0, end=FinishReason.STOP))
    best.add(piece(1, "b", -1.0, end=FinishReason.STOP))
    [only] = best.best()
    assert (only.text, only.logprobs, only.cumulative_logprob) == ("b", (), -1.0)
