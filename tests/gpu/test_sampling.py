"""Sampling of whole vocabularies on a device: the reference's results, and nothing waits."""

import contextlib

import numpy as np
import pytest
import torch

from loraplex.kernels import sampling as reference
from loraplex.kernels.cuda import sampling
from loraplex.kernels.sampling import DrawOptions
from support.device_draws import reference_draws

pytestmark = pytest.mark.gpu

VOCAB = 128_256
BATCHES = pytest.mark.parametrize("num_rows", [1, 7, 64, 256])


@contextlib.contextmanager
def nothing_waits():
    """torch raises where an op would block the host until the device is done."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def logits_of(num_rows, vocab_size=VOCAB):
    """Wide and narrow distributions, ties, masked tokens, huge values; one kind after another."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator, device="cuda")
    scales = torch.tensor([3.0, 0.01, 30.0, 3.0, 1.0, 1e37], device="cuda")
    kinds = torch.arange(num_rows, device="cuda") % 6
    logits *= scales[kinds].unsqueeze(1)
    logits[kinds == 3] = (4 * logits[kinds == 3]).round() / 4
    is_masked = torch.rand(logits.shape, generator=generator, device="cuda") < 0.7
    logits[(kinds == 4).unsqueeze(1) & is_masked] = -torch.inf
    logits[:, vocab_size // 2] = 0.0
    return logits


def options_of(num_rows, **choices):
    generator = np.random.default_rng(num_rows)

    def each(name, values, dtype):
        return generator.choice(np.array(choices.get(name, values), dtype=dtype), num_rows)

    return DrawOptions(
        each("temperature", [0.3, 1.0, 2.7], np.float32),
        each("top_k", [0, 1, 50, 5000, 2**31], np.int64),
        each("top_p", [1.0, 0.95, 0.3, 1e-6, 1 - 1e-9], np.float64),
        each("min_p", [0.0, 0.0, 0.05], np.float64),
        generator.random(num_rows),
    )


@BATCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_argmax(num_rows, dtype):
    logits = logits_of(num_rows).clamp(-6e4, 6e4).to(dtype)
    rows = np.arange(num_rows)[:: 1 if num_rows == 64 else -1]
    with nothing_waits():
        token_ids, maxima = sampling.argmax(logits, rows)
    wide = logits.float().cpu()[torch.from_numpy(rows.copy())]
    assert torch.equal(maxima.cpu(), wide.amax(-1))
    assert token_ids.tolist() == wide.numpy().argmax(-1).tolist()  # of equals the first


def test_the_maximum_of_a_row_with_nan_is_nan():
    logits = logits_of(6)
    logits[2, 77_777] = torch.nan
    _, maxima = sampling.argmax(logits, np.arange(6))
    assert maxima.isnan().tolist() == [False, False, True, False, False, False]


@BATCHES
@pytest.mark.parametrize(
    "choices",
    [
        {"top_k": [0], "top_p": [1.0], "min_p": [0.0]},
        {"top_k": [50], "top_p": [1.0]},
        {"top_k": [0], "top_p": [0.9]},
        {},
    ],
    ids=["plain", "top-k", "top-p", "mixed"],
)
def test_draws(num_rows, choices):
    logits, rows = logits_of(num_rows), np.arange(num_rows)[::-1].copy()
    options = options_of(num_rows, **choices)
    with nothing_waits():
        drawn = sampling.draw_tokens(logits, rows, options)
    assert drawn.tolist() == reference_draws(logits, rows, options).tolist()


@pytest.mark.parametrize("vocab_size", [7, 33, 1000, 32_001])
def test_draws_of_any_vocabulary(vocab_size):
    logits, options = logits_of(60, vocab_size), options_of(60)
    drawn = sampling.draw_tokens(logits, np.arange(60), options)
    assert drawn.tolist() == reference_draws(logits, np.arange(60), options).tolist()


def test_nearly_all_draws_are_those_of_torch_s_exp():
    logits, options = logits_of(600, 32_000), options_of(600)
    drawn = sampling.draw_tokens(logits, np.arange(600), options)
    expected = reference.draw_tokens(logits.cpu(), np.arange(600), options)
    assert (drawn.cpu() != expected).sum() <= 6


@BATCHES
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_top_logprobs(num_rows, num_top):
    logits, rows = logits_of(num_rows), np.arange(num_rows)
    chosen = np.random.default_rng(0).integers(0, VOCAB, num_rows)
    with nothing_waits():
        found = sampling.top_logprobs(logits, rows, chosen, num_top)
    expected = reference.top_logprobs(logits, rows, chosen, num_top)
    assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(found.top_ids, expected.top_ids)
    for got, right in (
        (found.logprobs, expected.logprobs),
        (found.top_logprobs, expected.top_logprobs),
    ):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@BATCHES
def test_bitmask(num_rows):
    logits, rows = logits_of(num_rows + 3), np.arange(num_rows) + 2
    shape = (num_rows, VOCAB // 32)
    bitmask = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    expected = logits.cpu()
    reference.apply_bitmask(expected, rows, bitmask.cpu())
    with nothing_waits():
        sampling.apply_bitmask(logits, rows, bitmask)
    assert torch.equal(logits.cpu(), expected)
