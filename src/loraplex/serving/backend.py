"""Contract between a front end and the rest of loraplex.

A front end turns bytes into a `GenerateRequest`, awaits `Backend.generate`, and turns
`RequestOutput`s into bytes. `Service`, `ServedModel` and `CatalogAdmin` of serving implement the
protocols.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.uploads import Uploads
from loraplex.core.adapter import AdapterKey, AdapterRef, Residency
from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import LoraplexError
from loraplex.core.output import Pooled, RequestOutput
from loraplex.core.principal import LOCAL, Principal, TenantUsage
from loraplex.core.request import GenerateRequest, RequestBatch, RequestId
from loraplex.core.score_format import ScoreFormat
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.core.vector_format import VectorFormat
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    TrialReport,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.adapter_list import AdapterPage, AdapterQuery
from loraplex.serving.adapter_usage import AdapterUsage
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.text.chat_format import ChatFormat
from loraplex.serving.text.chat_messages import ROLES
from loraplex.text.tokenizer import PairTokens

T_co = TypeVar("T_co", covariant=True)

__all__ = [
    "AdapterCard",
    "Admission",
    "Backend",
    "Cancellable",
    "Health",
    "ModelCard",
    "ReadyOutputs",
    "admit_all",
    "admit_together",
    "close_outputs",
    "vector_of",
]


class EncoderFormat(msgspec.Struct, frozen=True):
    """What requests to a model with an encoder are checked against."""

    max_tokens: int
    """Maximum number of tokens of an input."""
    first_ids: tuple[int, ...]
    """Tokens that every output begins with, if a request names no others."""
    never_ids: tuple[int, ...] = ()
    """Tokens that are never generated."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served base model."""

    name: str
    served_names: tuple[str, ...] = ()
    """Further names that clients may use."""
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
    """Data type of stored keys and values."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    device_name: str = ""
    """Name of the GPU or processor; empty until the engine has started once."""
    quantization: str | None = None
    """Precision or stored format of the linear weights; None: they have the type `dtype`."""
    kv_block_size: int = 16
    """Tokens."""
    has_chat_template: bool = False
    chat: ChatFormat = ChatFormat()
    """How it writes reasoning and tool calls."""
    generates: bool = True
    """Whether it has an output layer; else it gives vectors and scores only."""
    vectors: VectorFormat = VectorFormat()
    """How it makes vectors of texts."""
    classes: ClassFormat = ClassFormat()
    """How it classifies texts."""
    encoder: EncoderFormat | None = None
    """None: the model is a decoder alone."""
    scores: ScoreFormat = ScoreFormat()
    """How it scores pairs of texts."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.served_names)

    @property
    def longest_prompt(self) -> int:
        """Return how many tokens a prompt may have at most: the encoder's input, if it has one."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens


class Health(msgspec.Struct, frozen=True):
    """Live: the process serves. Ready: every model would accept a request now."""

    live: bool
    ready: bool
    reason: str = ""
    """Why it is not ready."""


class Chats(Protocol):
    """Chat template of a base model."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        omits_absent: bool = False,
        roles: Sequence[str] = ROLES,
    ) -> str:
        """Return the prompt text of a conversation; it already contains the special tokens.

        With continue_final_message it ends with the last message's content, for the model to
        continue. With omits_absent a variable that is None is not defined for the template. roles:
        that messages may have.
        Raises InvalidRequestError if the model has no chat template or the template refuses.
        """
        ...


class TextModel(Protocol):
    """A base model's texts: what generation needs of it, in every front-end process."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def chats(self) -> Chats: ...

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def tokenize_pair(self, first: str, second: str) -> PairTokens:
        """Return the tokens of two texts, joined as the tokenizer joins a pair."""
        ...

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """Return the text of token ids: of a whole text, or of one that continues another.

        Tokenizers that put a space before every text drop it from a whole one only.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that one token stands for (OpenAI's logprobs show them)."""
        ...


class Model(TextModel, Protocol):
    """A served base model: its texts, its numbers and what it holds."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def engine_restarts(self) -> Mapping[str, int]:
        """Number of restarts of its engine by reason: crash, hang, kill."""
        ...

    def adapter_names(self) -> Sequence[tuple[str, str]]:
        """Return (name, digest) of the server's own adapters, in any order.

        The digest is empty until an adapter was validated. Metrics list all names at each scrape,
        so this makes no cards.
        """
        ...

    async def adapter_residency(self) -> Mapping[str, Residency]:
        """Return where the engine has its adapters, by digest; absent ones are left out."""
        ...

    async def adapter_activity(self) -> AdapterActivity:
        """Return where the engine has its adapters, and how many requests use and await them.

        The values are of one moment between two steps. During a long step the last known ones are
        returned; without an engine the activity is empty.
        """
        ...

    def memory(self) -> ModelMemory:
        """Return the memory of the model, tier by tier.

        Raises NotReadyError before the engine has started once.
        """
        ...

    async def stored_adapters(self) -> StoredAdapters:
        """Return the number and size of the adapters that are stored on disk."""
        ...

    def load_times(self) -> Mapping[str, Durations]:
        """Return how long loads of adapters took, by stage."""
        ...

    def steps(self, limit: int, after_ns: int | None = None) -> Sequence[StepRecord]:
        """Return the newest launched steps, oldest first.

        With after_ns: the first ones that started later.
        """
        ...


class AdapterAdmin(Protocol):
    """Changes and descriptions of adapters. Raises errors of core.errors only."""

    async def load(
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
        """Stage, validate and register an adapter; with dry_run all but the last.

        With canary it runs a forward pass first and refuses an adapter which gives the base
        model's log probabilities. Raises before anything changes if the adapter is bad.
        """
        ...

    async def try_out(
        self,
        principal: Principal,
        *,
        model: str,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        canary: bool = False,
    ) -> TrialReport:
        """Run `load` with dry_run, and account for every tensor.

        What is wrong with the adapter is reported; other errors are raised.
        """
        ...

    async def load_tensors(
        self,
        principal: Principal,
        *,
        model: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
    ) -> AdapterKey:
        """Register the adapter that a request contains, and return its key.

        `weights` and `config` are TensorRT-LLM's lora_weights and lora_config. Under a known task
        id they become a new version or, if the bytes are the same, change nothing. Without a task
        id the key is the digest. Raises as `load`.
        """
        ...

    async def unload(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        """Forget a name with its history; the name of an alias removes only the alias."""
        ...

    async def rollback(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        """Give a name its version of that number again, or the one before the present.

        In-flight requests keep the version that they began with. Raises AdapterNotFoundError.
        """
        ...

    async def pin(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        """Keep a version in the history at any age, or no longer; None: the present version."""
        ...

    async def alias(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        """Add a name which follows the adapter's present version. Raises AdapterExistsError."""
        ...

    async def describe(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterDetails:
        """Return everything known of an adapter: of its present version, or of a kept one.

        Raises AdapterNotFoundError.
        """
        ...


class TextBackend(Protocol):
    """What generation needs of serving, in every front-end process. Raises errors of core.errors
    only."""

    def new_request_id(self) -> RequestId: ...

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        """Return the models that a principal may see, at least one; the first is the default."""
        ...

    def model(self, name: str) -> TextModel:
        """Raise ModelNotFoundError, whose message lists the models and adapters."""
        ...

    async def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        """Return what OpenAI's `model` field means: a base model, an adapter, or both joined as
        `base:adapter` or `base_adapter`. A plain name of an adapter goes before a joined one.

        Raises ModelNotFoundError.
        """
        ...

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        """Admit a request; the iterator yields its outputs.

        The await itself raises every error that can be known in advance: bad parameters, a prompt
        that is too long, an unknown adapter, a full queue. The iterator raises later errors.
        Closing the iterator aborts the request.
        """
        ...

    async def pool(self, request: GenerateRequest, principal: Principal) -> Pooled:
        """Return the vector of a prompt. Raises as `generate`, and the errors of its iterator."""
        ...


class Backend(TextBackend, Protocol):
    """What front ends need of serving."""

    @property
    def adapter_admin(self) -> AdapterAdmin: ...

    @property
    def uploads(self) -> Uploads | None:
        """Return what clients sent to be loaded; None: they may not."""
        ...

    @property
    def adapter_usage(self) -> AdapterUsage: ...

    def health(self) -> Health: ...

    def usage(self, principal: Principal) -> TenantUsage:
        """Return how much of its limits a tenant uses, over all protocols."""
        ...

    def model_problem(self, model: str) -> str:
        """Return why a model would not accept a request now; empty if it would."""
        ...

    def model_ready(self, model: str) -> bool:
        """Return whether a model serves; False also for an unknown model."""
        ...

    def model(self, name: str) -> Model: ...

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]: ...

    async def adapter_page(self, principal: Principal, query: AdapterQuery) -> AdapterPage:
        """Return one page of the adapters that a principal may see."""
        ...


Admission = AsyncIterator[RequestOutput] | LoraplexError
"""Outputs of a request, or why it was not admitted."""


async def admit_together(
    backend: Backend,
    requests: Sequence[GenerateRequest],
    principal: Principal,
    stack: contextlib.AsyncExitStack,
) -> list[Admission]:
    """Admit requests as one batch, each whether or not others are refused; the stack closes them.

    One plan can begin them all.
    """

    async def admit(request: GenerateRequest) -> Admission:
        try:
            outputs = await backend.generate(request, principal)
        except LoraplexError as error:
            return error
        stack.push_async_callback(close_outputs, outputs)
        return outputs

    with RequestBatch() as batch:
        batched = [msgspec.structs.replace(request, batch=batch) for request in requests]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(admit(request)) for request in batched]
    return [task.result() for task in tasks]


async def admit_all(
    admit: Callable[[GenerateRequest], Awaitable[AsyncIterator[RequestOutput]]],
    requests: Sequence[GenerateRequest],
    stack: contextlib.AsyncExitStack,
) -> list[AsyncIterator[RequestOutput]]:
    """Admit requests as one batch, all or none; the stack closes them.

    One plan can begin them all; a single one does not wait. Raises the error of the first refused.
    """
    streams: list[AsyncIterator[RequestOutput]] = []
    with RequestBatch() if len(requests) > 1 else contextlib.nullcontext() as batch:
        for request in requests:
            if streams:
                await asyncio.sleep(0)  # many long prompts take a while
            streams.append(await admit(msgspec.structs.replace(request, batch=batch)))
            stack.push_async_callback(close_outputs, streams[-1])
    return streams


@runtime_checkable
class ReadyOutputs(Protocol[T_co]):
    """Outputs of a request that can be read without a task, in the turn in which they come."""

    def when_ready(self, read: Callable[[], bool]) -> None:
        """Call a function whenever outputs come while a task awaits the next one.

        It returns whether it has read them. Otherwise the task gets them, and what it raises.
        """
        ...

    def take_ready(self) -> T_co | None:
        """Return the next output; None if it is to be awaited. For `read` only."""
        ...


@runtime_checkable
class Cancellable(Protocol):
    """Outputs of a request that can be ended early and still be read to their end."""

    def cancel(self) -> None:
        """End the request with what it has; no change if it has ended.

        Its last output comes as usual. Sequences that had no end have FinishReason.ABORT.
        """
        ...


async def vector_of(outputs: AsyncIterator[RequestOutput]) -> Pooled:
    """Read and close the outputs of a pooled request, and return its vector."""
    try:
        output = await anext(outputs)
    finally:
        await close_outputs(outputs)
    return Pooled(output.adapters, output.prompt_token_ids, output.pooled, output.timing)


async def close_outputs(outputs: AsyncIterator[RequestOutput]) -> None:
    """Close the iterator of Backend.generate: aborts the request unless it is over."""
    close: Callable[[], Awaitable[None]] | None = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
