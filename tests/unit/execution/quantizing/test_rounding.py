"""Rounding to integers: scales, clips, error feedback, and the words that hold the codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.execution.quantizing.rounding import IntegerForm, quantize_weight
from loraplex.execution.weights.quantized.stored_weight import packed, unpacked
from support.quantized_checkpoints import words_of


def random_weight(num_outputs: int = 24, num_inputs: int = 256) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))


def correlated_inputs(num_inputs: int = 256) -> torch.Tensor:
    """Return X [512, in], whose columns depend on one another."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(512, 40, generator=generator) @ torch.randn(
        40, num_inputs, generator=generator
    )
    return mixed + 0.1 * torch.randn(512, num_inputs, generator=generator)


@given(bits=st.integers(1, 8), num_values=st.integers(1, 100), seed=st.integers(0, 1 << 30))
def test_words_hold_codes_as_one_long_integer(bits: int, num_values: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, num_values), generator=generator).to(torch.uint8)
    words = packed(codes, bits)
    assert torch.equal(words, words_of(codes, bits))
    assert torch.equal(unpacked(words, bits, 1, num_values), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [IntegerForm(4, 128), IntegerForm(8, None), IntegerForm(4, 32)])
def test_errors_are_those_of_the_decoded_weight(form: IntegerForm, dtype: torch.dtype) -> None:
    weight, inputs = random_weight().to(dtype), correlated_inputs()
    for moments in (None, inputs.T @ inputs):
        stored, error = quantize_weight(weight, form, moments)
        difference = weight.float() - stored.decoded()
        assert error.relative_weight == pytest.approx(
            (difference.norm() / weight.float().norm()).item(), rel=1e-4
        )
        assert torch.equal(stored.scales.to(dtype).float(), stored.scales)
        if moments is None:
            assert error.relative_output is None
        else:
            outputs = (inputs @ difference.T).norm() / (inputs @ weight.float().T).norm()
            assert error.relative_output == pytest.approx(outputs.item(), rel=1e-2)


def test_the_best_clip_beats_none() -> None:
    weight = random_weight()
    stored, error = quantize_weight(weight, IntegerForm(4, 128))
    scales = weight.view(24, 2, 128).abs().amax(-1).div(7).repeat_interleave(128, 1)
    unclipped = (weight / scales).round() * scales
    assert error.relative_weight < 0.97 * ((weight - unclipped).norm() / weight.norm()).item()
    # No scale of the group that is 2 % off is better, beyond the steps of the search.
    for factor in (0.98, 1.02):
        other = (stored.scales * factor).repeat_interleave(128, 1)
        moved = (weight / other).round().clamp(-8, 7) * other
        assert (weight - moved).norm() > 0.99 * (weight - stored.decoded()).norm()


@pytest.mark.parametrize("form", [IntegerForm(4, 128), IntegerForm(4, None), IntegerForm(4, 32)])
def test_feedback_lessens_the_error_of_outputs(form: IntegerForm) -> None:
    weight, inputs = random_weight(), correlated_inputs()
    moments = inputs.T @ inputs
    plain, _ = quantize_weight(weight, form)
    fitted, error = quantize_weight(weight, form, moments)
    again, _ = quantize_weight(weight, form, moments)
    assert torch.equal(fitted.codes, again.codes)
    plain_error = (inputs @ (weight - plain.decoded()).T).norm() / (inputs @ weight.T).norm()
    assert error.relative_output is not None
    assert error.relative_output < 0.5 * plain_error.item()


def test_without_correlations_feedback_has_nothing_to_give() -> None:
    """A diagonal H makes the columns independent: the codes are those of the nearest numbers."""
    weight = random_weight()
    fitted, _ = quantize_weight(weight, IntegerForm(8, 64), torch.eye(256))
    plain, _ = quantize_weight(weight, IntegerForm(8, 64))
    assert torch.equal(fitted.codes, plain.codes)


def test_zeros_and_inputs_that_never_occur() -> None:
    weight, inputs = random_weight(), correlated_inputs()
    weight[:, :128] = 0
    inputs[:, 200:] = 0
    for moments in (None, inputs.T @ inputs, torch.zeros(256, 256)):
        stored, error = quantize_weight(weight, IntegerForm(4, 128), moments)
        assert not stored.decoded()[:, :128].any()
        assert 0 < error.relative_weight < 0.2


@pytest.mark.parametrize(
    ("num_inputs", "group_size", "wanted"),
    [
        *((256, 128, 128), (192, 128, 64), (96, 128, 32), (80, 128, None), (100, 128, None)),
        *((32, 128, 32), (48, 16, 16), (40, 16, None), (40, None, None)),
    ],
)
def test_groups_are_equal(num_inputs: int, group_size: int | None, wanted: int | None) -> None:
    form = IntegerForm(4, group_size)
    assert form.size_for(num_inputs) == wanted
    stored, _ = quantize_weight(random_weight(8, num_inputs), form)
    assert stored.scales.shape == (8, num_inputs // (wanted or num_inputs))
    stored.checked("weight")
