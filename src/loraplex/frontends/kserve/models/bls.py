"""The tensors of `tensorrt_llm_bls`: text in, text out, as `ensemble`, and what its program adds.

Names, types, dimensions and order are those of the TensorRT-LLM backend's repository (version of
May 2025). Its program calls the other three models one request at a time; ours is the ensemble's
path, with its words for what it refuses, so any number of requests run together.
"""

from loraplex.core.errors import InvalidTensorError
from loraplex.frontends.kserve.models.declaration import ModelOptions
from loraplex.frontends.kserve.models.ensemble import ENSEMBLE
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import (
    MULTIMODAL,
    InputSpec,
    ModelKind,
    no_effect,
    refused,
    used,
)

_IMAGE_DIMS = (-1, -1, -1, -1)

_OWN_INPUTS = (
    refused("image_input", "FP16", (-1, 3, -1, -1), reason=MULTIMODAL),
    refused("image_bytes_input", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    refused("image_url_input", "BYTES", reason=MULTIMODAL, neutral=(b"",)),
    refused("video_bytes_input", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    used("num_draft_tokens", "INT32"),
    no_effect("use_draft_logits", "BOOL", reason="how draft tokens are verified changes no output"),
)


def _inputs() -> tuple[InputSpec, ...]:
    """The ensemble's declared rows, then the own ones, then what is undeclared in both."""
    own = {row.name for row in _OWN_INPUTS}
    undeclared = [row for row in ENSEMBLE.inputs if not row.is_declared and row.name not in own]
    return (*ENSEMBLE.declared_inputs, *_OWN_INPUTS, *undeclared)


BLS = ModelKind(
    name="tensorrt_llm_bls",
    platform="",
    backend="python",
    inputs=_inputs(),
    outputs=ENSEMBLE.outputs,
    takes_text=True,
    ends_by_default=True,
)


def check_bls(inputs: Inputs, options: ModelOptions) -> None:
    """Raise InvalidTensorError, in the words of the original, for what its program refuses."""
    if not "".join(inputs.texts("text_input")):
        raise InvalidTensorError(
            "text_input is required: it must hold at least one character", param="text_input"
        )
    max_tokens = inputs.integer("max_tokens", 0)
    if max_tokens <= 0:
        raise InvalidTensorError(
            f"max_tokens must be a single value > 0, got {max_tokens}", param="max_tokens"
        )
    if inputs.integer("num_draft_tokens", 0) > 0 and not options.has_draft_model:
        raise InvalidTensorError(
            "cannot perform speculative decoding without draft model: leave num_draft_tokens out, "
            "or set tensorrt_llm_draft_model_name in the config.pbtxt",
            param="num_draft_tokens",
        )
