"""The one door to several served models: what `Backend` promises, kept.

It knows names, principals and lifecycles; tokens and text are the models', adapters' files the
loading's.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.adapters.staging import RequestTensor, StagingWorker
from loraplex.core.adapter import AdapterKey, AdapterRef, ByName, LoadPolicy, Residency
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
from loraplex.core.request import GenerateRequest, RequestId, check_adapters
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.serving.adapters.cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    Unloaded,
    UnloadMode,
    VersionCard,
    card_of,
    version_card,
)
from loraplex.serving.adapters.changes import AdapterChanges, describe
from loraplex.serving.adapters.composition import compose
from loraplex.serving.adapters.directory import AdapterDirectory
from loraplex.serving.adapters.holds import hold_pinned
from loraplex.serving.adapters.loading import AdapterLoading, check_is_no_base
from loraplex.serving.adapters.upkeep import AdapterUpkeep
from loraplex.serving.admission import admit
from loraplex.serving.backend import Health, ModelCard
from loraplex.serving.generation import Generation
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel, answered_by, label, uses
from loraplex.serving.share_weight import share_weight
from loraplex.serving.text.bad_words import with_bad_token_ids
from loraplex.serving.text.detokenizer import continuation

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05


class Service:
    """Implements `serving.backend.Backend`. All methods run on one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        worker: StagingWorker,
        metrics: RequestMetrics,
        clock: Clock,
        adapter_watch_seconds: float = 0.0,
    ) -> None:
        """adapter_watch_seconds: how often adapter folders are looked at; 0: at the start only."""
        self._models = {model.card.name: model for model in models}
        self._changes = AdapterChanges()
        self._loading = AdapterLoading(worker, self._changes, clock)
        self._upkeep = AdapterUpkeep(models, self._loading)
        self._directory = AdapterDirectory(
            self._loading, self._changes, self._models, adapter_watch_seconds
        )
        self._metrics = metrics
        self._clock = clock
        self._request_ids = itertools.count(1)
        self._is_started = False
        self._is_draining = False

    async def start(self) -> None:
        """Start the engines, load the configured adapters, be ready. Raises why it cannot."""
        models = list(self._models.values())
        await asyncio.gather(self._loading.start(), *(model.start() for model in models))
        for model in models:
            await self._directory.load(model)
            await asyncio.to_thread(model.check_stored)
            await hold_pinned(model)
        self._upkeep.start()
        self._directory.start()
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
        """Stop the engines, end the staging worker, give the state directory back."""
        self._is_draining = True
        await self._directory.close()
        await self._upkeep.close()
        await asyncio.gather(*(model.engine.close() for model in self._models.values()))
        await self._loading.close()
        for model in self._models.values():
            model.grammars.close()
            await self._changes.run(model.store.close)

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
            card_of(version, one.state_of(version))
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
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        tokenizer = self._served(model).tokenizer
        if not is_continuation:
            return tokenizer.decode(token_ids, skip_special_tokens)
        return continuation(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

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
        check_adapters(request.adapters)
        chosen = model.resolve(request.adapters, principal)
        if request.load_policy is LoadPolicy.ALWAYS:
            for version, _ in chosen:
                await self._loading.reload(model, version)
            chosen = model.resolve(request.adapters, principal)
        composition = compose(chosen, model.shapes)
        token_ids = await model.tokenize(request.prompt, request.add_special_tokens)
        sampling = with_bad_token_ids(request.sampling, model.tokenizer.encode)
        sampling = await model.grammars.compiled(sampling)
        engine_request = admit(
            msgspec.structs.replace(request, sampling=sampling),
            token_ids,
            model=model.card,
            eos_token_ids=model.eos_token_ids,
            adapters=uses(composition),
            principal=principal,
            now_ns=self._clock.now_ns(),
            share_weight=share_weight(
                model.config.fair_share,
                model.config.fair_weights,
                adapters=[adapter.name for adapter in answered_by(chosen)],
                tenant=principal.tenant,
            ),
        )
        stream = model.engine.submit(
            engine_request,
            [version.source for version, _ in composition],
            frozenset(label(version) for version, _ in chosen),
        )
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
        dry_run: bool = False,
        canary: bool = False,
    ) -> LoadReport:
        served = self._managed(principal, model)
        check_is_no_base(name, self._models)
        return await self._loading.load(
            served,
            principal,
            name=name,
            path=path,
            task_id=task_id,
            replace=replace,
            dry_run=dry_run,
            canary_id=self.new_request_id if canary else None,
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
            served = self._managed(principal, model)
            return await self._loading.load_tensors(
                served, principal.tenant, task_id, weights, config, self._models
            )
        except LoraplexError as error:  # part of a request: it fails with it
            self._metrics.observe_error(model, error)
            raise

    async def unload_adapter(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        model = self._managed(principal, ref.model)
        return await self._changes.remove(model, ref, mode)

    async def rollback_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        model = self._managed(principal, ref.model)
        version = await self._changes.rollback(model, ref, number)
        return card_of(version, model.state_of(version))

    async def pin_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        model = self._managed(principal, ref.model)
        return version_card(await self._changes.pin(model, ref, number, is_pinned=is_pinned))

    async def alias_adapter(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        model = self._managed(principal, ref.model)
        check_is_no_base(alias, self._models)
        version = await self._changes.run(lambda: model.store.alias(ref, alias, replace=replace))
        return card_of(version, model.state_of(version))

    async def describe_adapter(self, principal: Principal, ref: AdapterRef) -> AdapterDetails:
        del principal  # the reference names the tenant
        self._require_open()
        return await describe(self._served(ref.model), ref)

    async def adapter_residency(self, model: str) -> Mapping[str, Residency]:
        return await self._served(model).engine.residency()

    async def adapter_activity(self, model: str) -> AdapterActivity:
        return await self._served(model).engine.recent_activity()

    def memory(self, model: str) -> ModelMemory:
        return self._served(model).memory()

    async def stored_adapters(self, model: str) -> StoredAdapters:
        return await self._served(model).stored_adapters()

    def load_times(self, model: str) -> Mapping[str, Durations]:
        tiers = self._served(model).engine.stats.adapters
        engine = {"read": tiers.read_times, "copy": tiers.copy_times}
        return {**self._loading.times.of_model(model), **engine}

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

    def _managed(self, principal: Principal, model: str) -> ServedModel:
        """The model whose adapters are to be changed; raises if they may not be."""
        if not principal.may_manage_adapters:
            raise PermissionDeniedError(f"tenant {principal.tenant!r} may not manage adapters")
        self._require_open()
        return self._served(model)

    def _served(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(
                f"there is no model {name!r} here; there are: {_listing(list(self._models))}",
                param="model",
            )
        return model


def _listing(names: list[str], most: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
