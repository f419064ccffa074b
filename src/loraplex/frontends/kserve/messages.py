"""An inference request and its responses, as both wires see them: names, tensors, parameters."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.core.request import BINARY_LOGIT_BYTES
from loraplex.core.support import Feature, Support
from loraplex.frontends.kserve.tensors import Tensor

Parameter = bool | int | float | str
JSON_LOGIT_BYTES: Final = 20
NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})


class InferRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a client sent. Nothing in it is checked against a model yet."""

    model: str
    version: str = ""
    """Empty: whichever is served."""
    request_id: str = ""
    """The client's own: may be empty, may repeat."""
    inputs: tuple[Tensor, ...] = ()
    requested: tuple[str, ...] = ()
    """Names of outputs; empty is all that the request produces."""
    parameters: Mapping[str, Parameter] = NO_PARAMETERS
    logit_bytes: int = BINARY_LOGIT_BYTES
    """Bytes that one logit takes in the response."""


class InferResponse(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One response. A request over a stream may get several; exactly one of them is final."""

    model: str
    version: str
    request_id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = NO_PARAMETERS
    is_final: bool = True

    @property
    def num_bytes(self) -> int:
        """Size of the outputs' elements."""
        return sum([tensor.num_bytes for tensor in self.outputs])


class ResponseStream(AsyncIterator[InferResponse]):
    """Close it: that aborts the request if it still runs."""

    @abstractmethod
    async def aclose(self) -> None:
        """Idempotent."""


class OneResponse(ResponseStream):
    """That is there already."""

    def __init__(self, response: InferResponse) -> None:
        self._response: InferResponse | None = response

    async def __anext__(self) -> InferResponse:
        response, self._response = self._response, None
        if response is None:
            raise StopAsyncIteration
        return response

    async def aclose(self) -> None:
        self._response = None


REQUEST_TYPE: Final = "request_type"
DIMENSIONS: Final = "dimensions"
PROMPT_NAME: Final = "prompt_name"

# As Triton, its clients and we know them. Others are sampling parameters of a model of the vLLM
# backend, and mean nothing to other models.
REQUEST_PARAMETERS: Final = (
    Feature("priority", note="1 comes first; 0: none, as level 100", form="integer"),
    Feature("timeout", note="microseconds until the request is given up", form="integer"),
    Feature("binary_data_output", note="all outputs as binary data", form="boolean"),
    Feature("adapters", note="names of adapters, with weights", form="string", is_ours=True),
    Feature(DIMENSIONS, note="length of the output `embedding`", form="integer", is_ours=True),
    Feature(
        PROMPT_NAME,
        note="prompt of the model folder before the text, for the output `embedding`",
        form="string",
        is_ours=True,
    ),
    Feature(
        REQUEST_TYPE,
        Support.REFUSED,
        "disaggregated serving; context_and_generation may stay",
        "string",
    ),
    Feature(
        "triton_enable_empty_final_response",
        Support.NO_EFFECT,
        "the last response of a stream is the final one: no empty one follows",
        "boolean",
    ),
    *(
        Feature(name, Support.NO_EFFECT, "of sequence batching")
        for name in ("sequence_id", "sequence_start", "sequence_end")
    ),
    Feature("Streaming", Support.NO_EFFECT, "the tensor of that name decides", "boolean"),
    Feature("headers", Support.NO_EFFECT, "models see no headers"),
)
TENSOR_PARAMETERS: Final = (
    Feature("binary_data_size", note="bytes of an input after the JSON", form="integer"),
    Feature("binary_data", note="of one output", form="boolean"),
    Feature("classification", note="of an output: the so many highest values", form="integer"),
    Feature("shared_memory_region", note="a region of system shared memory", form="string"),
    Feature("shared_memory_byte_size", note="of the region", form="integer"),
    Feature("shared_memory_offset", note="in the region", form="integer"),
)
