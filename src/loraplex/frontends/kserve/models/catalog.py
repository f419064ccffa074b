"""Which Triton model names there are, and what metadata and configuration say about them.

`ensemble` and `tensorrt_llm` are the first served base model; every base model also answers under
its own name, text to text. There is one version of each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from loraplex.core.errors import ModelNotFoundError
from loraplex.core.version import __version__
from loraplex.frontends.kserve.models.ensemble import ENSEMBLE
from loraplex.frontends.kserve.models.kinds import InputSpec, ModelKind
from loraplex.frontends.kserve.models.tensorrt_llm import TENSORRT_LLM
from loraplex.frontends.kserve.tensors import DATATYPES
from loraplex.serving.backend import Backend, ModelCard

VERSION = "1"
KINDS = (ENSEMBLE, TENSORRT_LLM)
DEFAULT_MAX_BATCH_SIZE = 128

SERVER_NAME = "triton"
"""What clients of Triton may compare; the version is ours."""

EXTENSIONS = (
    "binary_tensor_data",
    "parameters",
    "model_configuration",
    "model_repository",
    "statistics",
    "generate",
)


def server_metadata() -> dict[str, Any]:
    """The answer to a server metadata request: extensions are those that we do serve."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


@dataclasses.dataclass(frozen=True)
class TritonModel:
    """A name that clients send requests to."""

    name: str
    kind: ModelKind
    card: ModelCard
    """The base model behind it."""
    max_batch_size: int

    def metadata(self) -> dict[str, Any]:
        """The answer to a metadata request; shapes show the batch dimension."""
        kind = self.kind
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": kind.platform or kind.backend,
            "inputs": [
                _metadata_row(row.name, row.datatype, row.dims) for row in kind.declared_inputs
            ],
            "outputs": [_metadata_row(row.name, row.datatype, row.dims) for row in kind.outputs],
        }

    def config(self) -> dict[str, Any]:
        """The model configuration, with the fields and words of Triton's model_config.proto."""
        kind = self.kind
        return {
            "name": self.name,
            "platform": kind.platform,
            "backend": kind.backend,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": self.max_batch_size,
            "input": [_config_input(row) for row in kind.declared_inputs],
            "output": [
                {
                    "name": row.name,
                    "data_type": DATATYPES[row.datatype].config_name,
                    "dims": list(row.dims),
                    "label_filename": "",
                    "is_shape_tensor": False,
                }
                for row in kind.outputs
            ],
            "instance_group": [{"name": self.name, "kind": "KIND_MODEL", "count": 1}],
            "parameters": {},
            "model_transaction_policy": {"decoupled": False},
        }


class Catalog:
    """The served Triton models, always as the backend has them now."""

    def __init__(self, backend: Backend, *, max_batch_size: int = DEFAULT_MAX_BATCH_SIZE) -> None:
        self._backend = backend
        self._max_batch_size = max_batch_size

    def models(self) -> Sequence[TritonModel]:
        cards = self._backend.models()
        names = [(kind.name, kind, cards[0]) for kind in KINDS]
        taken = {kind.name for kind in KINDS}
        names += [(card.name, ENSEMBLE, card) for card in cards if card.name not in taken]
        return [TritonModel(name, kind, card, self._max_batch_size) for name, kind, card in names]

    def find(self, name: str, version: str = "") -> TritonModel:
        """Raises ModelNotFoundError in Triton's words, with the names that there are."""
        model = next((model for model in self.models() if model.name == name), None)
        if model is None:
            served = ", ".join(model.name for model in self.models())
            raise ModelNotFoundError(
                f"Request for unknown model: '{name}' is not found; the models are: {served}",
                param="model",
            )
        if version not in ("", VERSION):
            raise ModelNotFoundError(
                f"Request for unknown model: '{name}' version {version} is not found; the version "
                f"is {VERSION}",
                param="model",
            )
        return model

    def is_ready(self, name: str, version: str = "") -> bool:
        """False for an unknown model or version, too."""
        try:
            model = self.find(name, version)
        except ModelNotFoundError:
            return False
        return self._backend.model_ready(model.card.name)

    def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """The repository index: name, version, state and reason of every model."""
        rows = []
        for model in self.models():
            is_ready = self._backend.model_ready(model.card.name)
            if is_ready or not only_ready:
                state = "READY" if is_ready else "UNAVAILABLE"
                reason = "" if is_ready else self._backend.health().reason
                rows.append(
                    {"name": model.name, "version": VERSION, "state": state, "reason": reason}
                )
        return rows


def _metadata_row(name: str, datatype: str, dims: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, *dims]}


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
