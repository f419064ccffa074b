"""Messages between a front-end process and the owner, as msgpack."""

import msgspec

from loraplex.core.adapter import AdapterKey
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput, ResolvedAdapter
from loraplex.core.principal import Principal
from loraplex.core.request import EngineRequest, GenerateRequest, RequestId

# ---------------------------------------------------------------- from a front-end process


class Opened(msgspec.Struct, frozen=True, tag=True):
    """It serves its ports."""

    number: int
    """Number of the process."""


class GenerateRemotely(msgspec.Struct, frozen=True, tag=True):
    """Admit a request. The reply is AdmittedByOwner or Refused; EngineOutputs follow the first."""

    request: GenerateRequest
    """Request without its batch, which cannot be sent."""
    principal: Principal
    batch: int = 0
    """Number of the batch, unique in the process; 0: none."""


class CloseBatch(msgspec.Struct, frozen=True, tag=True):
    """No more requests of a batch follow."""

    batch: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End one sequence of a request."""

    request_id: RequestId
    sequence_index: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End a request, whose outputs are not read any more. The last message about every request."""

    request_id: RequestId
    num_tokens: int
    """Tokens that its tenant had: those of the prompt and of the delivered outputs."""
    is_error: bool = False
    """Whether it ended with an error."""


class Find(msgspec.Struct, frozen=True, tag=True):
    """Find a model or adapter by name. The reply is FoundName or Refused."""

    query_id: int
    name: str
    principal: Principal


class Numbers(msgspec.Struct, frozen=True, tag=True):
    """Reply to Count: the metric families of the process."""

    query_id: int
    families: bytes


class ListedRequests(msgspec.Struct, frozen=True, tag=True):
    """Reply to ListRequests: a page of requests, as JSON."""

    query_id: int
    page: bytes


FromFrontend = (
    Opened | GenerateRemotely | CloseBatch | Abort | Leave | Find | Numbers | ListedRequests
)


# ---------------------------------------------------------------- from the owner


class State(msgspec.Struct, frozen=True, tag=True):
    """What changes in a server that a front-end process must know at all times."""

    is_draining: bool
    max_model_lens: dict[str, int]


class AdmittedByOwner(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest
    """Request with an empty prompt if it is that of the message GenerateRemotely."""
    adapters: tuple[ResolvedAdapter, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reply to GenerateRemotely (request_id) or Find (query_id): the error."""

    query_id: int
    error: ErrorInfo


class OwnerOutputs(msgspec.Struct, frozen=True, tag=True):
    """What the engines have output since the last message, in order."""

    outputs: list[EngineOutput]


class FoundName(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    model: str
    key: AdapterKey | None


class Count(msgspec.Struct, frozen=True, tag=True):
    """Report the metrics. The reply is Numbers."""

    query_id: int


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Report recent requests. The reply is ListedRequests."""

    query_id: int
    query: bytes
    """JSON."""


class Refresh(msgspec.Struct, frozen=True, tag=True):
    """Read the API keys again, and open the access log again."""


class StopProcess(msgspec.Struct, frozen=True, tag=True):
    """End once the open responses are sent, or after so many seconds."""

    seconds: float


FromOwner = (
    State
    | AdmittedByOwner
    | Refused
    | OwnerOutputs
    | FoundName
    | Count
    | ListRequests
    | Refresh
    | StopProcess
)
