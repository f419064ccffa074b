"""An inference request and its responses, as both wires see them: names, tensors, parameters."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from loraplex.frontends.kserve.tensors import Tensor

Parameter = bool | int | float | str
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


class InferResponse(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One response. A request over a stream may get several; exactly one of them is final."""

    model: str
    version: str
    request_id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = NO_PARAMETERS
    is_final: bool = True
