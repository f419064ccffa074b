"""A Triton model that is served, with its metadata, configuration and texts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loraplex.frontends.kserve.models.kinds import InputSpec, ModelKind
from loraplex.frontends.kserve.tensors import DATATYPES
from loraplex.serving.backend import Backend, ModelCard


@dataclasses.dataclass(frozen=True)
class ModelTexts:
    """The tokenizer of one base model. Any thread may call it."""

    backend: Backend
    model: str

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.backend.model(self.model).tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a whole text, or one that follows another: that keeps a space at its beginning.

        A whole text begins with the tokens that the tokenizer puts before every text; if it puts
        none there, everything counts as whole.
        """
        first = self._first_ids
        return self.backend.model(self.model).detokenize(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            is_continuation=bool(first) and list(token_ids[:1]) != first,
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    @functools.cached_property
    def _first_ids(self) -> list[int]:
        """The token that the tokenizer puts before every text, if it does."""
        return self.encode("", add_special_tokens=True)[:1]

    def token_texts(self) -> Callable[[int], str]:
        """Return a function from a token to its text: half a character becomes U+FFFD."""
        token_bytes = self.backend.model(self.model).token_bytes
        return lambda token_id: token_bytes(token_id).decode(errors="replace")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Effects of the parameters in a model's configuration."""

    excludes_input: bool = False
    """Default of exclude_input_in_output."""
    adds_special_tokens: bool = True
    """Whether preprocessing adds special tokens to a prompt."""
    skips_special_tokens: bool = True
    """Whether postprocessing removes special tokens from an output."""
    ends_by_default: bool = True
    """False: without `end_id` an output runs to its full length, whatever the kind does. Of
    preprocessing: whether it prepares an end_id for the models that call it."""
    is_static: bool = False
    """tensorrt_llm: a batch runs to the end of all its requests (gpt_model_type V1)."""
    max_beam_width: int | None = None
    """A wider search is refused; None: any."""
    clamps_token_ids: bool = False
    """tensorrt_llm: ids of a prompt beyond the vocabulary become its nearest one."""
    accumulates_tokens: bool = False
    """tensorrt_llm_bls: every streamed response has the whole text so far."""
    checks_health: bool = False
    """vLLM backend: ENABLE_VLLM_HEALTH_CHECK."""
    reports_metrics: bool = False
    """vLLM backend: REPORT_CUSTOM_METRICS."""
    logits_datatype: str = "FP32"
    """Data type of context_logits and generation_logits: FP32, FP16 or BF16."""
    generation_logits_datatype: str | None = None
    """If theirs is another one."""
    sends_all_outputs: bool = False
    """Log probabilities and logits are in every response, as zeros where they were not computed:
    clients from before May 2024 expect them."""
    has_draft_model: bool = False
    """tensorrt_llm_bls: it names one, so requests may use draft tokens; ours need no model."""
    lora_enabled: bool = True
    """False: a request with an adapter is refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """One model of a repository."""

    name: str
    """That clients send requests to."""
    kind: ModelKind
    base_model: str
    """Name of the served model that it runs on."""
    version: str = "1"
    max_batch_size: int = 0
    """0: tensors have no batch dimension."""
    is_decoupled: bool | None = None
    """True: any number of responses, so only where they can be streamed; False: exactly one;
    None: the request decides, which no real Triton offers."""
    config: Mapping[str, Any] | None = None
    """What a request for the configuration gets: the fields of model_config.proto as JSON. None:
    made from the kind."""
    options: ModelOptions = ModelOptions()


_DATATYPE_NAMES = {row.config_name: row.name for row in DATATYPES.values()}
"""Data type names by the names in model configurations."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonModel(ModelDeclaration):
    """A declared model that is served: a name that clients send requests to."""

    card: ModelCard
    """The base model that it runs on."""
    texts: ModelTexts

    def output_datatype(self, output: str) -> str:
        """The data type that the configuration declares for an output of the kind."""
        for row in (self.config or {}).get("output", ()):
            if row["name"] == output:
                return _DATATYPE_NAMES[row["data_type"]]
        declared = self.kind.outputs_by_name.get(output)
        assert declared is not None, "an output of the kind"
        return declared.datatype

    def metadata(self) -> dict[str, Any]:
        """Response to a metadata request; shapes include the batch dimension, if there is one."""
        config = self.configuration()
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": config["platform"] or config["backend"],
            "inputs": [self._metadata_row(row) for row in config["input"]],
            "outputs": [self._metadata_row(row) for row in config["output"]],
        }

    def configuration(self) -> dict[str, Any]:
        """The model configuration, with the fields and words of Triton's model_config.proto."""
        if self.config is not None:
            return dict(self.config)
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
