"""Reads what a folder states of labels: fields of config.json. Free of torch."""

from pathlib import Path
from types import MappingProxyType
from typing import Final

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import ConfigError
from loraplex.core.task import PoolActivation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.sentence_transformers import activation_function
from loraplex.models.spec import ModelSpec

_NUM_LABELS: Final = 2
"""transformers' default, which its files leave out."""
_PROBLEMS: Final = MappingProxyType(
    {
        "regression": PoolActivation.NONE,
        "single_label_classification": PoolActivation.SOFTMAX,
        "multi_label_classification": PoolActivation.SIGMOID,
    }
)
"""Activations by `problem_type`."""
_FUNCTIONS: Final = MappingProxyType(
    {
        "Identity": PoolActivation.NONE,
        "Sigmoid": PoolActivation.SIGMOID,
        "Softmax": PoolActivation.SOFTMAX,
    }
)
"""Activations by the class of torch that sentence-transformers names; others are not computed."""


def num_labels(fields: ConfigFields) -> int:
    """Return the number of labels of a checkpoint with a classification head."""
    return len(_labels(fields)) or fields.integer("num_labels", _NUM_LABELS)


def read_class_format(folder: Path, fields: ConfigFields, spec: ModelSpec) -> ClassFormat:
    """Read the format of a folder's labels. fields: of its config.json. Raises ConfigError.

    A function that sentence-transformers names takes the place of what `problem_type` means.
    """
    problem = fields.text("problem_type", "single_label_classification")
    if problem not in _PROBLEMS:
        raise ConfigError(
            f"{fields.source}: problem_type must be one of {', '.join(_PROBLEMS)}, got {problem!r}"
        )
    function = activation_function(folder, fields)
    name = function.rpartition(".")[2]
    is_known = not name or name in _FUNCTIONS
    return ClassFormat(
        num_labels=spec.num_labels,
        labels=_labels(fields),
        activation=_FUNCTIONS.get(name, _PROBLEMS[problem]),
        pad_token_id=spec.pad_token_id if spec.is_causal else None,
        problem="" if is_known else f"its activation function {function} is not computed",
    )


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    """Return `id2label` in the order of the ids; empty if it is absent."""
    table = fields.table("id2label")
    if table is None:
        return ()
    names = [str(index) for index in range(len(list(table)))]
    if sorted(table) != sorted(names):
        raise ConfigError(
            f"{fields.source}: id2label must have the ids 0 to {len(names) - 1}, got "
            f"{', '.join(list(table)[:8])}"
        )
    return tuple(table.text(name, "") for name in names)
