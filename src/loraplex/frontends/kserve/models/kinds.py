"""What a kind of Triton model is: its tensor tables as data, and how one row is read.

A row states what its tensor does here: it works, under a common field name, it has no effect (nor
in the original), or it is refused unless its value is neutral. So no tensor that a client
sends is ever ignored without a reason that stands in a table.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping

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
    other_datatypes: tuple[str, ...] = ()
    """Data types that a configuration may declare instead; the output then has that one."""

    @property
    def feature(self) -> Feature:
        support = Support.NO_EFFECT if self.never_why else Support.WORKS
        note = f"never comes: {self.never_why}" if self.never_why else ""
        return Feature(self.name, support, note, f"{self.datatype} {list(self.dims)}")


class Dialect(enum.Enum):
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
    dialect: Dialect = Dialect.TENSORRT_LLM
    response_parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    """Parameters of every response."""
    output_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of an ensemble's outputs, by those of its step; empty: the outputs have their own."""

    def input(self, name: str) -> InputSpec | None:
        """The row of an input, older names included."""
        return self._inputs_by_name.get(name)

    def input_of(self, field: str) -> str:
        """The name that this kind has for a field."""
        return self._names_by_field.get(field, field)

    def output(self, name: str) -> OutputSpec | None:
        return self._outputs_by_name.get(name)

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
        return required if self.input("input_ids") is None else ("input_ids", *required)

    @functools.cached_property
    def _inputs_by_name(self) -> Mapping[str, InputSpec]:
        return {row.name: row for row in self.inputs}

    @functools.cached_property
    def _names_by_field(self) -> Mapping[str, str]:
        """Tensor name by field; the first row if several have one field."""
        return {row.field: row.name for row in reversed(self.inputs) if row.field}

    @functools.cached_property
    def _outputs_by_name(self) -> Mapping[str, OutputSpec]:
        return {row.name: row for row in self.outputs}


def used(
    name: str,
    datatype: str,
    dims: tuple[int, ...] = (1,),
    *,
    field: str = "",
    required: bool = False,
    ragged: bool = False,
    is_declared: bool = True,
) -> InputSpec:
    """A row whose tensor has its full effect."""
    return InputSpec(
        name,
        datatype,
        dims,
        field=field or name,
        required=required,
        is_ragged=ragged,
        is_declared=is_declared,
    )


def own(name: str, datatype: str, dims: tuple[int, ...] = (1,), *, field: str = "") -> InputSpec:
    """A row of ours: understood, and not declared."""
    return InputSpec(name, datatype, dims, field=field or name, is_declared=False, is_ours=True)


def adapter(
    name: str, datatype: str, dims: tuple[int, ...], *, other_datatypes: tuple[str, ...] = ()
) -> InputSpec:
    """A row whose tensor is half of an adapter."""
    return InputSpec(
        name,
        datatype,
        dims,
        field=name,
        is_ragged=True,
        other_datatypes=other_datatypes,
        is_adapter=True,
    )


def refused(
    name: str,
    datatype: str,
    dims: tuple[int, ...] = (1,),
    *,
    reason: str,
    neutral: tuple[object, ...] = (),
    ragged: bool = False,
    is_declared: bool = True,
    support: Support = Support.REFUSED,
) -> InputSpec:
    """A row whose tensor we do not serve (yet)."""
    return InputSpec(
        name,
        datatype,
        dims,
        support,
        is_ragged=ragged,
        is_declared=is_declared,
        neutral=neutral,
        reason=reason,
    )


no_effect = functools.partial(refused, support=Support.NO_EFFECT)
"""A row whose tensor changes nothing in the original either."""


def scalar(row: InputSpec) -> InputSpec:
    """The row with `reshape { shape: [] }`."""
    return dataclasses.replace(row, has_scalar_reshape=True)


def or_uint32(row: InputSpec) -> InputSpec:
    """The row of a number that was UINT32 before December 2023."""
    return dataclasses.replace(row, other_datatypes=("UINT32",))


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
