"""Inputs of linear layers in models with layers that keep states, or that read more than others."""

import dataclasses
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import UnsupportedModelError
from loraplex.execution.quantizing.calibration import CalibrationInputs
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from support.feature_schedules import feature_checkpoint
from support.naming import naming
from support.tiny_decoder import tiny_spec
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


SPEC = tiny_spec(num_hidden_layers=2)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC.map_mixers(AttentionSpec, lambda one, i: dataclasses.replace(one, kv_distance=i)),
        dataclasses.replace(SPEC, layer_input_size=4),
    ],
    ids=["keys of another layer", "inputs of each layer"],
)
def test_a_layer_that_reads_more_than_the_hidden_state_is_refused(
    tmp_path: Path, spec: ModelSpec
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(spec.architecture, "--calibrate")):
        CalibrationInputs(tmp_path, spec, [[1]])
