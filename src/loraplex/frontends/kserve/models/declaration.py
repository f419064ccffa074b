"""What a model repository says about one of its models, beside what its kind says of all."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from loraplex.frontends.kserve.models.kinds import ModelKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the parameters of a model's configuration change in its answers."""

    excludes_input: bool = False
    """If a request does not say exclude_input_in_output."""
    adds_special_tokens: bool = True
    """Of preprocessing: to a prompt."""
    skips_special_tokens: bool = True
    """Of postprocessing: from an answer."""
    is_static: bool = False
    """Of tensorrt_llm: a batch runs to the end of all its requests (gpt_model_type V1)."""
    max_beam_width: int | None = None
    """A wider search is refused; None: any."""
    accumulates_tokens: bool = False
    """Of tensorrt_llm_bls: every streamed answer has the whole text so far."""
    checks_health: bool = False
    """Of the vLLM backend: ENABLE_VLLM_HEALTH_CHECK."""
    reports_metrics: bool = False
    """Of the vLLM backend: REPORT_CUSTOM_METRICS."""
    logits_datatype: str = "FP32"
    """Of context_logits and generation_logits: FP32, FP16 or BF16."""
    generation_logits_datatype: str | None = None
    """If theirs is another one."""
    has_draft_model: bool = False
    """Of tensorrt_llm_bls: it names one, so a request may ask for guesses; ours need no model."""
    lora_enabled: bool = True
    """False: a request that asks for an adapter is refused."""
    unusable_adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name, why an adapter that the repository names could not be loaded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """One model of a repository."""

    name: str
    """That clients send requests to."""
    kind: ModelKind
    base_model: str
    """The served model behind it, as the backend calls it."""
    version: str = "1"
    max_batch_size: int = 0
    """0: tensors have no batch dimension."""
    is_decoupled: bool | None = None
    """True: any number of answers, so only where they can be streamed; False: just one; None: as
    the request wants it, which no real Triton offers."""
    config: Mapping[str, Any] | None = None
    """What a request for the configuration gets: the fields of model_config.proto as JSON. None:
    made from the kind."""
    options: ModelOptions = ModelOptions()
