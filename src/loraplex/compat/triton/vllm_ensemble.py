"""An ensemble of one step, which is a model of the vLLM backend.

It has that model's tensors under the names of its own.
"""

import dataclasses
from typing import TypeVar

from loraplex.compat.triton.config_json import completed_config
from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, VLLM, InputSpec, ModelKind, OutputSpec
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions

_Row = TypeVar("_Row", InputSpec, OutputSpec)

_MAX_BATCH_SIZE = 1
"""The step has no batch dimension, so that a batch of several cannot be passed to it."""


def vllm_ensemble(
    folder: ModelFolder, base: str, options: ModelOptions, notes: Notes
) -> ModelDeclaration:
    """Return what clients see of an ensemble of the vLLM model `base`. Raises ConfigError.

    options: those of that model.
    """
    steps = folder.config.ensemble_scheduling.step
    if len(steps) != 1:
        others = ", ".join(f"'{step.model_name}'" for step in steps if step.model_name != base)
        raise ConfigError(
            f"{folder.pbtxt}: ensemble '{folder.name}' passes tensors of the vLLM model '{base}' "
            f"through {others}; an ensemble of a vLLM model has that one step"
        )
    kind = _kind(folder, dict(steps[0].input_map), dict(steps[0].output_map))
    max_batch_size = folder.config.max_batch_size
    return ModelDeclaration(
        name=folder.name,
        kind=kind,
        base_model=base,
        version=folder.version,
        max_batch_size=min(max_batch_size, _MAX_BATCH_SIZE),
        is_decoupled=True,
        config=completed_config(
            folder, kind, notes, max_batch_size=max_batch_size, is_decoupled=True
        ),
        options=options,
    )


def _kind(folder: ModelFolder, inputs: dict[str, str], outputs: dict[str, str]) -> ModelKind:
    """Return the tensors of the ensemble. inputs, outputs: its names by the step's own."""
    for field, names, known in (
        ("input_map", inputs, VLLM.input),
        ("output_map", outputs, VLLM.output),
    ):
        for name in names:
            if known(name) is None:
                raise ConfigError(
                    f"{folder.line_of(field)}: {field}: a vLLM model has no tensor '{name}'"
                )
    for required in VLLM.required_inputs:
        if required not in inputs:
            raise ConfigError(
                f"{folder.line_of('input_map')}: input_map: '{required}' is missing, which a vLLM "
                "model needs"
            )
    return dataclasses.replace(
        ENSEMBLE,
        dialect=VLLM.dialect,
        inputs=tuple(_renamed(row, inputs) for row in VLLM.inputs if row.name in inputs),
        outputs=tuple(_renamed(row, outputs) for row in VLLM.outputs if row.name in outputs),
        output_names=outputs,
    )


def _renamed(row: _Row, names: dict[str, str]) -> _Row:
    return dataclasses.replace(row, name=names[row.name])
