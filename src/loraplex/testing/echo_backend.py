"""A whole Backend in memory, for tests of front ends and clients: no model, no torch, no files.

Its answer is a pure function of model, adapters, prompt and sequence index (echo_sequence), a token
is a byte (echo_tokenizer), and every output carries one token per running sequence. A bad day can
be asked for: delays, errors at admission or in mid-stream, a server that is not ready. What the
front end did is recorded: `requests`, `finished`, `aborted`, `adapter_tensors`.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import (
    AdapterChoice,
    AdapterKey,
    AdapterRef,
    ByName,
    LoadPolicy,
    Residency,
)
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
    PermissionDeniedError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from loraplex.core.output import RequestOutput, ResolvedAdapter
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest, RequestId, check_adapters
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.serving.adapters.cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.admission import cut_prompt
from loraplex.serving.backend import Health, ModelCard
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.testing import echo_tokenizer
from loraplex.testing.echo_adapters import EchoAdapters
from loraplex.testing.echo_model import echo_chat_prompt, echo_model
from loraplex.testing.echo_stream import EchoStream, Fault


class EchoBackend:
    """Implements serving.backend.Backend. Not thread-safe: one event loop calls it.

    Public fields may be set and read by a test at any time:
    `delay_seconds` sleeps before every output; `num_cached_tokens` is reported in the timing of
    every request; `unready_reason` makes health and model_ready say no; `residency` is where the
    adapters are, by digest.
    """

    def __init__(
        self,
        models: Sequence[str] = ("echo",),
        *,
        max_model_len: int = 4096,
        delay_seconds: float = 0.0,
        chat: ChatFormat = UNKNOWN_FORMAT,
    ) -> None:
        """chat: how all of the models write reasoning and tool calls."""
        self.delay_seconds = delay_seconds
        self.num_cached_tokens = 0
        self.unready_reason = ""
        self.residency: dict[str, Residency] = {}
        self.unload_modes: list[UnloadMode] = []
        self.engine_stats = EngineStats()
        self.activity: AdapterActivity | None = None
        """None: as `residency` says, and nobody asks for any."""
        self.model_memory: ModelMemory | None = None
        """None: the engine was never there."""
        self.step_records: list[StepRecord] = []
        self.requests: list[GenerateRequest] = []
        self.scripts: deque[tuple[str, ...]] = deque()
        """What the next requests are answered instead of the echo: a text for each sequence."""
        self.prompt_ending = ""
        """What the chat template puts behind every prompt."""
        self.shown_tools: list[Sequence[Mapping[str, Any]] | None] = []
        """What each rendering of the chat template was given."""
        self.finished: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self._models = {
            name: echo_model(name, max_model_len=max_model_len, chat=chat) for name in models
        }
        self.adapter_tensors: list[tuple[RequestTensor, RequestTensor]] = []
        self._adapters = EchoAdapters()
        self._faults: deque[Fault] = deque()
        self._load_faults: deque[LoraplexError] = deque()
        self._request_ids = itertools.count(1)

    def plant(self, error: LoraplexError, *, after_outputs: int | None = None) -> None:
        """Let the next request fail: at admission, or after so many outputs. Faults queue up."""
        self._faults.append(Fault(error, after_outputs))

    def plant_load(self, error: LoraplexError) -> None:
        """Let the next load_adapter or add_adapter_tensors fail."""
        self._load_faults.append(error)

    def register(
        self,
        name: str,
        *,
        model: str | None = None,
        path: str | None = None,
        task_id: int | None = None,
        replace: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        """Register an adapter without awaiting; its digest is the SHA-256 of its path."""
        base = self.model(model if model is not None else next(iter(self._models)))
        if name in self._models:
            raise AdapterExistsError(f"{name!r} is already served", param="name")
        source = path if path is not None else f"/adapters/{name}"
        return self._adapters.add(
            base.name, name, source=source, task_id=task_id, replace=replace, canary=canary
        )

    def new_request_id(self) -> RequestId:
        return next(self._request_ids)

    def health(self) -> Health:
        return Health(live=True, ready=not self.unready_reason, reason=self.unready_reason)

    def model_ready(self, model: str) -> bool:
        return model in self._models and not self.unready_reason

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        del principal
        return list(self._models.values())

    def model(self, name: str) -> ModelCard:
        card = self._models.get(name)
        if card is None:
            raise self._unknown(name)
        return card

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]:
        del principal
        return self._adapters.cards(model)

    def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        del principal
        if name in self._models:
            return self._models[name], None
        matches = [
            (model, adapter)
            for model in self._models
            for adapter in (name, name.removeprefix(f"{model}:"))
            if self._adapters.find(model, adapter) is not None
        ]
        matches = list(dict.fromkeys(matches))
        if not matches:
            raise self._unknown(name)
        if len(matches) > 1:
            choices = " or ".join(f"{model}:{adapter}" for model, adapter in matches)
            raise ModelNotFoundError(f"{name!r} is ambiguous; say {choices}", param="model")
        model, adapter = matches[0]
        return self._models[model], ByName(adapter)

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
        del template_kwargs, omits_absent
        self.shown_tools.append(tools)
        self.model(model)
        found = [{"role": "system", "content": str(dict(one))} for one in documents or ()]
        prompt = echo_chat_prompt(
            [*found, *messages],
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        return (
            prompt.removesuffix("\n") if continue_final_message else prompt
        ) + self.prompt_ending

    def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.model(model)
        return echo_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        del is_continuation  # a token is a byte, wherever it stands
        self._check_vocabulary(model, token_ids)
        return echo_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, model: str, token_id: int) -> bytes:
        self._check_vocabulary(model, (token_id,))
        return echo_tokenizer.token_bytes(token_id)

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        fault = self._faults.popleft() if self._faults else None
        if fault is not None and fault.after_outputs is None:
            raise fault.error
        request.sampling.validate()
        check_adapters(request.adapters)
        prompt_token_ids = self._prompt_token_ids(request)
        if request.adapters and not principal.rights.use:
            raise PermissionDeniedError("this key may not use adapters")
        adapters = tuple(self._resolve(request, choice) for choice in request.adapters)
        return EchoStream(self, request, prompt_token_ids, adapters, fault)

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
        _check_may_manage(principal)
        if self._load_faults:
            raise self._load_faults.popleft()
        if dry_run:
            self._adapters.check_free(model, name, task_id, replace=replace)
            trial = EchoAdapters().add(model, name, source=path, task_id=task_id, canary=canary)
            return msgspec.structs.replace(trial, is_dry_run=True)
        return self.register(
            name, model=model, path=path, task_id=task_id, replace=replace, canary=canary
        )

    async def add_adapter_tensors(
        self,
        principal: Principal,
        *,
        model: str,
        task_id: int | None,
        weights: RequestTensor,
        config: RequestTensor,
    ) -> AdapterKey:
        _check_may_manage(principal)
        self.adapter_tensors.append((weights, config))
        await asyncio.sleep(self.delay_seconds)
        if self._load_faults:
            raise self._load_faults.popleft()
        return self._adapters.add_tensors(self.model(model).name, task_id, weights, config)

    async def unload_adapter(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        _check_may_manage(principal)
        self.unload_modes.append(mode)
        return self._adapters.remove(ref)

    async def rollback_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        _check_may_manage(principal)
        return self._adapters.rollback(ref, number)

    async def pin_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        _check_may_manage(principal)
        return self._adapters.pin(ref, number, is_pinned=is_pinned)

    async def alias_adapter(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        _check_may_manage(principal)
        return self._adapters.alias(ref, alias, replace=replace)

    async def describe_adapter(self, principal: Principal, ref: AdapterRef) -> AdapterDetails:
        del principal
        return self._adapters.describe(ref, self.residency)

    async def adapter_residency(self, model: str) -> Mapping[str, Residency]:
        self.model(model)
        return dict(self.residency)

    async def adapter_activity(self, model: str) -> AdapterActivity:
        self.model(model)
        return self.activity or AdapterActivity(dict(self.residency))

    def memory(self, model: str) -> ModelMemory:
        self.model(model)
        if self.model_memory is None:
            raise NotReadyError(f"model {model!r} is starting", retry_after_seconds=2)
        return self.model_memory

    async def stored_adapters(self, model: str) -> StoredAdapters:
        return StoredAdapters(adapters=len(self.adapters(LOCAL, model)), files=0, num_bytes=0)

    def load_times(self, model: str) -> Mapping[str, Durations]:
        tiers = self.stats(model).adapters
        return {"read": tiers.read_times, "copy": tiers.copy_times}

    def steps(self, model: str, limit: int) -> Sequence[StepRecord]:
        self.model(model)
        return self.step_records[-limit:]

    def stats(self, model: str) -> EngineStats:
        self.model(model)
        return self.engine_stats

    def _unknown(self, name: str) -> ModelNotFoundError:
        served = [*self._models, *(card.name for card in self.adapters(LOCAL))]
        return ModelNotFoundError(
            f"there is no model or adapter {name!r}; there are: {', '.join(served)}", param="model"
        )

    def _check_vocabulary(self, model: str, token_ids: Sequence[int]) -> None:
        size = self.model(model).vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise TokenOutOfVocabularyError(
                    f"token id {token_id} is not in the vocabulary: ids are 0 to {size - 1}",
                    param="prompt",
                )

    def _prompt_token_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        card = self.model(request.model)
        if isinstance(request.prompt, str):
            token_ids = tuple(
                self.tokenize(
                    card.name, request.prompt, add_special_tokens=request.add_special_tokens
                )
            )
        else:
            token_ids = request.prompt
        token_ids = tuple(cut_prompt(request, token_ids, card))
        self._check_vocabulary(card.name, token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if len(token_ids) >= card.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens; with one to generate, the model's limit "
                f"of {card.max_model_len} leaves room for {card.max_model_len - 1}",
                param="prompt",
            )
        return token_ids

    def _resolve(self, request: GenerateRequest, choice: AdapterChoice) -> ResolvedAdapter:
        version = self._adapters.resolve(request.model, choice.key)
        if request.load_policy is LoadPolicy.NEVER and version.digest not in self.residency:
            raise AdapterNotFoundError(
                f"the adapter {version.digest[:12]} was not in cache and load_lora_weights is set "
                "to never: send auto, and it is loaded"
            )
        return ResolvedAdapter(version.name, version.digest, choice.scale)


def _check_may_manage(principal: Principal) -> None:
    if not principal.rights.manage:
        raise PermissionDeniedError("this key may not load or unload adapters")
