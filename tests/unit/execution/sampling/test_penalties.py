import pytest
import torch
from transformers.generation import logits_process as hf

from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.sampling.row_rules import TokenCounts, penalized


def penalize(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """logits [vocab]"""
    seen = TokenCounts(prompt, output).seen(())
    result = logits.clone()
    result[seen.token_ids] = penalized(logits[seen.token_ids], [seen], [params])
    return result


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    prompt, output = [1, 2, 2, 3], [3, 4, 4]
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    got = penalize(logits[0], prompt, output, SamplingParams(repetition_penalty=penalty))
    torch.testing.assert_close(got, expected[0])


def test_presence_and_frequency_count_the_output_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = penalize(torch.zeros(50), [1, 2], [2, 3, 3], params)
    assert got[:5].tolist() == [0.0, 0.0, -0.75, -1.0, 0.0]


def test_counts_grow_token_by_token():
    whole, grown = TokenCounts([5, 5, 9], range(100)), TokenCounts([5, 5, 9], ())
    for token_id in range(100):
        grown.add([token_id])
    for one, other in zip(whole.seen(()), grown.seen(()), strict=True):
        assert one.tolist() == other.tolist()
    token_ids, in_prompt, counts = whole.seen(())
    assert token_ids.tolist()[:2] == [5, 9]
    assert in_prompt.sum() == 2
    assert counts.tolist() == [1] * 100


def test_what_might_be_produced_is_not_remembered():
    counts = TokenCounts([1], [2])
    assert counts.seen((2, 3)).counts.tolist() == [0, 2, 1]
    assert counts.seen(()).counts.tolist() == [0, 1]
