"""Argmax, log probabilities and bitmasks by Triton's programs, interpreted, as the reference."""

import numpy as np
import pytest
import torch

from loraplex.kernels import sampling as reference
from loraplex.kernels.cuda import sampling
from loraplex.kernels.cuda.sampling import Splits, device_rows

VOCABS = pytest.mark.parametrize("vocab_size", [1, 7, 33, 2100])


@pytest.fixture(autouse=True)
def silent_numpy():
    """The interpreter's numpy warns of infinities, which are nothing special to a device."""
    with np.errstate(all="ignore"):
        yield


def logits_of(vocab_size: int) -> torch.Tensor:
    """Some normal, some of equals, some masked, some large; rows of a wider tensor."""
    torch.default_generator.manual_seed(0)
    logits = torch.randn(6, vocab_size + 5)[:, 3 : vocab_size + 3]
    logits[1] = (2 * logits[1]).round()
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    logits[3, torch.rand(vocab_size) < 0.7] = -torch.inf
    logits[3, vocab_size // 2] = 2.0
    logits[4] *= 1e4
    logits[5] = -logits[5].abs() - 1.0
    return logits


@pytest.mark.covering(2)
@pytest.mark.some(8)
@VOCABS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 1, 1, 3]], ids=str)
def test_argmax(vocab_size, dtype, rows):
    logits, rows = logits_of(vocab_size).to(dtype), np.array(rows)
    token_ids, maxima = sampling.argmax(logits, rows)
    expected_ids, expected = reference.argmax(logits.float(), rows)
    assert token_ids.dtype == torch.int64
    assert token_ids.tolist() == expected_ids.tolist()
    assert maxima.dtype == torch.float32
    assert torch.equal(maxima, expected)


@pytest.mark.parametrize("place", [0, 700, 1099])
def test_the_maximum_of_a_row_with_nan_is_nan(place):
    logits = torch.zeros(5, 1100)
    logits[0, place] = torch.nan
    logits[1, place] = -torch.nan
    logits[2] = -torch.inf
    logits[3, place] = torch.inf
    logits[4, 5], logits[4, place] = torch.inf, torch.nan
    token_ids, maxima = sampling.argmax(logits, np.arange(5))
    assert maxima.isnan().tolist() == [True, True, False, False, True]
    assert maxima[2:4].tolist() == [-torch.inf, torch.inf]
    assert token_ids[2:4].tolist() == [0, place]


def test_of_equals_in_several_blocks_of_several_splits_the_first(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_SPLITS", 2)  # so that a split is of two blocks
    logits = torch.zeros(2, 2500)
    logits[1, [1500, 1030, 2300]] = 1.0
    token_ids, _ = sampling.argmax(logits, np.arange(2))
    assert token_ids.tolist() == [0, 1030]
    found = sampling.top_logprobs(logits, np.arange(2), np.array([5, 5]), 4)
    assert found.ranks.tolist() == [1, 4]
    assert found.top_ids.tolist() == [[0, 1, 2, 3], [1030, 1500, 2300, 0]]
    expected = reference.top_logprobs(logits, np.arange(2), np.array([5, 5]), 4)
    torch.testing.assert_close(found.logprobs, expected.logprobs)


def test_no_rows_have_no_maxima():
    token_ids, maxima = sampling.argmax(torch.zeros(2, 9), np.arange(0))
    assert token_ids.shape == maxima.shape == (0,)


@pytest.mark.parametrize("vocab_size", [1, 31, 1023, 1024, 1025, 32_000, 128_256, 262_144])
def test_no_split_of_a_vocabulary_is_empty(vocab_size):
    splits = Splits(vocab_size)
    assert (splits.number - 1) * splits.size < vocab_size <= splits.number * splits.size
    assert 1 <= splits.number <= 32


def test_the_first_rows_need_no_indices():
    assert device_rows(np.arange(4), torch.device("cpu")) is None
    indices = device_rows(np.arange(4)[::-1], torch.device("cpu"))
    assert indices is not None
    assert indices.tolist() == [3, 2, 1, 0]


@pytest.mark.some(4)
@VOCABS
@pytest.mark.parametrize("num_top", [0, 5])
def test_top_logprobs(vocab_size, num_top, monkeypatch):
    monkeypatch.setattr(sampling, "_CHUNK_ROWS", 4)
    num_top, logits = min(num_top, vocab_size), logits_of(vocab_size)
    rows = np.array([1, 0, 2, 3, 4, 5, 1])
    chosen = np.random.default_rng(0).integers(0, vocab_size, len(rows))
    found = sampling.top_logprobs(logits, rows, chosen, num_top)
    expected = reference.top_logprobs(logits, rows, chosen, num_top)
    assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(found.top_ids, expected.top_ids)
    assert found.top_logprobs.shape == (7, num_top)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(found.top_logprobs, expected.top_logprobs, rtol=3e-6, atol=3e-6)


def test_log_probabilities_do_not_depend_on_company():
    logits = logits_of(2100)
    together = sampling.top_logprobs(logits, np.arange(6), np.arange(6), 3)
    alone = sampling.top_logprobs(logits[4:5], np.arange(1), np.array([4]), 3)
    assert torch.equal(alone.logprobs[0], together.logprobs[4])
    assert torch.equal(alone.top_logprobs[0], together.top_logprobs[4])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 2049])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 0, 5]], ids=str)
def test_bitmask(vocab_size, rows):
    num_words = -(-vocab_size // 32)
    torch.default_generator.manual_seed(0)
    bitmask = torch.randint(-(2**31), 2**31, (3, num_words + 1), dtype=torch.int32)[:, :num_words]
    logits = torch.randn(6, vocab_size + 5)
    expected = logits.clone()
    reference.apply_bitmask(expected[:, 2 : vocab_size + 2], np.array(rows), bitmask)
    sampling.apply_bitmask(logits[:, 2 : vocab_size + 2], np.array(rows), bitmask)
    assert torch.equal(logits, expected)
