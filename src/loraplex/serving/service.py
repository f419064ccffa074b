"""The one door to several served models: what `Backend` promises, kept.

It knows names, principals and lifecycles; tokens and text are the models', adapters' files the
loading's.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterKey, AdapterRef, ByName
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
    PermissionDeniedError,
)
from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.serving.adapter_loading import AdapterLoading, card_of, check_is_no_base
from loraplex.serving.admission import admit
from loraplex.serving.backend import AdapterCard, Health, ModelCard
from loraplex.serving.generation import Generation
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel, answered_by, uses

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05


class Service:
    """Implements `serving.backend.Backend`. All methods run on one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        loading: AdapterLoading,
        metrics: RequestMetrics,
        clock: Clock,
    ) -> None:
        self._models = {model.card.name: model for model in models}
        self._loading = loading
        self._metrics = metrics
        self._clock = clock
        self._request_ids = itertools.count(1)
        self._is_started = False
        self._is_draining = False

    async def start(self) -> None:
        """Start the engines, load the configured adapters, be ready. Raises why it cannot."""
        models = list(self._models.values())
        await asyncio.gather(*(model.start() for model in models))
        for model in models:
            await self._loading.load_configured(model, self._models)
        self._is_started = True

    async def drain(self, timeout_seconds: float) -> None:
        """Take no more requests; wait until those in work have ended, or the time is up."""
        self._is_draining = True
        deadline = self._clock.now_ns() + int(timeout_seconds * 1e9)
        while any(model.engine.num_requests for model in self._models.values()):
            if self._clock.now_ns() > deadline:
                logger.warning("stopping with requests in work: the time to drain is up")
                return
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        self._is_draining = True
        await asyncio.gather(*(model.engine.close() for model in self._models.values()))
        await self._loading.close()

    def new_request_id(self) -> RequestId:
        return next(self._request_ids)

    def health(self) -> Health:
        if self._is_draining:
            return Health(live=True, ready=False, reason="the server is stopping")
        if not self._is_started:
            return Health(live=True, ready=False, reason="the server is starting")
        problems = [model.problem for model in self._models.values() if model.problem]
        return Health(live=True, ready=not problems, reason="; ".join(problems))

    def model_ready(self, model: str) -> bool:
        served = self._models.get(model)
        is_open = self._is_started and not self._is_draining
        return served is not None and is_open and not served.problem

    def models(self) -> Sequence[ModelCard]:
        return [model.card for model in self._models.values()]

    def model(self, name: str) -> ModelCard:
        return self._served(name).card

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]:
        served = self._models.values() if model is None else [self._served(model)]
        return [
            card_of(version)
            for one in served
            for version in one.store.list(principal.tenant, one.card.name)
        ]

    def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        if name in self._models:
            return self._models[name].card, None
        matches = [
            (model, adapter)
            for model, adapter in self._readings(name)
            if model.has_adapter(adapter, principal.tenant)
        ]
        if not matches:
            raise self._unknown(name, principal)
        if len(matches) > 1:
            choices = " or ".join(f"{model.card.name}:{adapter}" for model, adapter in matches)
            raise ModelNotFoundError(f"{name!r} is ambiguous; say {choices}", param="model")
        model, adapter = matches[0]
        return model.card, ByName(adapter)

    def _readings(self, name: str) -> Iterator[tuple[ServedModel, str]]:
        """What a name may mean: `adapter` of any model, or `base:adapter`."""
        for base, model in self._models.items():
            yield model, name
            if name.startswith(f"{base}:"):
                yield model, name.removeprefix(f"{base}:")

    def _unknown(self, name: str, principal: Principal) -> LoraplexError:
        if not self._is_started:
            return NotReadyError("the server is starting", retry_after_seconds=2)
        known = [*self._models, *(card.name for card in self.adapters(principal))]
        return ModelNotFoundError(
            f"there is no model or adapter {name!r} here; there are: {_listing(known)}",
            param="model",
        )

    def render_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return self._served(model).chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._served(model).tokenizer.encode(text, add_special_tokens)

    def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        return self._served(model).tokenizer.decode(token_ids, skip_special_tokens)

    def token_bytes(self, model: str, token_id: int) -> bytes:
        return self._served(model).tokenizer.token_bytes(token_id)

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        try:
            generation = await self._generate(request, principal)
        except LoraplexError as error:
            self._metrics.observe_error(request.model, error)
            raise
        return self._metrics.observe(request, generation)

    async def _generate(self, request: GenerateRequest, principal: Principal) -> Generation:
        self._require_open()
        if request.prompt == "":
            raise InvalidRequestError(
                "the prompt is empty: give at least one token", param="prompt"
            )
        model = self._served(request.model)
        request.sampling.validate()
        chosen = model.resolve(request.adapters, principal)
        token_ids = await model.tokenize(request.prompt, request.add_special_tokens)
        engine_request = admit(
            request,
            token_ids,
            model=model.card,
            eos_token_ids=model.eos_token_ids,
            adapters=uses(chosen),
            principal=principal,
            now_ns=self._clock.now_ns(),
        )
        stream = model.engine.submit(engine_request, [version.source for version, _ in chosen])
        return Generation(
            request, engine_request, answered_by(chosen), model.tokenizer, stream, model.engine
        )

    async def load_adapter(
        self,
        principal: Principal,
        *,
        model: str,
        name: str,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterCard:
        _require_manager(principal)
        self._require_open()
        check_is_no_base(name, self._models)
        return await self._loading.load(
            self._served(model),
            principal.tenant,
            name=name,
            path=path,
            task_id=task_id,
            replace=replace,
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
        try:
            _require_manager(principal)
            self._require_open()
            return await self._loading.load_tensors(
                self._served(model), principal.tenant, task_id, weights, config, self._models
            )
        except LoraplexError as error:  # part of a request: it fails with it
            self._metrics.observe_error(model, error)
            raise

    async def unload_adapter(self, principal: Principal, ref: AdapterRef) -> None:
        _require_manager(principal)
        version = self._served(ref.model).store.remove(ref)
        logger.info("adapter %r (%s) is unloaded", version.name, version.digest[:12])

    def steps(self, model: str, limit: int) -> Sequence[StepRecord]:
        records = self._served(model).engine.steps
        return list(itertools.islice(records, max(0, len(records) - limit), None))

    def stats(self, model: str) -> EngineStats:
        return self._served(model).engine.stats

    def _require_open(self) -> None:
        if self._is_draining:
            raise NotReadyError("the server is stopping")
        if not self._is_started:
            raise NotReadyError("the server is starting", retry_after_seconds=2)

    def _served(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(
                f"there is no model {name!r} here; there are: {_listing(list(self._models))}",
                param="model",
            )
        return model


def _require_manager(principal: Principal) -> None:
    if not principal.may_manage_adapters:
        raise PermissionDeniedError(f"tenant {principal.tenant!r} may not manage adapters")


def _listing(names: list[str], most: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
