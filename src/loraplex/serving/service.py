"""The one door to several served models: what `Backend` promises, kept.

It knows names, principals and lifecycles; tokens and text are the models', adapters' files the
loading's.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
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
)
from loraplex.core.output import RequestOutput
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest, RequestId, check_adapters
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.serving.access.tenant_limits import Lease, LeasedOutputs, TenantGate
from loraplex.serving.adapters.cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    Unloaded,
    UnloadMode,
    VersionCard,
    card_of,
    version_card,
    without_sources,
)
from loraplex.serving.adapters.composition import compose
from loraplex.serving.adapters.folder_follower import FolderFollower
from loraplex.serving.adapters.loading import CatalogLoader, inline_name
from loraplex.serving.adapters.upkeep import CatalogUpkeep
from loraplex.serving.admission import admit, cut_prompt
from loraplex.serving.backend import Health, ModelCard
from loraplex.serving.catalog import ModelCatalog, describe, pin_on_device
from loraplex.serving.draining import Draining
from loraplex.serving.generation import Generation
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel, answered_by, label, uses
from loraplex.serving.share_weight import share_weight
from loraplex.serving.text.detokenizer import continuation
from loraplex.serving.text.prompt_tokens import prompt_token_ids
from loraplex.serving.wire_request import begin_generation

logger = logging.getLogger(__name__)


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
        self._catalog = ModelCatalog(models)
        self._models = self._catalog.models
        self._loader = CatalogLoader(worker, self._catalog, clock)
        self._upkeep = CatalogUpkeep(models, self._loader)
        self._follower = FolderFollower(self._loader, self._catalog, adapter_watch_seconds)
        self._metrics = metrics
        self._clock = clock
        self._gate = TenantGate(clock)
        self._request_ids = itertools.count(1)
        self._is_started = False
        self.draining = Draining(clock, self._num_running, self._end_requests)

    async def start(self) -> None:
        """Start the engines, load the configured adapters, be ready. Raises why it cannot."""
        models = list(self._models.values())
        await asyncio.gather(self._loader.start(), *(model.start() for model in models))
        for model in models:
            await self._follower.load(model)
            await asyncio.to_thread(model.check_stored)
            await pin_on_device(model)
        self._upkeep.start()
        self._follower.start()
        self._is_started = True

    async def drain(self, timeout_seconds: float) -> None:
        """Take no more requests; wait until those in work have ended, or the time is up."""
        await self.draining.finish(timeout_seconds)

    async def close(self) -> None:
        """Stop the engines, end the staging worker, give the state directory back."""
        self.draining.close()
        await self._follower.close()
        await self._upkeep.close()
        await asyncio.gather(*(model.engine.close() for model in self._models.values()))
        await self._loader.close()
        for model in self._models.values():
            model.grammars.close()
            model.chats.close()
            await self._catalog.change(model.store.close)

    def new_request_id(self) -> RequestId:
        return next(self._request_ids)

    def health(self) -> Health:
        if self.draining.is_active:
            return Health(live=True, ready=False, reason=self.draining.reason)
        if not self._is_started:
            return Health(live=True, ready=False, reason="the server is starting")
        problems = [model.problem for model in self._models.values() if model.problem]
        return Health(live=True, ready=not problems, reason="; ".join(problems))

    def model_ready(self, model: str) -> bool:
        served = self._models.get(model)
        is_open = self._is_started and not self.draining.is_active
        return served is not None and is_open and not served.problem

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        return [model.card for model in self._catalog.of(principal).values()]

    def model(self, name: str) -> ModelCard:
        return self._catalog.model(name).card

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]:
        return self._catalog.adapters(principal, model)

    def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        try:
            model, key = self._catalog.find(name, principal)
        except ModelNotFoundError:
            if not self._is_started:
                raise NotReadyError("the server is starting", retry_after_seconds=2) from None
            raise
        return model.card, key

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
        return await self._catalog.model(model).chats.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            template_kwargs=template_kwargs,
            omits_absent=omits_absent,
        )

    def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return prompt_token_ids(self._catalog.model(model).tokenizer, text, add_special_tokens)

    def detokenize(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        tokenizer = self._catalog.model(model).tokenizer
        if not is_continuation:
            return tokenizer.decode(token_ids, skip_special_tokens)
        return continuation(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, model: str, token_id: int) -> bytes:
        return self._catalog.model(model).tokenizer.token_bytes(token_id)

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        record = begin_generation(request, principal.tenant, self._clock.now_ns())
        try:
            with self.draining.admission(), self._gate.admission(principal) as lease:
                generation = await self._generate(request, principal, lease)
        except LoraplexError as error:
            self._metrics.observe_error(request.model, error)
            record.end(self._clock.now_ns(), error)
            raise
        record.admitted(generation.adapters, generation.num_prompt_tokens, self._clock.now_ns())
        return self._metrics.observe(request, LeasedOutputs(generation, lease), record)

    async def _generate(
        self, request: GenerateRequest, principal: Principal, lease: Lease
    ) -> Generation:
        self._require_open()
        if request.prompt == "":
            raise InvalidRequestError(
                "the prompt is empty: give at least one token", param="prompt"
            )
        model = self._catalog.model(request.model, principal)
        request.sampling.validate()
        check_adapters(request.adapters)
        await self._look_for_new(model, request, principal)
        chosen = model.resolve(request.adapters, principal)
        if request.load_policy is LoadPolicy.ALWAYS:
            seen = model.adapters_of(principal)
            for version in (version for version, _ in chosen if seen.owns(version)):
                await self._loader.reload(model, version)
            chosen = model.resolve(request.adapters, principal)
        composition = compose(chosen, model.shapes)
        tokenized = await model.tokenize(request.prompt, request.add_special_tokens)
        token_ids = cut_prompt(request, tokenized, model.card)
        sampling = await model.spelled(request.sampling)
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
                tenant_weight=principal.share_weight,
            ),
        )
        lease.reserve(len(token_ids), engine_request.sampling)
        stream = model.engine.submit(
            engine_request,
            [version.source for version, _ in composition],
            frozenset(label(version) for version, _ in chosen),
        )
        return Generation(
            request, engine_request, answered_by(chosen), model.tokenizer, stream, model.engine
        )

    async def _look_for_new(
        self, model: ServedModel, request: GenerateRequest, principal: Principal
    ) -> None:
        """What a request names may have come into lora_root since it was looked at."""
        seen = model.adapters_of(principal)
        names = [choice.key.name for choice in request.adapters if isinstance(choice.key, ByName)]
        for name in names:
            if name in principal.rights.use and seen.find(ByName(name)) is None:
                await self._follower.take_named(model, name)

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
        served.adapters_of(principal).check_manages(name)
        self._catalog.check_is_no_base(name)
        return await self._loader.load(
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
            served.adapters_of(principal).check_manages(inline_name(served, principal, task_id))
            return await self._loader.load_tensors(
                served, principal.tenant, task_id, weights, config
            )
        except LoraplexError as error:  # part of a request: it fails with it
            self._metrics.observe_error(model, error)
            raise

    async def unload_adapter(
        self, principal: Principal, ref: AdapterRef, mode: UnloadMode = UnloadMode.DRAIN
    ) -> Unloaded:
        model = self._managed(principal, ref.model)
        ref = model.adapters_of(principal).managed(ref.key)
        return await self._catalog.remove(model, ref, mode)

    async def rollback_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None = None
    ) -> AdapterCard:
        model = self._managed(principal, ref.model)
        ref = model.adapters_of(principal).managed(ref.key)
        version = await self._catalog.rollback(model, ref, number)
        return card_of(version, model.state_of(version))

    async def pin_adapter(
        self, principal: Principal, ref: AdapterRef, number: int | None, *, is_pinned: bool
    ) -> VersionCard:
        model = self._managed(principal, ref.model)
        ref = model.adapters_of(principal).managed(ref.key)
        return version_card(await self._catalog.pin(model, ref, number, is_pinned=is_pinned))

    async def alias_adapter(
        self, principal: Principal, ref: AdapterRef, alias: str, *, replace: bool = False
    ) -> AdapterCard:
        model = self._managed(principal, ref.model)
        seen = model.adapters_of(principal)
        ref = seen.managed(ref.key)
        seen.check_manages(alias)
        self._catalog.check_is_no_base(alias)
        version = await self._catalog.change(lambda: model.store.alias(ref, alias, replace=replace))
        return card_of(version, model.state_of(version))

    async def describe_adapter(self, principal: Principal, ref: AdapterRef) -> AdapterDetails:
        self._require_open()
        model = self._catalog.model(ref.model, principal)
        ref = model.adapters_of(principal).described(ref.key)
        details = await describe(model, ref)
        return details if ref.tenant == principal.tenant else without_sources(details)

    async def adapter_residency(self, model: str) -> Mapping[str, Residency]:
        return await self._catalog.model(model).engine.residency()

    async def adapter_activity(self, model: str) -> AdapterActivity:
        return await self._catalog.model(model).engine.recent_activity()

    def memory(self, model: str) -> ModelMemory:
        return self._catalog.model(model).memory()

    async def stored_adapters(self, model: str) -> StoredAdapters:
        return await self._catalog.model(model).stored_adapters()

    def load_times(self, model: str) -> Mapping[str, Durations]:
        tiers = self._catalog.model(model).engine.stats.adapters
        engine = {"read": tiers.read_times, "copy": tiers.copy_times}
        return {**self._loader.times.of_model(model), **engine}

    def steps(self, model: str, limit: int) -> Sequence[StepRecord]:
        records = self._catalog.model(model).engine.steps
        return list(itertools.islice(records, max(0, len(records) - limit), None))

    def stats(self, model: str) -> EngineStats:
        return self._catalog.model(model).engine.stats

    def _num_running(self) -> int:
        return sum(model.engine.num_requests for model in self._models.values())

    def _end_requests(self, error: LoraplexError) -> None:
        for model in self._models.values():
            model.engine.end_requests(error)

    def _require_open(self) -> None:
        self.draining.require_none()
        if not self._is_started:
            raise NotReadyError("the server is starting", retry_after_seconds=2)

    def _managed(self, principal: Principal, model: str) -> ServedModel:
        """The model whose adapters are to be changed; raises if they may not be."""
        principal.require_manages()
        self._require_open()
        return self._catalog.model(model, principal)
