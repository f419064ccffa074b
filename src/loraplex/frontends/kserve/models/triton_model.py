"""A Triton model that is served, with its metadata and configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from loraplex.frontends.kserve.datatypes import DATATYPES
from loraplex.frontends.kserve.models.declaration import ModelDeclaration, ModelOptions
from loraplex.frontends.kserve.models.kinds import InputSpec, ModelKind
from loraplex.serving.backend import ModelCard

VERSION = "1"

_DATATYPE_NAMES = {row.config_name: row.name for row in DATATYPES.values()}
"""Data type names by the names in model configurations."""


@dataclasses.dataclass(frozen=True)
class TritonModel:
    """A name that clients send requests to."""

    name: str
    kind: ModelKind
    card: ModelCard
    """The base model that it runs on."""
    max_batch_size: int
    """0: tensors have no batch dimension."""
    version: str = VERSION
    is_decoupled: bool | None = None
    """See ModelDeclaration.is_decoupled."""
    options: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    declared_config: Mapping[str, Any] | None = None

    @classmethod
    def declared(cls, declaration: ModelDeclaration, card: ModelCard) -> "TritonModel":
        return cls(
            declaration.name,
            declaration.kind,
            card,
            declaration.max_batch_size,
            declaration.version,
            declaration.is_decoupled,
            declaration.options,
            declaration.config,
        )

    def output_datatype(self, output: str) -> str:
        """The data type that the configuration declares for an output of the kind."""
        for row in (self.declared_config or {}).get("output", ()):
            if row["name"] == output:
                return _DATATYPE_NAMES[row["data_type"]]
        declared = self.kind.output(output)
        assert declared is not None, "an output of the kind"
        return declared.datatype

    def metadata(self) -> dict[str, Any]:
        """Response to a metadata request; shapes include the batch dimension, if there is one."""
        config = self.config()
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": config["platform"] or config["backend"],
            "inputs": [self._metadata_row(row) for row in config["input"]],
            "outputs": [self._metadata_row(row) for row in config["output"]],
        }

    def config(self) -> dict[str, Any]:
        """The model configuration, with the fields and words of Triton's model_config.proto."""
        if self.declared_config is not None:
            return dict(self.declared_config)
        kind = self.kind
        return {
            "name": self.name,
            "platform": kind.platform,
            "backend": kind.backend,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": self.max_batch_size,
            **tensor_config(kind),
            "instance_group": [{"name": self.name, "kind": "KIND_MODEL", "count": 1}],
            "parameters": {},
            "model_transaction_policy": {"decoupled": bool(self.is_decoupled)},
        }

    def _metadata_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        batch = [-1] if self.max_batch_size else []
        datatype = _DATATYPE_NAMES[row["data_type"]]
        return {"name": row["name"], "datatype": datatype, "shape": [*batch, *row["dims"]]}


def tensor_config(kind: ModelKind) -> dict[str, Any]:
    """The fields `input` and `output` of a model configuration that declares all of a kind."""
    return {
        "input": [_config_input(row) for row in kind.declared_inputs],
        "output": [
            {
                "name": row.name,
                "data_type": DATATYPES[row.datatype].config_name,
                "dims": list(row.dims),
                "label_filename": "",
                "is_shape_tensor": False,
            }
            for row in kind.declared_outputs
        ],
    }


def _config_input(row: InputSpec) -> dict[str, Any]:
    return {
        "name": row.name,
        "data_type": DATATYPES[row.datatype].config_name,
        "format": "FORMAT_NONE",
        "dims": list(row.dims),
        **({"reshape": {"shape": []}} if row.has_scalar_reshape else {}),
        "is_shape_tensor": False,
        "allow_ragged_batch": row.is_ragged,
        "optional": not row.required,
    }
