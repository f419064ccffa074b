"""A model's configuration as clients get it: the fields of model_config.proto as JSON, completed as
Triton completes them, and held against what the model's kind reads and writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from loraplex.compat.triton.model_folder import ModelFolder, Notes, is_placeholder
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.kinds import ModelKind
from loraplex.frontends.kserve.models.triton_model import tensor_config
from loraplex.frontends.kserve.tensors import DATATYPES

_TYPE_NAMES = {row.config_name: row.name for row in DATATYPES.values()}
_FLOATS = ("FP16", "BF16", "FP32")
"""A template lets its user choose between them."""
_NUMBERS = frozenset(
    {
        *("dims", "shape", "versions", "model_version", "device_id"),
        *("max_queue_delay_microseconds", "default_timeout_microseconds"),
        *("priority_levels", "default_priority_level", "max_sequence_idle_microseconds"),
    }
)
"""Fields of 64 bits, which protobuf's JSON writes as texts."""


def completed_config(
    folder: ModelFolder,
    kind: ModelKind,
    notes: Notes,
    *,
    max_batch_size: int,
    is_decoupled: bool,
    adds_tensors: bool = False,
) -> dict[str, Any]:
    """Raises ConfigError for a tensor of another type than the kind has.

    adds_tensors: those that the kind has and the file does not declare are added, as the vLLM
    backend does; otherwise only where the file declares none.
    """
    config: dict[str, Any] = _with_numbers(
        json_format.MessageToDict(
            folder.config,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
    )
    _check_tensors(folder, "input", _types(kind.inputs), notes)
    _check_tensors(folder, "output", _types(kind.outputs), notes)
    for field, rows in tensor_config(kind).items():
        declared = {row["name"] for row in config[field]}
        if adds_tensors or not declared:
            config[field] += [row for row in rows if row["name"] not in declared]
    return {
        **config,
        "name": folder.name,
        "platform": kind.platform,
        "backend": kind.backend if is_placeholder(config["backend"]) else config["backend"],
        "version_policy": config.get("version_policy") or {"latest": {"num_versions": 1}},
        "max_batch_size": max_batch_size,
        "instance_group": _named_groups(folder.name, config["instance_group"]),
        "model_transaction_policy": {"decoupled": is_decoupled},
    }


def declared_datatype(folder: ModelFolder, output: str) -> str | None:
    """Return the protocol's name of an output's type; None: it is not declared."""
    for row in folder.config.output:
        if row.name == output:
            return _TYPE_NAMES.get(_type_name(folder, row))
    return None


def _type_name(folder: ModelFolder, row: Any) -> str:
    enum = folder.config.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    return str(enum[row.data_type].name)


def _types(rows: Iterable[Any]) -> Mapping[str, Sequence[str]]:
    """Return the types that each tensor may have."""
    return {row.name: (row.datatype, *getattr(row, "other_datatypes", ())) for row in rows}


def _check_tensors(
    folder: ModelFolder, field: str, types: Mapping[str, Sequence[str]], notes: Notes
) -> None:
    for row in getattr(folder.config, field):
        if row.name not in types:
            notes.warning(f"{folder.pbtxt}: {field} '{row.name}' is declared, but not known here")
            continue
        written = _type_name(folder, row)
        allowed = types[row.name]
        is_float = _TYPE_NAMES.get(written) in _FLOATS and allowed[0] in _FLOATS
        if _TYPE_NAMES.get(written) not in allowed and not is_float:
            names = " or ".join(DATATYPES[name].config_name for name in allowed)
            raise ConfigError(
                f"{folder.line_of_tensor(row.name)}: {field} '{row.name}' has data_type {written}, "
                f"but it is {names}"
            )


def _named_groups(model: str, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups without a name have the model's, and a number."""
    declared = groups or [{"name": "", "kind": "KIND_MODEL", "count": 1}]
    return [
        {**group, "name": group["name"] or f"{model}_{i}", "count": group["count"] or 1}
        for i, group in enumerate(declared)
    ]


def _with_numbers(value: Any, field: str = "") -> Any:
    """field: that a value stands under."""
    if isinstance(value, dict):
        return {key: _with_numbers(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry, field) for entry in value]
    if isinstance(value, str) and field in _NUMBERS and value.lstrip("-").isdigit():
        return int(value)
    return value
