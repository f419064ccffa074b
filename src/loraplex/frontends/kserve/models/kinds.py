"""The kinds of Triton models: their tensor tables as data, and how one row is read.

A row states what its tensor does here: it works, under a common field name, it has no effect (nor
in the original), or it is refused unless its value is neutral. So no tensor that a client
sends is ever ignored without a reason that stands in a table.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.support import Feature, Support
from loraplex.frontends.kserve.messages import Parameter

IGNORED_INPUTS = frozenset({"START", "END", "CORRID"})
"""Sequence-batching controls that old clients send; Triton's TensorRT-LLM backend drops them."""


@dataclasses.dataclass(frozen=True, slots=True)
class InputSpec:
    """One input tensor. `dims` are per sample: on the wire the batch stands in front."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    support: Support = Support.WORKS
    field: str = ""
    """What conversion calls it; both kinds use the same words. Empty: it is not converted."""
    required: bool = False
    has_scalar_reshape: bool = False
    """Whether the model configuration has `reshape { shape: [] }`."""
    is_ragged: bool = False
    is_declared: bool = True
    """False: understood but not shown in metadata: an older name, or one of ours."""
    other_datatypes: tuple[str, ...] = ()
    """Data types that are accepted in addition to the declared one."""
    is_adapter: bool = False
    """Half of an adapter: staging, whose sentences clients know, checks its numbers of rows and
    columns. A single one may lack the batch dimension."""
    neutral: tuple[object, ...] = ()
    """Element values of a refused input that are accepted. An empty tensor always is."""
    reason: str = ""
    """Why a row has no effect, or what a refused row would request."""
    is_ours: bool = False

    @property
    def feature(self) -> Feature:
        types = " or ".join((self.datatype, *self.other_datatypes))
        note = self.reason
        if not note and self.field.lower() != self.name.lower() and not self.is_declared:
            note = f"as `{self.field}`"
        required = ", required" if self.required else ""
        return Feature(
            self.name,
            self.support,
            note,
            f"{types} {list(self.dims)}{required}",
            is_ours=self.is_ours,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output tensor, per sample."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    is_declared: bool = True
    """False: it comes if its input did, but metadata does not show it: an older one."""
    never_why: str = ""
    """Why it is declared and never comes."""
    note: str = ""
    """Meaning of an output of ours, which comes only if a client names it."""
    other_datatypes: tuple[str, ...] = ()
    """Data types that a configuration may declare instead; the output then has that one."""

    @property
    def feature(self) -> Feature:
        support = Support.NO_EFFECT if self.never_why else Support.WORKS
        note = f"never comes: {self.never_why}" if self.never_why else self.note
        form = f"{self.datatype} {list(self.dims)}"
        return Feature(self.name, support, note, form, is_ours=bool(self.note))


class BackendDialect(enum.Enum):
    """The system whose rules a model's responses and errors follow."""

    TENSORRT_LLM = "tensorrt_llm"
    VLLM = "vllm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelKind:
    """A model of a repository of the TensorRT-LLM backend or of the vLLM backend."""

    name: str
    platform: str
    backend: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    takes_text: bool
    """True: prompt and completion are text. False: they are token ids."""
    ends_by_default: bool
    """Behaviour without `end_id`: True ends at the model's end token, False runs to full length."""
    dialect: BackendDialect = BackendDialect.TENSORRT_LLM
    response_parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    """Parameters of every response."""
    output_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of an ensemble's outputs, by those of its step; empty: the outputs have their own."""

    def input_of(self, field: str) -> str:
        """The name that this kind has for a field."""
        return self._names_by_field.get(field, field)

    @functools.cached_property
    def declared_inputs(self) -> tuple[InputSpec, ...]:
        return tuple(row for row in self.inputs if row.is_declared)

    @functools.cached_property
    def declared_outputs(self) -> tuple[OutputSpec, ...]:
        return tuple(row for row in self.outputs if row.is_declared)

    @functools.cached_property
    def required_inputs(self) -> tuple[str, ...]:
        """Names of what every request must send, input_ids among them though none declares it."""
        required = tuple(row.name for row in self.inputs if row.required)
        return required if "input_ids" not in self.inputs_by_name else ("input_ids", *required)

    @functools.cached_property
    def inputs_by_name(self) -> Mapping[str, InputSpec]:
        """Rows of inputs, older names included."""
        return {row.name: row for row in self.inputs}

    @functools.cached_property
    def _names_by_field(self) -> Mapping[str, str]:
        """Tensor name by field; the first row if several have one field."""
        return {row.field: row.name for row in reversed(self.inputs) if row.field}

    @functools.cached_property
    def outputs_by_name(self) -> Mapping[str, OutputSpec]:
        return {row.name: row for row in self.outputs}


def used(
    name: str, datatype: str, dims: tuple[int, ...] = (1,), *, field: str = "", **more: Any
) -> InputSpec:
    """A row whose tensor has its full effect."""
    return InputSpec(name, datatype, dims, field=field or name, **more)


own = functools.partial(used, is_declared=False, is_ours=True)
"""A row of ours: understood, and not declared."""
adapter = functools.partial(used, is_ragged=True, is_adapter=True)
"""A row whose tensor is half of an adapter."""
refused = functools.partial(InputSpec, support=Support.REFUSED)
"""A row whose tensor we do not serve (yet)."""
no_effect = functools.partial(InputSpec, support=Support.NO_EFFECT)
"""A row whose tensor changes nothing in the original either."""


def scalar(row: InputSpec) -> InputSpec:
    """The row with `reshape { shape: [] }`."""
    return dataclasses.replace(row, has_scalar_reshape=True)


def or_uint32(row: InputSpec) -> InputSpec:
    """The row of a number that was UINT32 before December 2023."""
    return dataclasses.replace(row, other_datatypes=("UINT32",))


# ---------------------------------------------------------------- rows that several kinds have

PROMPT_TUNING = "prompt tuning"
MULTIMODAL = "a multimodal model"
ENCODER_DECODER = "an encoder-decoder model"
DISAGGREGATED = "disaggregated serving"
PADS_BEAMS = "beams of unequal length are padded with -1"
OF_PROMPT_TUNING = "it describes prompt_embedding_table"

INLINE_LORA = (
    # Declared as in TensorRT-LLM's templates; its converters write the other types too.
    adapter("lora_weights", "FP16", (-1, -1), other_datatypes=("FP32", "BF16")),
    adapter("lora_config", "INT32", (-1, 3)),  # or 4 columns, since DoRA
)

UNDECLARED = (
    own("early_stopping", "BOOL"),
    own("beam_search_diversity_rate", "FP32"),
    own("top_p_min", "FP32"),
    own("top_p_decay", "FP32"),
    own("top_p_reset_ids", "INT32", field="top_p_reset_id"),
    own("no_repeat_ngram_size", "INT32"),
    own("retention_token_range_starts", "INT32", (-1,)),
    own("retention_token_range_ends", "INT32", (-1,)),
    own("retention_token_range_priorities", "INT32", (-1,)),
    own("retention_token_range_durations_ms", "INT32", (-1,)),
    own("retention_decode_priority", "INT32"),
    own("retention_decode_duration_ms", "INT32"),
    own("num_draft_tokens", "INT32"),
)

SEQUENCE_OUTPUTS = (
    OutputSpec("cum_log_probs", "FP32", (-1,)),
    OutputSpec("output_log_probs", "FP32", (-1, -1)),
    OutputSpec("context_logits", "FP32", (-1, -1)),
    OutputSpec("generation_logits", "FP32", (-1, -1, -1)),
    OutputSpec("batch_index", "INT32"),
    OutputSpec("sequence_index", "INT32"),
)
TIMING_OUTPUTS = (
    OutputSpec("arrival_time_ns", "INT64"),
    OutputSpec("first_scheduled_time_ns", "INT64"),
    OutputSpec("first_token_time_ns", "INT64"),
    OutputSpec("last_token_time_ns", "INT64"),
    OutputSpec("acceptance_rate", "FP32"),
    OutputSpec("total_accepted_draft_tokens", "INT32"),
    OutputSpec("total_draft_tokens", "INT32"),
)
CACHE_OUTPUTS = (
    OutputSpec("kv_cache_alloc_new_blocks", "INT32"),
    OutputSpec("kv_cache_reused_blocks", "INT32"),
    OutputSpec("kv_cache_alloc_total_blocks", "INT32"),
)
_IMAGE_DIMS = (-1, -1, -1, -1)

EMBEDDING: Final = OutputSpec(
    *("embedding", "FP32", (-1,)),
    is_declared=False,
    note="if requested by name, instead of all others: the vector of the prompt",
)
PROBABILITIES: Final = OutputSpec(
    *("probabilities", "FP32", (-1,)),
    is_declared=False,
    note="if requested by name, instead of all others: those of the classification head's labels",
)

# ---------------------------------------------------------------- TensorRT-LLM backend of May 2025

# Names, types, dimensions and order are those of its repository, and `return_num_*_tokens` of its
# successor; `min_length` and `random_seed` are names of January 2024. `no_repeat_ngram_size`,
# `multimodal_embedding` and `return_kv_cache_reuse_stats` its code reads, undeclared.

_OWN_DRAFT_TOKENS = "draft tokens change no output: the same number of own ones is used instead"

TENSORRT_LLM: Final = ModelKind(
    name="tensorrt_llm",
    platform="",
    backend="tensorrtllm",
    inputs=(
        used("input_ids", "INT32", (-1,), is_ragged=True),
        refused("encoder_input_features", "FP16", (-1, -1), reason=ENCODER_DECODER, is_ragged=True),
        scalar(refused("encoder_output_lengths", "INT32", reason=ENCODER_DECODER, neutral=(0,))),
        scalar(used("input_lengths", "INT32", required=True)),
        scalar(or_uint32(used("request_output_len", "INT32", field="max_tokens", required=True))),
        scalar(used("num_return_sequences", "INT32", field="n")),
        no_effect("draft_input_ids", "INT32", (-1,), reason=_OWN_DRAFT_TOKENS, is_ragged=True),
        used("decoder_input_ids", "INT32", (-1,), is_ragged=True),
        scalar(used("decoder_input_lengths", "INT32")),
        no_effect("draft_logits", "FP32", (-1, -1), reason=_OWN_DRAFT_TOKENS, is_ragged=True),
        scalar(no_effect("draft_acceptance_threshold", "FP32", reason=_OWN_DRAFT_TOKENS)),
        scalar(or_uint32(used("end_id", "INT32"))),
        scalar(or_uint32(no_effect("pad_id", "INT32", reason=PADS_BEAMS))),
        used("stop_words_list", "INT32", (2, -1), field="stop_words", is_ragged=True),
        used("bad_words_list", "INT32", (2, -1), field="bad_words", is_ragged=True),
        used("embedding_bias", "FP32", (-1,), is_ragged=True),
        scalar(or_uint32(used("beam_width", "INT32"))),
        scalar(used("temperature", "FP32")),
        scalar(or_uint32(used("runtime_top_k", "INT32", field="top_k"))),
        scalar(used("runtime_top_p", "FP32", field="top_p")),
        scalar(used("runtime_top_p_min", "FP32", field="top_p_min")),
        scalar(used("runtime_top_p_decay", "FP32", field="top_p_decay")),
        scalar(used("runtime_top_p_reset_ids", "INT32", field="top_p_reset_id")),
        scalar(used("len_penalty", "FP32", field="length_penalty")),
        scalar(used("early_stopping", "BOOL")),
        scalar(used("repetition_penalty", "FP32")),
        scalar(used("min_tokens", "INT32")),
        scalar(used("beam_search_diversity_rate", "FP32")),
        scalar(used("presence_penalty", "FP32")),
        scalar(used("frequency_penalty", "FP32")),
        scalar(used("seed", "UINT64")),
        scalar(used("return_log_probs", "BOOL", field="returns_log_probs")),
        scalar(used("return_context_logits", "BOOL")),
        scalar(used("return_generation_logits", "BOOL")),
        scalar(used("return_perf_metrics", "BOOL", field="returns_perf_metrics")),
        scalar(used("exclude_input_in_output", "BOOL", field="excludes_input")),
        scalar(used("stop", "BOOL")),
        scalar(used("streaming", "BOOL", field="is_streamed")),
        refused("prompt_embedding_table", "FP16", (-1, -1), reason=PROMPT_TUNING, is_ragged=True),
        refused(
            "prompt_table_extra_ids",
            "UINT64",
            (-1,),
            reason=PROMPT_TUNING,
            neutral=(0,),
            is_ragged=True,
        ),
        scalar(or_uint32(no_effect("prompt_vocab_size", "INT32", reason=OF_PROMPT_TUNING))),
        refused("cross_attention_mask", "BOOL", (-1, -1), reason=MULTIMODAL, is_ragged=True),
        refused("mrope_rotary_cos_sin", "FP32", (-1,), reason=MULTIMODAL, is_ragged=True),
        refused("mrope_position_deltas", "INT64", reason=MULTIMODAL, is_ragged=True),
        refused(
            "skip_cross_attn_blocks", "BOOL", reason=MULTIMODAL, neutral=(False,), is_ragged=True
        ),
        scalar(used("lora_task_id", "UINT64")),
        *INLINE_LORA,
        refused("context_phase_params", "UINT8", (-1,), reason=DISAGGREGATED, is_ragged=True),
        used("retention_token_range_starts", "INT32", (-1,), is_ragged=True),
        used("retention_token_range_ends", "INT32", (-1,), is_ragged=True),
        used("retention_token_range_priorities", "INT32", (-1,), is_ragged=True),
        used("retention_token_range_durations_ms", "INT32", (-1,), is_ragged=True),
        used("retention_decode_priority", "INT32", is_ragged=True),
        used("retention_decode_duration_ms", "INT32", is_ragged=True),
        used("guided_decoding_guide_type", "BYTES", is_ragged=True),
        used("guided_decoding_guide", "BYTES", is_ragged=True),
        used("lookahead_window_size", "INT32", is_ragged=True),
        used("lookahead_ngram_size", "INT32", is_ragged=True),
        used("lookahead_verification_set_size", "INT32", is_ragged=True),
        scalar(used("return_num_input_tokens", "BOOL", field="returns_num_input_tokens")),
        scalar(used("return_num_output_tokens", "BOOL", field="returns_num_output_tokens")),
        used("no_repeat_ngram_size", "INT32", is_declared=False),
        refused("multimodal_embedding", "FP16", (-1, -1), reason=MULTIMODAL, is_declared=False),
        no_effect(
            *("return_kv_cache_reuse_stats", "BOOL"),
            reason="see return_perf_metrics",
            is_declared=False,
        ),
        own("num_draft_tokens", "INT32"),
        or_uint32(used("min_length", "INT32", field="min_tokens", is_declared=False)),
        used("random_seed", "UINT64", field="seed", is_declared=False),
    ),
    outputs=(
        OutputSpec("output_ids", "INT32", (-1, -1)),  # clients read it as the first output
        OutputSpec("sequence_length", "INT32", (-1,)),
        *SEQUENCE_OUTPUTS,
        OutputSpec("context_phase_params", "UINT8", (-1,), never_why=DISAGGREGATED),
        *CACHE_OUTPUTS,
        *TIMING_OUTPUTS,
        OutputSpec("num_input_tokens", "INT32"),
        OutputSpec("num_output_tokens", "INT32"),
        *(EMBEDDING, PROBABILITIES),
    ),
    takes_text=False,
    ends_by_default=False,
)
"""Token ids in, token ids out."""

ENSEMBLE: Final = ModelKind(
    name="ensemble",
    platform="ensemble",
    backend="",
    inputs=(
        used("text_input", "BYTES", required=True),
        used("decoder_text_input", "BYTES"),
        or_uint32(used("max_tokens", "INT32", required=True)),
        used("num_return_sequences", "INT32", field="n"),
        used("bad_words", "BYTES", (-1,)),
        used("stop_words", "BYTES", (-1,)),
        used("exclude_input_in_output", "BOOL", field="excludes_input"),
        or_uint32(used("end_id", "INT32")),
        or_uint32(no_effect("pad_id", "INT32", reason=PADS_BEAMS)),
        or_uint32(used("top_k", "INT32")),
        used("top_p", "FP32"),
        used("temperature", "FP32"),
        used("length_penalty", "FP32"),
        used("repetition_penalty", "FP32"),
        used("min_tokens", "INT32"),
        used("presence_penalty", "FP32"),
        used("frequency_penalty", "FP32"),
        used("seed", "UINT64"),
        used("return_log_probs", "BOOL", field="returns_log_probs"),
        used("return_context_logits", "BOOL"),
        used("return_generation_logits", "BOOL"),
        used("return_perf_metrics", "BOOL", field="returns_perf_metrics"),
        or_uint32(used("beam_width", "INT32")),
        used("stream", "BOOL", field="is_streamed"),
        refused("prompt_embedding_table", "FP16", (-1, -1), reason=PROMPT_TUNING),
        refused("prompt_table_extra_id", "UINT64", reason=PROMPT_TUNING, neutral=(0,)),
        or_uint32(no_effect("prompt_vocab_size", "INT32", reason=OF_PROMPT_TUNING)),
        used("embedding_bias_words", "BYTES", (-1,)),
        used("embedding_bias_weights", "FP32", (-1,)),
        used("lora_task_id", "UINT64"),
        *INLINE_LORA,
        used("guided_decoding_guide_type", "BYTES"),
        used("guided_decoding_guide", "BYTES"),
        or_uint32(used("min_length", "INT32", field="min_tokens", is_declared=False)),
        used("random_seed", "UINT64", field="seed", is_declared=False),
        *UNDECLARED,
    ),
    outputs=(
        OutputSpec("text_output", "BYTES", (-1,)),
        *SEQUENCE_OUTPUTS,
        *CACHE_OUTPUTS,
        *TIMING_OUTPUTS,
        *(EMBEDDING, PROBABILITIES),
    ),
    takes_text=True,
    ends_by_default=True,
    response_parameters=MappingProxyType(
        {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    ),
)
"""Text in, text out. What its original does not pass on is taken here, undeclared, under the names
that `tensorrt_llm` has without `runtime_`."""

_OF_BLS = (
    refused("image_input", "FP16", (-1, 3, -1, -1), reason=MULTIMODAL),
    refused("image_bytes_input", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    refused("image_url_input", "BYTES", reason=MULTIMODAL, neutral=(b"",)),
    refused("video_bytes_input", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    used("num_draft_tokens", "INT32"),
    no_effect("use_draft_logits", "BOOL", reason="how draft tokens are verified changes no output"),
)


def _bls_inputs() -> tuple[InputSpec, ...]:
    """The ensemble's declared rows, then the own ones, then what is undeclared in both."""
    own = {row.name for row in _OF_BLS}
    undeclared = [row for row in ENSEMBLE.inputs if not row.is_declared and row.name not in own]
    return (*ENSEMBLE.declared_inputs, *_OF_BLS, *undeclared)


BLS: Final = ModelKind(
    name="tensorrt_llm_bls",
    platform="",
    backend="python",
    inputs=_bls_inputs(),
    outputs=ENSEMBLE.outputs,
    takes_text=True,
    ends_by_default=True,
)
"""The ensemble's path with own inputs: any number of requests run together. The program of the
original calls the other three models one request at a time."""

PREPROCESSING: Final = ModelKind(
    name="preprocessing",
    platform="",
    backend="python",
    inputs=(
        used("QUERY", "BYTES", required=True),
        used("DECODER_QUERY", "BYTES"),
        refused("IMAGE_BYTES", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
        refused("IMAGE_URL", "BYTES", reason=MULTIMODAL, neutral=(b"",)),
        refused("VIDEO_BYTES", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
        or_uint32(used("REQUEST_OUTPUT_LEN", "INT32", required=True)),
        used("BAD_WORDS_DICT", "BYTES", (-1,)),
        used("STOP_WORDS_DICT", "BYTES", (-1,)),
        used("EMBEDDING_BIAS_WORDS", "BYTES", (-1,), field="embedding_bias_words"),
        used("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), field="embedding_bias_weights"),
        used("END_ID", "INT32"),
        used("PAD_ID", "INT32"),
        used("PROMPT_TABLE_EXTRA_ID", "UINT64"),
    ),
    outputs=(
        OutputSpec("INPUT_ID", "INT32", (-1,)),
        OutputSpec("REQUEST_INPUT_LEN", "INT32"),
        OutputSpec("DECODER_INPUT_ID", "INT32", (-1,)),
        OutputSpec("REQUEST_DECODER_INPUT_LEN", "INT32"),
        OutputSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
        OutputSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
        OutputSpec("EMBEDDING_BIAS", "FP32", (-1,)),
        OutputSpec("REQUEST_OUTPUT_LEN", "INT32", (-1,), other_datatypes=("UINT32",)),
        OutputSpec("OUT_END_ID", "INT32"),
        OutputSpec("OUT_PAD_ID", "INT32"),
        OutputSpec("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
        OutputSpec("PIXEL_VALUES", "FP16", _IMAGE_DIMS, never_why=MULTIMODAL),
        OutputSpec("ASPECT_RATIO_IDS", "INT64", (-1,), never_why=MULTIMODAL),
        OutputSpec("ASPECT_RATIO_MASK", "INT64", (-1, -1), never_why=MULTIMODAL),
        OutputSpec("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1), never_why=MULTIMODAL),
        OutputSpec("IMAGE_SIZES", "INT64", (2,), never_why=MULTIMODAL),
        OutputSpec("IS_VIDEO_INPUT", "BOOL", never_why=MULTIMODAL),
        OutputSpec("ATTENTION_MASK", "INT64", (-1,), never_why=MULTIMODAL),
        OutputSpec("IMAGE_GRID_THW", "INT64", (3,), never_why=MULTIMODAL),
        OutputSpec("VISION_INPUT_ID", "INT32", (-1,), never_why=MULTIMODAL),
    ),
    takes_text=True,
    ends_by_default=True,
)
"""A prompt and its words become the tensors that `tensorrt_llm` takes. What only multimodal and
encoder-decoder models fill is declared and never comes."""

LENGTHS = "SEQUENCE_LENGTH"
_PASSED_THROUGH = (
    ("CUM_LOG_PROBS", (-1,)),
    ("OUTPUT_LOG_PROBS", (-1, -1)),
    ("CONTEXT_LOGITS", (-1, -1)),
    ("GENERATION_LOGITS", (-1, -1, -1)),
)
"""Each comes back as OUT_ and its name."""

POSTPROCESSING: Final = ModelKind(
    name="postprocessing",
    platform="",
    backend="python",
    inputs=(
        used("TOKENS_BATCH", "INT32", (-1, -1), required=True),
        used(LENGTHS, "INT32", (-1,), required=True),
        *(used(name, "FP32", dims, is_declared=False) for name, dims in _PASSED_THROUGH),
    ),
    outputs=(
        OutputSpec("OUTPUT", "BYTES", (-1,)),
        *(
            OutputSpec(f"OUT_{name}", "FP32", dims, is_declared=False)
            for name, dims in _PASSED_THROUGH
        ),
    ),
    takes_text=False,
    ends_by_default=True,
)
"""Token ids of `tensorrt_llm` become text. What it passed through in January 2024 is taken,
undeclared."""

POSTPROCESSING_OF_2023: Final = dataclasses.replace(
    POSTPROCESSING,
    inputs=tuple(
        dataclasses.replace(row, required=row.required and row.name != LENGTHS)
        for row in POSTPROCESSING.inputs
    ),
)
"""Kind of a repository from before December 2023: clients send no lengths, and all tokens count."""

# ---------------------------------------------------------------- vLLM backend of January 2026

VLLM: Final = ModelKind(
    name="vllm",
    platform="",
    backend="vllm",
    inputs=(
        used("text_input", "BYTES", required=True),
        refused("image", "BYTES", (-1,), reason=MULTIMODAL, neutral=(b"",)),
        used("stream", "BOOL", field="is_streamed"),
        used("sampling_parameters", "BYTES"),
        used("exclude_input_in_output", "BOOL", field="excludes_input"),
        used("return_finish_reason", "BOOL"),
        used("return_cumulative_logprob", "BOOL"),
        used("return_logprobs", "BOOL"),
        used("return_num_input_tokens", "BOOL"),
        used("return_num_output_tokens", "BOOL"),
        used("embedding_request", "BYTES"),
    ),
    outputs=(
        OutputSpec("text_output", "BYTES", (-1,)),
        OutputSpec("finish_reason", "BYTES", (-1,)),
        OutputSpec("cumulative_logprob", "FP32", (-1,)),
        OutputSpec("logprobs", "BYTES", (-1,)),
        OutputSpec("num_input_tokens", "UINT32"),
        OutputSpec("num_output_tokens", "UINT32", (-1,)),
        *(EMBEDDING, PROBABILITIES),
    ),
    takes_text=True,
    ends_by_default=True,
    dialect=BackendDialect.VLLM,
)
"""Text in, text out, no batch dimension. The backend declares the tensors itself."""

LORA_NAME = "lora_name"
"""The adapter, which is not a field of SamplingParams."""


class FieldType(enum.Enum):
    """Type of a field; `value` is its name in errors."""

    INTEGER = "an integer"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "a text"
    TEXTS = "a text or a list of texts"
    INTEGERS = "a list of integers"
    OBJECT = "a JSON object"
    EARLY_STOPPING = 'true, false or "never"'


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One row of SamplingParams: what a field does here, and the type that its value has."""

    name: str
    type: FieldType | None
    """None: any; of a field whose value is not read."""
    support: Support = Support.WORKS
    neutral: tuple[object, ...] = ()
    """Values of a refused field that are accepted; null always is."""
    reason: str = ""
    """Why a field has no effect, or what a refused field would request."""

    @property
    def feature(self) -> Feature:
        form = "" if self.type is None else self.type.value
        return Feature(self.name, self.support, self.reason, form)


def _without_effect(name: str, reason: str) -> Field:
    return Field(name, None, Support.NO_EFFECT, reason=reason)


def _refused_field(name: str, reason: str, *neutral: object) -> Field:
    return Field(name, None, Support.REFUSED, neutral, reason)


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        field.name: field
        for field in (
            Field("n", FieldType.INTEGER),
            Field("best_of", FieldType.INTEGER),
            Field("presence_penalty", FieldType.NUMBER),
            Field("frequency_penalty", FieldType.NUMBER),
            Field("repetition_penalty", FieldType.NUMBER),
            Field("temperature", FieldType.NUMBER),
            Field("top_p", FieldType.NUMBER),
            Field("top_k", FieldType.INTEGER),
            Field("min_p", FieldType.NUMBER),
            Field("seed", FieldType.INTEGER),
            Field("use_beam_search", FieldType.FLAG),
            Field("length_penalty", FieldType.NUMBER),
            Field("early_stopping", FieldType.EARLY_STOPPING),
            Field("stop", FieldType.TEXTS),
            Field("stop_token_ids", FieldType.INTEGERS),
            Field("include_stop_str_in_output", FieldType.FLAG),
            Field("bad_words", FieldType.TEXTS),
            Field("ignore_eos", FieldType.FLAG),
            Field("max_tokens", FieldType.INTEGER),
            Field("min_tokens", FieldType.INTEGER),
            Field("logprobs", FieldType.INTEGER),
            Field("skip_special_tokens", FieldType.FLAG),
            Field("logit_bias", FieldType.OBJECT),
            Field("allowed_token_ids", FieldType.INTEGERS),
            Field("structured_outputs", FieldType.OBJECT),
            Field("guided_decoding", FieldType.OBJECT),
            Field(LORA_NAME, FieldType.TEXT),
            _without_effect("prompt_logprobs", "the backend has no output for them"),
            _without_effect(
                "spaces_between_special_tokens", "only slow tokenizers put spaces there"
            ),
            _without_effect("output_kind", "`stream` decides what is returned when"),
            _without_effect("flat_logprobs", "how vLLM keeps them, not what they are"),
            _without_effect("skip_clone", "how vLLM handles the object"),
            _without_effect("skip_reading_prefix_cache", "a prefix hit changes no output"),
            _refused_field("detokenize", "token ids instead of text", True, "true", "True"),
            _refused_field("logits_processors", "code in a request", [], "[]"),
            _refused_field("truncate_prompt_tokens", "a shortened prompt"),
            _refused_field("extra_args", "arguments of vLLM's plugins", {}, "{}"),
            _refused_field("thinking_token_budget", "a limit for thinking"),
        )
    }
)
