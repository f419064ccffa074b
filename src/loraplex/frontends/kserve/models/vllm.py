"""The tensors of a model of Triton's vLLM backend: text in, text out, no batch dimension.

Names, types, dimensions and order are those of the backend (version of January 2026), which
declares them itself.
"""

from loraplex.frontends.kserve.models.kinds import (
    MULTIMODAL,
    Dialect,
    ModelKind,
    OutputSpec,
    refused,
    used,
)

_INPUTS = (
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
    refused("embedding_request", "BYTES", reason="embeddings", neutral=(b"",)),
)

_OUTPUTS = (
    OutputSpec("text_output", "BYTES", (-1,)),
    OutputSpec("finish_reason", "BYTES", (-1,)),
    OutputSpec("cumulative_logprob", "FP32", (-1,)),
    OutputSpec("logprobs", "BYTES", (-1,)),
    OutputSpec("num_input_tokens", "UINT32"),
    OutputSpec("num_output_tokens", "UINT32", (-1,)),
)

VLLM = ModelKind(
    name="vllm",
    platform="",
    backend="vllm",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    takes_text=True,
    ends_by_default=True,
    dialect=Dialect.VLLM,
)
