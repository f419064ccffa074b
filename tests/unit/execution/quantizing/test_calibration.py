"""Inputs of linear layers in models with layers that keep states."""

from pathlib import Path

import torch

from loraplex.execution.quantizing.calibration import CalibrationInputs
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.feature_schedules import feature_checkpoint
from support.toy_recurrence import known_recurrence, with_recurrence

EVERY = 32


def changed(spec: ModelSpec) -> ModelSpec:
    return with_recurrence(spec, (0, 2), EVERY)


def test_layers_with_states_read_the_whole_text(tmp_path: Path) -> None:
    """What a layer computes depends on the first token, which is two states before the last."""
    model = feature_checkpoint(tmp_path, changed, num_hidden_layers=3)
    spec = changed(read_config(model))

    def last_input(*first_tokens: int) -> torch.Tensor:
        """Return the mean square of the last layer's inputs, [hidden]."""
        texts = [[first, *range(5, 80)] for first in first_tokens]
        inputs = CalibrationInputs(model, spec, texts)
        for layer in range(spec.num_layers):
            moments = inputs.moments(layer)
            inputs.proceed(layer, {})
        return moments["up"].diagonal() / inputs.num_tokens

    with known_recurrence():
        one, other, both = last_input(3), last_input(4), last_input(3, 4)
    assert not torch.allclose(one, other)
    torch.testing.assert_close(both, (one + other) / 2)
