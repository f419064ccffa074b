"""Native sampling against the torch reference: the same tokens exactly, whatever the row."""

import itertools

import numpy as np
import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.kernels import sampling
from loraplex.kernels.native.library import (
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.sampling import NativeSampling
from loraplex.kernels.sampling import DrawOptions
from support.cases_in_turn import in_turn
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

VOCABS = in_turn("vocab_size", [1, 2, 31, 64, 65, 1000, 5003])
FILTERS = list(
    itertools.product([0, 1, 3, 50, 4000, 2**31], [1.0, 0.9, 0.3, 1e-6, 1 - 1e-9], [0.0, 0.05, 1.0])
)


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


def kernel_of(library, num_threads=2) -> NativeSampling:
    return NativeSampling(library, ThreadPool(library, num_threads))


def rows_of_all_kinds(vocab_size: int) -> torch.Tensor:
    """Wide and narrow distributions, ties, both zeros, masked tokens, huge values."""
    plain = torch.randn(14, vocab_size)
    plain[0] *= 0.01
    plain[1] *= 30
    plain[2] = plain[2].round()
    plain[3] = 0.0
    plain[4, ::2] = -0.0
    plain[4, 1::2] = 0.0
    plain[5, torch.rand(vocab_size) < 0.7] = -torch.inf
    plain[6] = -torch.inf
    plain[7] = (plain[7] * 3).round() / 2
    plain[8] *= 1e37
    plain[9] = -torch.arange(vocab_size) * 0.03
    plain[10] = -27.7 + 0.1 * torch.rand(vocab_size)  # weights of a few units, next to the largest
    plain[11] = 1e-42  # not normal
    plain[12] = -plain[12].abs()
    plain[:, vocab_size // 2] = plain.amax(-1).clamp(min=0.0)
    plain[10, 0] = 0.0
    return plain


def options_of(filters) -> DrawOptions:
    num_rows = len(filters)
    top_k, top_p, min_p = map(np.array, zip(*filters, strict=True))
    generator = np.random.default_rng(1)
    return DrawOptions(
        temperature=generator.choice(np.array([0.3, 1.0, 2.7], dtype=np.float32), num_rows),
        top_k=top_k.astype(np.int64),
        top_p=top_p.astype(np.float64),
        min_p=min_p.astype(np.float64),
        uniforms=np.where(generator.random(num_rows) < 0.1, 1 - 2**-53, generator.random(num_rows)),
    )


@VOCABS
def test_every_filter_of_every_row_draws_the_reference_s_token(library, vocab_size):
    kernel, logits = kernel_of(library), rows_of_all_kinds(vocab_size)
    for row in range(len(logits)):
        rows = np.full(len(FILTERS), row)
        options = options_of(FILTERS)
        drawn = kernel.draw_tokens(logits, rows, options)
        expected = sampling.draw_tokens(logits, rows, options)
        assert drawn.tolist() == expected.tolist()


def test_a_whole_vocabulary(library):
    """More rows than fit in one chunk, in mixed order."""
    logits = 4 * torch.randn(30, 128_256)
    logits[3] = (logits[3] * 8).round() / 8
    filters = [
        ((0, 50, 2000)[i % 3], (1.0, 0.9)[i % 2], (0.0, 0.01)[i // 3 % 2]) for i in range(30)
    ]
    rows, options = np.arange(30)[::-1].copy(), options_of(filters)
    drawn = kernel_of(library).draw_tokens(logits, rows, options)
    assert drawn.tolist() == sampling.draw_tokens(logits, rows, options).tolist()


def test_uniform_numbers_reach_every_candidate(library):
    """Where each token begins and ends in the cumulative distribution, top-k and top-p cut."""
    logits = torch.log(torch.tensor([[4.0, 1.0, 8.0, 2.0, 1.0]]))
    numbers = np.append(np.arange(0, 1, 1 / 64), 1 - 2**-53)
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.85), (4, 0.9)):
        options = DrawOptions(
            np.ones(len(numbers), dtype=np.float32),
            np.full(len(numbers), top_k),
            np.full(len(numbers), top_p),
            np.zeros(len(numbers)),
            numbers,
        )
        rows = np.zeros(len(numbers), dtype=np.int64)
        drawn = kernel_of(library).draw_tokens(logits, rows, options).tolist()
        assert drawn == sampling.draw_tokens(logits, rows, options).tolist()
        assert drawn == sorted(drawn)
        assert set(drawn) >= {0, 2, 3}


@VOCABS
def test_argmax(library, vocab_size):
    logits = rows_of_all_kinds(vocab_size)
    rows = np.array([3, 1, 0, *range(len(logits))])
    ids, maxima = kernel_of(library).argmax(logits, rows)
    expected_ids, expected = sampling.argmax(logits, rows)
    assert ids.tolist() == expected_ids.tolist()
    assert torch.equal(maxima, expected)


@VOCABS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_argmax_of_narrow_logits(library, vocab_size, dtype):
    """Rounding makes ties: of them the first."""
    logits = rows_of_all_kinds(vocab_size).clamp(-6e4, 6e4).to(dtype)
    rows = np.arange(len(logits))
    ids, maxima = kernel_of(library).argmax(logits, rows)
    expected_ids, expected = sampling.argmax(logits.float(), rows)
    assert ids.tolist() == expected_ids.tolist()
    assert torch.equal(maxima, expected)


def test_argmax_of_rows_that_are_not_numbers(library):
    logits = torch.zeros(5, 100)
    logits[0, 70] = torch.nan
    logits[1, 70] = -torch.nan
    logits[2] = -torch.inf
    logits[3, 70] = torch.inf
    _, maxima = kernel_of(library).argmax(logits, np.arange(5))
    assert maxima.isnan().tolist() == [True, True, False, False, False]
    assert maxima.tolist()[2:] == [-torch.inf, torch.inf, 0.0]


@VOCABS
@in_turn("num_top", [0, 1, 5, 20])
def test_top_logprobs(library, vocab_size, num_top):
    num_top = min(num_top, vocab_size)
    logits = rows_of_all_kinds(vocab_size)
    rows = np.arange(len(logits)).repeat(3)
    chosen = np.random.default_rng(0).integers(0, vocab_size, len(rows))
    found = kernel_of(library).top_logprobs(logits, rows, chosen, num_top)
    expected = sampling.top_logprobs(logits, rows, chosen, num_top)
    assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(found.top_ids, expected.top_ids)
    exact = logits.double().log_softmax(-1)[torch.from_numpy(rows)]
    for got, ids in (
        (found.logprobs.unsqueeze(1), torch.from_numpy(chosen).unsqueeze(1)),
        (found.top_logprobs, found.top_ids),
        (expected.top_logprobs, expected.top_ids),
    ):
        torch.testing.assert_close(got.double(), exact.gather(1, ids), rtol=3e-6, atol=3e-6)


def test_the_reference_s_likeliest_tokens_come_in_order():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    found = sampling.top_logprobs(logits, np.array([0]), np.array([4]), 4)
    assert found.top_ids.tolist() == [[1, 3, 2, 4]]
    assert found.ranks.tolist() == [3]


def test_bits_depend_neither_on_the_instruction_set_nor_on_threads_nor_on_company():
    torch.default_generator.manual_seed(0)
    logits = 5 * torch.randn(7, 32_000)
    rows, chosen = np.arange(7), np.arange(7) * 1000
    # "generic" has no fused multiply-add: it is compared where there is nothing else.
    names = [name for name in INSTRUCTION_SETS if name != "generic"] or INSTRUCTION_SETS
    results = [
        kernel_of(load_library([name]), num_threads).top_logprobs(logits, rows, chosen, 5)
        for name in names
        for num_threads in (1, 3)
    ]
    for result in results:
        assert torch.equal(result.logprobs, results[0].logprobs)
        assert torch.equal(result.top_logprobs, results[0].top_logprobs)
    kernel = kernel_of(load_library())
    for row in range(7):
        alone = kernel.top_logprobs(logits[row : row + 1].clone(), rows[:1], chosen[[row]], 5)
        assert torch.equal(alone.top_logprobs[0], results[0].top_logprobs[row])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 4097])
def test_bitmask(library, vocab_size):
    num_words = -(-vocab_size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (9, num_words + 1), dtype=torch.int32)[:, :num_words]
    logits = torch.randn(12, vocab_size + 5)[:, 2 : vocab_size + 2]
    rows = np.array([3, 4, 0, 11, 7, 2, 1, 9, 10])
    expected = logits.clone()
    for index, token_id in itertools.product(range(9), range(vocab_size)):
        if not int(bitmask[index, token_id // 32]) >> token_id % 32 & 1:
            expected[rows[index], token_id] = -torch.inf
    by_reference = logits.clone()
    sampling.apply_bitmask(by_reference, rows, bitmask)
    kernel_of(library).apply_bitmask(logits, rows, bitmask)
    assert torch.equal(logits, expected)
    assert torch.equal(by_reference, expected)


def test_sizes_that_cannot_be_are_refused(library):
    with pytest.raises(InternalError, match=naming("loraplex_top_logprobs")):
        kernel_of(library).top_logprobs(torch.zeros(1, 3), np.array([0]), np.array([0]), 4)
