"""An inference request and its responses, as both wires see them: names, tensors, parameters."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.core.request import BINARY_LOGIT_BYTES
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
