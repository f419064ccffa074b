"""The whole contract between a front end and the rest of loraplex.

A front end turns bytes into a `GenerateRequest`, awaits `Backend.generate`, and turns
`RequestOutput`s into bytes. `serving.service.Service` implements it; `testing.EchoBackend` too.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterKey, AdapterRef, Residency
from loraplex.core.output import RequestOutput
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.serving.adapters.cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.text.chat_format import ChatFormat

__all__ = ["AdapterCard", "Backend", "Health", "ModelCard", "close_outputs"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served base model."""

    name: str
    path: str
    created: int
    """Unix seconds."""
    max_model_len: int
    max_input_len: int | None = None
    """Longest prompt, if it is less than what max_model_len leaves."""
    vocab_size: int
    eos_token_id: int | None
    pad_token_id: int | None
    dtype: str
    kv_dtype: str
    """Of stored keys and values."""
    kv_block_size: int = 16
    """Tokens."""
    chat: ChatFormat = ChatFormat()
    """How it writes reasoning and tool calls."""


class Health(msgspec.Struct, frozen=True):
    """Live: the process serves. Ready: every model would answer a request now."""

    live: bool
    ready: bool
    reason: str = ""
    """Why it is not ready."""


class Backend(Protocol):
    """Raises errors of core.errors only."""

    def new_request_id(self) -> RequestId: ...

    def health(self) -> Health: ...

    def model_ready(self, model: str) -> bool:
        """False for an unknown model, too."""
        ...

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        """Those that are there for who asks, of at least one; the first is the default."""
        ...

    def model(self, name: str) -> ModelCard:
        """Raises ModelNotFoundError, whose message lists the models and adapters."""
        ...

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]: ...

    def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        """What OpenAI's `model` field means: a base model, an adapter's name, or `base:adapter`.

        Raises ModelNotFoundError.
        """
        ...

    async def render_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        omits_absent: bool = False,
    ) -> str:
        """The prompt text of a conversation; it already holds the special tokens.

        continue_final_message: it ends with the last message's content, for the model to go on.
        omits_absent: to the template, what is None is not defined.
        Raises InvalidRequestError if the model has no chat template or the template refuses.
        """
        ...

    def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def detokenize(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """The text of token ids: a whole one or, is_continuation, what follows some other text.

        Tokenizers that put a space before every text drop it from a whole one only.
        """
        ...

    def token_bytes(self, model: str, token_id: int) -> bytes:
        """The exact bytes that one token stands for (OpenAI's logprobs show them)."""
        ...

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        """Admit a request; the iterator gives its outputs.

        Everything that can be known to be wrong beforehand is raised by the await itself: bad
        parameters, a prompt that is too long, an unknown adapter, a full queue. The iterator
        raises what happens later. Closing the iterator aborts the request.
        """
        ...

    async def load_adapter(
        self,
        principal: Principal,
        *,
        model: str,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        dry_run: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        """Stage, validate and register; with dry_run all but the last.

        With canary it runs a forward first, and what gives the base model's log probabilities is
        refused. Raises before anything changes if the adapter is bad.
        """
        ...

    async def add_adapter_tensors(
        self,
        principal: Principal,
        *,
        model: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
    ) -> AdapterKey:
        """Register the adapter that a request brings along; the key means it from now on.

        `weights` and `config` are TensorRT-LLM's lora_weights and lora_config. Under a task id that
        is known already they are a new version, or, if the bytes are the same, change nothing.
        Without a task id the key is the digest. Raises as load_adapter.
        """
        ...

    async def unload_adapter(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        """Forget a name with its history; by the name of an alias only the alias."""
        ...

    async def rollback_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        """Give a name its version of that number again, or the one before the present.

        Requests in work end on what they began with. Raises AdapterNotFoundError.
        """
        ...

    async def pin_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        """Keep a version in the history however old it grows, or no longer; None: the present."""
        ...

    async def alias_adapter(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        """Another name, which follows the adapter's present version. Raises AdapterExistsError."""
        ...

    async def describe_adapter(self, principal: Principal, ref: AdapterRef) -> AdapterDetails:
        """Raises AdapterNotFoundError."""
        ...

    async def adapter_residency(self, model: str) -> Mapping[str, Residency]:
        """Where the engine has its adapters, by digest; those that are absent are left out."""
        ...

    async def adapter_activity(self, model: str) -> AdapterActivity:
        """Where the engine has its adapters, and for whom, at one moment between two steps.

        While a long step runs it is what was told last; empty without an engine.
        """
        ...

    def memory(self, model: str) -> ModelMemory:
        """What the model takes, tier by tier. Raises NotReadyError before the engine was there."""
        ...

    async def stored_adapters(self, model: str) -> StoredAdapters:
        """The adapters that may be asked for, on the disk."""
        ...

    def load_times(self, model: str) -> Mapping[str, Durations]:
        """How long loads of adapters took, by stage."""
        ...

    def steps(self, model: str, limit: int) -> Sequence[StepRecord]:
        """The newest launched steps, oldest first."""
        ...

    def stats(self, model: str) -> EngineStats: ...


async def close_outputs(outputs: AsyncIterator[RequestOutput]) -> None:
    """Close the iterator of Backend.generate: aborts the request unless it is over."""
    close: Callable[[], Awaitable[None]] | None = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
