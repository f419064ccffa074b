"""A request in two forms: as the client sent it, and as the engine receives it."""

import contextlib
import enum
from collections.abc import Callable

import msgspec

from loraplex.core.adapter import AdapterChoice, AdapterUse, LoadPolicy
from loraplex.core.image import ImageSpan
from loraplex.core.retention import KVRetention
from loraplex.core.task import Generate, HasTask, Task
from loraplex.core.vector_format import TextPrompts

RequestId = int
"""The server's own id: uint64, unique in its life. The client's string is kept separately."""


class TruncationSide(enum.StrEnum):
    """Side on which a prompt is cut."""

    LEFT = "left"
    RIGHT = "right"


class PromptTruncation(msgspec.Struct, frozen=True):
    """Limit of a prompt; the rest is cut off."""

    max_tokens: int | None
    """None: what the model's length leaves after max_tokens new tokens."""
    side: TruncationSide = TruncationSide.LEFT
    kept: tuple[int, int] | None = None
    """Tokens at the beginning and at the end that stay; None: those of the tokenizer if the request
    is no generation."""
    max_inner: int | None = None
    """Maximum number of tokens between them."""


class RequestBatch(contextlib.AbstractContextManager["RequestBatch"]):
    """Requests that a client sent as one: an engine gets them together, when the batch is closed.

    It is a context manager: the block admits the requests, and its end closes the batch.
    """

    def __init__(self) -> None:
        self.is_open = True
        """Whether more requests may come."""
        self._actions: dict[Callable[[], None], None] = {}

    def when_closed(self, action: Callable[[], None]) -> None:
        """Call an action once when the batch is closed."""
        self._actions[action] = None

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:  # else the block's caller aborts them, and none needs to be sent
            self.close()

    def close(self) -> None:
        """No more requests follow."""
        self.is_open = False
        for action in self._actions:
            action()


BINARY_LOGIT_BYTES = 4
REPEATED_BYTES = 8
"""Bytes that a response takes for a token of the prompt, as text or as an id, for its limit."""


class Prefix(msgspec.Struct, frozen=True):
    """Which text of an embedding model stands before the text of a request."""

    name: str | None = None
    """Name of a prompt of the adapter, or of the model; None: the default."""
    roles: tuple[str, ...] = ()
    """Names of which the first that is there is used; without any of them the default."""


class GenerateRequest(HasTask, msgspec.Struct, frozen=True, kw_only=True):
    """A request as the client meant it, free of the protocol that it used."""

    request_id: RequestId
    model: str
    """Name of a served base model."""
    prompt: str | tuple[int, ...]
    """Input of the encoder, if the model has one."""
    decoder_prompt: str | tuple[int, ...] | None = None
    """Beginning of the output of a model with an encoder, which is not returned: a text without
    special tokens, or ids. None: what the model's outputs begin with."""
    forced_bos_token_id: int | None = None
    """Token after the first one of such an output, such as a target language; None: the model's."""
    prefix: Prefix | None = None
    """Before a text, never before token ids; None: nothing."""
    task: Task = Generate()
    adapters: tuple[AdapterChoice, ...] = ()
    """Empty: the base model. Several: their changes are added up."""
    load_policy: LoadPolicy = LoadPolicy.AUTO
    client_request_id: str = ""
    """The client's own id: may be empty, may repeat."""
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that are part of the text although all others are skipped."""
    add_special_tokens: bool = True
    """False if the prompt text already contains them (a rendered chat template)."""
    truncation: PromptTruncation | None = None
    """None: a prompt that is too long is an error."""
    ends_at_max_len: bool = False
    """Whether max_tokens beyond what the model's length leaves are cut, and are no error."""
    cache_salt: str = ""
    """Salt chosen by the client: only requests with an equal one share KV blocks."""
    priority: int = 0
    """Lower is sooner."""
    timeout_seconds: float | None = None
    end_id: int | None = None
    """End-of-text token that replaces the model's own; -1: none."""
    retention: KVRetention | None = None
    batch: RequestBatch | None = None
    """Requests that the client sent together with this one."""
    logit_bytes: int = BINARY_LOGIT_BYTES
    """Bytes that one logit takes in the response, for its limit."""
    repeated_bytes: int = 0
    """Bytes that each output takes for each token of the prompt, which it repeats."""

    def with_prefix(self, prompts: TextPrompts) -> "GenerateRequest":
        """Return the request with its prefix as a part of its text.

        Raises InvalidParameterError for a name that is none of the prompts.
        """
        if self.prefix is None:
            return self
        prompt, before = self.prompt, prompts.text(self.prefix.name, self.prefix.roles)
        if isinstance(prompt, str):
            prompt = before + prompt
        return msgspec.structs.replace(self, prompt=prompt, prefix=None)


class EngineRequest(HasTask, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An admitted request: tokens, digests and absolute times only."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    encoder_token_ids: tuple[int, ...] = ()
    """Input of the model's encoder; empty if it has none."""
    task: Task
    """`max_tokens` and `seed` of sampling parameters are set."""
    eos_token_ids: tuple[int, ...]
    adapters: tuple[AdapterUse, ...]
    """Each digest once, ascending; no scale is 0. So one composition has one salt."""
    kv_salt: bytes
    """Hashed into every KV block: prompts share blocks only if it is equal."""
    tenant: str
    priority: int
    share_weight: float = 1.0
    """Weight (> 0) of the fair share that the request draws on: one of weight 2 gets twice the
    tokens."""
    arrival_ns: int
    deadline_ns: int | None
    requires_resident: bool = False
    """Refuse the request if an adapter would have to be read from its file first."""
    retention: KVRetention | None = None
    outputs: tuple[tuple[int, ...], ...] = ()
    """Tokens of each sequence that a former engine had output; they are not output again."""
    ended: tuple[int, ...] = ()
    """Indices of the sequences that had ended in a former engine."""
    prompt_scores_delivered: bool = False
    """A former engine had delivered the prompt log probabilities (and logits)."""
    images: tuple[ImageSpan, ...] = ()
    """Images of the prompt, in their order. Its tokens there are the model's placeholder."""
    image_salt: bytes = b""
    """Salt of encoded images: requests share the rows of an image only if it is equal. It is that
    of the KV without adapters."""
    num_restarts: int = 0
    """Number of engines that died with this request. Above 0, the request was accepted before, and
    no queue limit applies to it."""
