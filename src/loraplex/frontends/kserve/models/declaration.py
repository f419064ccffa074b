"""Declaration of one model in a model repository, in addition to what its kind fixes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from loraplex.frontends.kserve.models.kinds import ModelKind


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
