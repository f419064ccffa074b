"""An inference request and its responses, as both wires see them: names, tensors, parameters."""

import dataclasses
from collections.abc import Mapping

from loraplex.frontends.kserve.tensors import Tensor

Parameter = bool | int | float | str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """What a client sent. Nothing in it is checked against a model yet."""

    model: str
    version: str = ""
    """Empty: whichever is served."""
    request_id: str = ""
    """The client's own: may be empty, may repeat."""
    inputs: tuple[Tensor, ...] = ()
    requested: tuple[str, ...] = ()
    """Names of outputs; empty is all that the request produces."""
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferResponse:
    """One answer. A request over a stream may get several; exactly one of them is final."""

    model: str
    version: str
    request_id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    is_final: bool = True
