"""Draws by Triton's programs, interpreted, against the reference with the programs' weights."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from loraplex.kernels import sampling as reference
from loraplex.kernels.cuda import sampling
from loraplex.kernels.cuda.sampling import draw_tokens
from loraplex.kernels.sampling import DrawOptions
from support.device_draws import reference_draws
from support.examples import examples

LARGEST_UNIFORM = 1 - 2**-53


@pytest.fixture(autouse=True)
def silent_numpy():
    """The interpreter's numpy warns of infinities, which are nothing special to a device."""
    with np.errstate(all="ignore"):
        yield


def options_of(
    num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniforms=None
) -> DrawOptions:
    return DrawOptions(
        np.full(num_rows, temperature, dtype=np.float32),
        np.full(num_rows, top_k, dtype=np.int64),
        np.full(num_rows, top_p, dtype=np.float64),
        np.full(num_rows, min_p, dtype=np.float64),
        np.random.default_rng(0).random(num_rows) if uniforms is None else np.array(uniforms),
    )


def rows_of_all_kinds(vocab_size: int) -> torch.Tensor:
    """Wide and narrow distributions, ties, both zeros, masked tokens, huge values."""
    logits = torch.randn(10, vocab_size)
    logits[0] *= 0.01
    logits[1] *= 30
    logits[2] = 0.0
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    logits[4, torch.rand(vocab_size) < 0.7] = -torch.inf
    logits[5] = -torch.inf
    logits[6] = (logits[6] * 3).round() / 2
    logits[7] *= 1e37
    logits[8] = -27.7 + 0.1 * torch.rand(vocab_size)  # weights of a few units: many equals
    logits[9] = 3.4e38 * torch.randn(vocab_size).sign()  # their range is no float32
    logits[:, vocab_size // 2] = logits.amax(-1).clamp(min=0.0)
    logits[8, 0] = 0.0
    return logits


def assert_as_the_reference(logits, rows, options):
    drawn = draw_tokens(logits, rows, options)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == reference_draws(logits, rows, options).tolist()


@pytest.mark.covering(1)
@pytest.mark.some(2)
@pytest.mark.parametrize(
    "vocab_size", [33, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 7, 1000))]
)
@pytest.mark.parametrize(
    "choices",
    [
        {"temperature": 0.7},
        {"temperature": 1e-4, "min_p": 0.3},
        {"top_k": 3, "temperature": 2.5},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_of_every_kind_of_row(vocab_size, choices):
    torch.default_generator.manual_seed(0)
    rows = np.array([9, 3, 4, 8]) if "top_p" in choices or "top_k" in choices else np.arange(10)
    assert_as_the_reference(rows_of_all_kinds(vocab_size), rows, options_of(len(rows), **choices))


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [2, 1030, 2500])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1 - 2**-53), (1, 1.0), (50, 0.5), (900, 1e-9), (2**31, 0.9)]
)
def test_every_filter_of_every_row(vocab_size, top_k, top_p):
    torch.default_generator.manual_seed(0)
    logits = rows_of_all_kinds(vocab_size)
    rows = np.arange(len(logits))[::-1]
    options = options_of(len(rows), top_k=top_k, top_p=top_p, min_p=0.01 * (top_k == 50))
    assert_as_the_reference(logits, rows, options)


@pytest.mark.slow
@examples(0.12, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_rows_and_options(data):
    """Few different logits, so that cuts go through equals; each row has other filters."""
    vocab_size, num_rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    logit = st.sampled_from([-torch.inf, -3.0, -0.0, 0.0, 0.5, 1.0, 1.0000001, 5.0])
    logits = [
        data.draw(st.lists(logit, min_size=vocab_size, max_size=vocab_size)) for _ in range(3)
    ]
    logits = torch.tensor(logits)
    logits[:, data.draw(st.integers(0, vocab_size - 1))] = 0.75
    rows = data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))

    def each(values):
        return np.array(data.draw(st.lists(values, min_size=num_rows, max_size=num_rows)))

    unit = st.floats(0.0, LARGEST_UNIFORM)
    options = DrawOptions(
        each(st.sampled_from([1e-5, 0.3, 1.0, 50.0])).astype(np.float32),
        each(st.integers(0, vocab_size + 1)),
        each(st.one_of(st.just(1.0), st.floats(1e-9, 1.0))),
        each(st.one_of(st.just(0.0), unit)),
        each(unit),
    )
    assert_as_the_reference(logits, np.array(rows), options)


@pytest.mark.slow
def test_a_cut_among_more_logits_than_are_listed(monkeypatch):
    monkeypatch.setattr(sampling, "_CAPACITY", 16)
    torch.default_generator.manual_seed(0)
    logits = 1e-3 * torch.randn(2, 1500).round(decimals=1)
    logits[:, 7] = 30.0  # so the levels do not part the others
    options = options_of(2, temperature=30.0, top_k=700, top_p=0.7)
    assert_as_the_reference(logits, np.arange(2), options)


@pytest.mark.slow
def test_splits_of_several_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_SPLITS", 2)
    torch.default_generator.manual_seed(0)
    logits = torch.randn(1, 2500)
    logits[0, 0] = -9.0  # so the cut is among many
    options = options_of(2, top_k=1900, top_p=0.95, uniforms=[0.6, LARGEST_UNIFORM])
    assert_as_the_reference(logits, np.array([0, 0]), options)


@pytest.mark.parametrize(
    ("choices", "last"),
    [
        ({"top_k": 3}, 2),
        ({"top_k": 8}, 7),
        ({"top_k": 9}, 7),
        ({"top_p": 0.5}, 3),
        ({"top_p": 0.5 + 1e-9}, 4),
        ({"min_p": 0.999}, 4),
    ],
    ids=str,
)
def test_the_last_token_that_stays(choices, last):
    """top-p halves eight equals; top-k and min-p cut logits that fall by 1e-3, and 2e-4."""
    logits = torch.zeros(1, 8)
    if "top_k" in choices:
        logits -= 1e-3 * torch.arange(8)
        logits[0, 7] = -20.0  # so that no level parts the others
    if "min_p" in choices:
        logits -= 2e-4 * torch.arange(8)
        logits[0, 5:] = -0.0011
    options = options_of(2, uniforms=[0.0, LARGEST_UNIFORM], **choices)
    assert draw_tokens(logits, np.array([0, 0]), options).tolist() == [0, last]


def test_min_p_is_compared_with_no_rounding():
    logits = torch.tensor([[0.0, -1.3]])
    weight = sampling.token_weights(logits, torch.ones(1))[0, 1].item()
    for min_p, last in ((weight / 2**40, 1), ((weight + 0.25) / 2**40, 0)):
        options = options_of(1, min_p=min_p, uniforms=[LARGEST_UNIFORM])
        assert draw_tokens(logits, np.arange(1), options).tolist() == [last]


def test_a_number_where_a_token_ends_is_the_next_one_s():
    """The token ends within a split, or where the next split begins."""
    options = options_of(3, uniforms=[0.25, 0.5, 0.5 - 2**-30])
    drawn = draw_tokens(torch.zeros(1, 2048), np.zeros(3, dtype=np.int64), options)
    assert drawn.tolist() == [512, 1024, 1023]


@pytest.mark.parametrize("max_splits", [1, 32])
def test_ties_of_several_blocks_stay_by_token_id(max_splits, monkeypatch):
    """All but one weigh the same; the nucleus holds that one, and 1066 of these."""
    monkeypatch.setattr(sampling, "MAX_SPLITS", max_splits)  # 32: a split is of one block
    logits = torch.zeros(1, 1100)
    logits[0, 1099] = 1.0
    options = options_of(2, top_p=0.97, uniforms=[0.997, LARGEST_UNIFORM])
    assert draw_tokens(logits, np.array([0, 0]), options).tolist() == [1065, 1099]


@pytest.mark.slow
def test_each_row_has_its_own_options_and_place():
    torch.default_generator.manual_seed(0)
    logits = torch.randn(5, 300)[:, 20:290]
    options = DrawOptions(
        np.array([0.5, 1.0, 2.0], dtype=np.float32),
        np.array([0, 5, 2**31]),
        np.array([0.7, 1.0, 1.0]),
        np.array([0.0, 0.0, 0.5]),
        np.array([0.9, 0.1, 0.6]),
    )
    rows = np.array([4, 1, 1])
    together = draw_tokens(logits, rows, options)
    assert together.tolist() == reference_draws(logits, rows, options).tolist()
    for index in range(3):
        alone = DrawOptions(
            *(getattr(options, name)[index : index + 1] for name in DrawOptions.__slots__)
        )
        assert draw_tokens(logits, rows[[index]], alone).item() == together[index]


def test_the_weights_are_nearly_those_of_the_reference():
    torch.default_generator.manual_seed(0)
    logits, temperature = 5 * torch.randn(3, 1500), torch.tensor([0.3, 1.0, 4.0])
    weights = sampling.token_weights(logits, temperature)
    expected = reference.token_weights(logits, temperature.unsqueeze(1))
    torch.testing.assert_close(weights.double(), expected.double(), rtol=2**-19, atol=1.0)
    assert weights.amax(-1).tolist() == [2**40] * 3


def test_nearly_all_tokens_are_those_of_the_reference_from_end_to_end():
    torch.default_generator.manual_seed(0)
    logits = 3 * torch.randn(25, 1000)
    options = options_of(25, temperature=0.9)
    drawn = draw_tokens(logits, np.arange(25), options)
    assert (drawn != reference.draw_tokens(logits, np.arange(25), options)).sum() <= 1


@pytest.mark.slow
def test_a_row_that_breaks_the_rules_gets_some_token():
    """It fails elsewhere; but its token may be looked up before that is known."""
    logits = torch.zeros(3, 50)
    logits[0], logits[1, 3], logits[2, 3] = -torch.inf, torch.inf, torch.nan
    options = options_of(3, top_p=0.5, uniforms=[0.0, 0.5, 0.9])
    drawn = draw_tokens(logits, np.arange(3), options)
    assert ((drawn >= 0) & (drawn < 50)).all()


def test_no_rows():
    assert draw_tokens(torch.zeros(3, 9), np.arange(0), options_of(0)).shape == (0,)
