"""Entry point to several served models: admission of requests and the lifecycle of the server.

Text and numbers of one model are in `served_model`, changes of adapters in `adapters.admin`.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.staging import StagingWorker
from loraplex.adapters.store import AdapterVersion
from loraplex.adapters.uploads import Uploads
from loraplex.core.adapter import (
    AdapterKey,
    AdapterRef,
    AdapterUse,
    ByDigest,
    ByName,
    LoadPolicy,
    not_in_cache,
)
from loraplex.core.clock import Clock
from loraplex.core.closing import close_together
from loraplex.core.config import ModelConfig
from loraplex.core.errors import (
    AdapterNotFoundError,
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
)
from loraplex.core.output import Pooled, RequestOutput, ResolvedAdapter
from loraplex.core.principal import LOCAL, Principal, TenantUsage
from loraplex.core.request import EngineRequest, GenerateRequest, RequestId
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter, TenantAdapters
from loraplex.serving.access.tenant_limits import Lease, TenantGate
from loraplex.serving.adapter_cards import (
    AdapterCard,
)
from loraplex.serving.adapter_list import AdapterPage, AdapterQuery
from loraplex.serving.adapter_usage import AdapterUsage, UsedAdapter
from loraplex.serving.adapters.admin import CatalogAdmin
from loraplex.serving.adapters.declared_adapters import DeclaredAdapters
from loraplex.serving.adapters.declared_changes import DeclaredChanges
from loraplex.serving.adapters.folder_follower import FolderFollower
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.adapters.upkeep import CatalogUpkeep
from loraplex.serving.admission import (
    admit,
    check_head,
    check_request,
    compose,
    share_weight,
)
from loraplex.serving.backend import Health, ModelCard, vector_of
from loraplex.serving.catalog import ModelCatalog, pin_on_device, release_kept
from loraplex.serving.continuation import current_continuation
from loraplex.serving.draining import Draining
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.in_flight_request import EngineOutputs
from loraplex.serving.generation import outputs_of
from loraplex.serving.listed_adapters import listed_page
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)


class AdmittedRequest(NamedTuple):
    """A request that an engine has."""

    request: EngineRequest
    adapters: tuple[ResolvedAdapter, ...]
    stream: EngineOutputs
    engine: AsyncEngine
    lease: Lease


class Service:
    """Implementation of `serving.backend.Backend`. All methods run on one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        worker: StagingWorker,
        metrics: RequestMetrics,
        clock: Clock,
        adapter_watch_seconds: float = 0.0,
        build: Callable[[str, ModelConfig], ServedModel] | None = None,
        declarations: SharedDeclarations | None = None,
        uploads: Uploads | None = None,
        responses: ResponseMemory | None = None,
    ) -> None:
        """adapter_watch_seconds: how often adapter folders are looked at; 0: at the start only.
        build: makes a model that start_model adds. declarations: names shared with other servers.
        uploads: what clients sent; None: they may not. responses: their memory; None: no limit.
        """
        self.responses = responses or ResponseMemory()
        self._build = build
        self._catalog = ModelCatalog(models)
        self._models = self._catalog.models
        self.model = self._catalog.model
        self._loader = CatalogLoader(worker, self._catalog, clock)
        self.uploads = uploads
        self._upkeep = CatalogUpkeep(self._models.values(), self._loader, uploads=uploads)
        self._follower = FolderFollower(
            self._loader, self._catalog, adapter_watch_seconds, worker.policy
        )
        self.declared: DeclaredAdapters | None = None
        changes: DeclaredChanges | None = None
        if declarations is not None:
            self.declared = DeclaredAdapters(
                declarations, self._loader, self._catalog, clock, adapter_watch_seconds
            )
            changes = DeclaredChanges(self.declared, self._catalog)
        self._metrics = metrics
        self._clock = clock
        self.adapter_usage = AdapterUsage()
        self._gate = TenantGate(clock, self.adapter_usage)
        self.new_request_id: Callable[[], RequestId] = itertools.count(1).__next__
        self._is_started = False
        self.draining = Draining(clock, self._num_running, self._end_requests)
        self.adapter_admin = CatalogAdmin(
            self._catalog,
            self._loader,
            metrics,
            self._require_open,
            self.new_request_id,
            self._validate,
            changes,
            uploads,
        )

    async def start(self) -> None:
        """Start the engines, load the configured adapters, be ready. Raises why it cannot."""
        models = list(self._models.values())
        await asyncio.gather(self._loader.start(), *(model.start() for model in models))
        for model in models:
            await self._load_adapters(model)
        await self._loader.keep_spare()
        self._upkeep.start()
        self._follower.start()
        if self.declared is not None:
            self.declared.start()
        self._is_started = True

    async def start_model(self, name: str, settings: ModelConfig) -> None:
        """Serve one more base model. Raises why it cannot, and then nothing has changed."""
        self._require_open()
        assert self._build is not None, "given where models may be added"
        model = await asyncio.to_thread(self._build, name, settings)
        try:
            await model.start()
            await self._load_adapters(model)
        except BaseException:
            await _close(model)
            raise
        self._models[name] = model
        self._follower.start()

    async def _load_adapters(self, model: ServedModel) -> None:
        await self._follower.load(model)
        if self.declared is not None:
            await self.declared.load(model)
        await asyncio.to_thread(model.check_stored)
        await pin_on_device(model)

    async def drain(self, timeout_seconds: float) -> None:
        """Accept no more requests; wait until those in flight have ended, or the time is up."""
        await self.draining.finish(timeout_seconds)

    async def close(self) -> None:
        """Stop the engines, end the staging worker, give the state directory back.

        Raises the error of a part that cannot be closed once all others are.
        """
        async with contextlib.AsyncExitStack() as stack:  # closes the last part first
            for model in self._models.values():
                stack.push_async_callback(self._catalog.change, model.store.close)
            if self.uploads is not None:
                stack.push_async_callback(asyncio.to_thread, self.uploads.close)
            stack.push_async_callback(self._loader.close)
            stack.push_async_callback(_close_all, list(self._models.values()))
            stack.push_async_callback(self._upkeep.close)
            if self.declared is not None:
                stack.push_async_callback(self.declared.close)
            stack.push_async_callback(self._follower.close)
            stack.callback(self.draining.close)

    def health(self) -> Health:
        problems = (model.problem for model in self._models.values())
        reason = self._problem or "; ".join(filter(None, problems))
        return Health(live=True, ready=not reason, reason=reason)

    @property
    def _problem(self) -> str:
        """Reason why no model would accept a request; empty if they would."""
        if self.draining.is_active:
            return self.draining.reason
        return "" if self._is_started else "the server is starting"

    def usage(self, principal: Principal) -> TenantUsage:
        return self._gate.usage(principal)

    def model_problem(self, model: str) -> str:
        served = self._models.get(model)
        return self._problem or ("not ready" if served is None else served.problem)

    def model_ready(self, model: str) -> bool:
        return not self.model_problem(model)

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        return [model.card for model in self._catalog.of(principal).values()]

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]:
        return self._catalog.adapters(principal, model)

    async def adapter_page(self, principal: Principal, query: AdapterQuery) -> AdapterPage:
        return await listed_page(self._catalog.of(principal), principal, self.adapter_usage, query)

    async def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        try:
            model, key = self._catalog.find(name, principal)
        except ModelNotFoundError:
            if not self._is_started:
                raise _starting() from None
            if self.declared is None:
                raise
            await self.declared.look_up(principal.tenant, name)
            model, key = self._catalog.find(name, principal)
        return model.card, key

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        with self._metrics.admission(request, principal) as record:
            admitted = await self.admitted(request, principal)
            outputs = outputs_of(
                request,
                admitted.request,
                admitted.adapters,
                self._models[request.model].tokenizer,
                admitted.stream,
                admitted.engine,
            )
        return self._metrics.observe(request, outputs, record, admitted.lease)

    async def pool(self, request: GenerateRequest, principal: Principal) -> Pooled:
        return await vector_of(await self.generate(request, principal))

    async def admitted(self, request: GenerateRequest, principal: Principal) -> AdmittedRequest:
        """Admit a request whose outputs the caller takes, whose lease it ends.

        All that can be wrong with it is refused here, and nowhere else. Raises as
        `Backend.generate`.
        """
        check_request(request)  # first: what no server would take counts for no limit
        with self.draining.admission(), self._gate.admission(principal) as lease:
            if not self._is_started:
                raise _starting()
            model = self._catalog.model(request.model, principal)
            chosen = await self._chosen(model, request, principal, lease)
            composition = compose(chosen, model.shapes)
            check_head(request.task, composition, model.card)
            request = model.with_prefix(request, chosen)
            request, token_ids = await model.in_tokens(request)
            token_ids, encoder_ids = await model.ids_of_stacks(request, token_ids)
            num_tokens = len(encoder_ids) + len(token_ids)
            adapters = tuple(ResolvedAdapter(own.name, own.digest, scale) for own, scale in chosen)
            engine_request = admit(
                request,
                token_ids,
                encoder_token_ids=encoder_ids,
                model=model.card,
                eos_token_ids=model.end_token_ids(chosen),
                adapters=tuple(AdapterUse(version.digest, scale) for version, scale in composition),
                principal=principal,
                now_ns=self._clock.now_ns(),
                share_weight=share_weight(
                    model.share_kind,
                    model.config.fair_weights,
                    adapters=[adapter.name for adapter in adapters],
                    tenant=principal.tenant,
                    tenant_weight=principal.share_weight,
                ),
            )
            self.responses.reserve(
                engine_request.task,
                num_tokens,
                model.card.vocab_size,
                request.logit_bytes,
                request.repeated_bytes,
            )
            lease.reserve(num_tokens, engine_request.task)
            submit = functools.partial(
                model.engine.submit,
                adapters=[version.source for version, _ in composition],
                labels=frozenset(version.label for version, _ in chosen),
                batch=request.batch,
            )
            stream: EngineOutputs
            if (continuation := current_continuation()) is None:
                stream = submit(engine_request)
            else:
                engine_request, stream = continuation.begin(engine_request, submit)
            for choice, (version, _) in zip(request.adapters, chosen, strict=True):
                if isinstance(choice.key, ByDigest):
                    release_kept(model, version)
            return AdmittedRequest(engine_request, adapters, stream, model.engine, lease)

    async def _chosen(
        self, model: ServedModel, request: GenerateRequest, principal: Principal, lease: Lease
    ) -> list[tuple[AdapterVersion, float]]:
        """Return the adapters of a request with their scales, after looking for new ones."""
        seen = model.adapters_of(principal)
        if request.load_policy is not LoadPolicy.NEVER:
            await self._look_for_new(model, request, seen)
        found = [seen.find(choice.key) for choice in request.adapters]
        # It counts for the adapters that it names and that exist, or for the base model.
        lease.adapters = {
            UsedAdapter(one.model, one.tenant, one.name) for one in found if one is not None
        }
        if not found:
            lease.adapters = {UsedAdapter(model.card.name)}
        try:
            chosen = model.resolve(request.adapters, seen)
        except AdapterNotFoundError:
            if request.load_policy is not LoadPolicy.NEVER:
                raise
            # It may be in lora_root, where only other policies look for it.
            missing = [choice.key for choice in request.adapters if seen.find(choice.key) is None]
            raise not_in_cache(str(AdapterRef(model.card.name, "", missing[0]))) from None
        if request.load_policy is not LoadPolicy.ALWAYS:
            return chosen
        for version in (version for version, _ in chosen if seen.owns(version)):
            if not model.store.is_kept_only(version):  # its source has another content by now
                await self._loader.reload(model, version)
        return model.resolve(request.adapters, seen)

    async def _look_for_new(
        self, model: ServedModel, request: GenerateRequest, seen: TenantAdapters
    ) -> None:
        """Validate what a request names, and look for what is new, in lora_root or declared."""
        tenant, rights = seen.principal.tenant, seen.principal.rights
        for key in (choice.key for choice in request.adapters):
            if self.declared is not None and not isinstance(key, ByDigest) and not seen.knows(key):
                await self.declared.look_up(tenant, str(key))
            adapter = seen.unvalidated(key)
            if adapter is not None and adapter.name in rights.use:
                error = await self._validate(model, adapter, tenant)
                if error is not None and (adapter.declaration or seen.find(key) is None):
                    raise error
            elif isinstance(key, ByName) and key.name in rights.use and seen.find(key) is None:
                await self._follower.take_named(model, key.name, tenant)
            elif isinstance(key, ByDigest) and seen.find(key) is None:
                await asyncio.to_thread(seen.recall, key.digest, model.check_fits)

    async def _validate(
        self, model: ServedModel, adapter: ConfiguredAdapter, turn: str
    ) -> LoraplexError | None:
        """Validate an adapter that is known by name; return why it cannot be served."""
        if adapter.declaration is None:
            return await self._follower.validate_named(model, adapter.name, turn)
        assert self.declared is not None, "only it discovers declared adapters"
        return await self.declared.validate(adapter.declaration.key, turn)

    def _num_running(self) -> int:
        return sum(model.engine.num_requests for model in self._models.values())

    def _end_requests(self, error: LoraplexError) -> None:
        for model in self._models.values():
            model.engine.requests.end_all(error)

    def _require_open(self) -> None:
        with self.draining.admission():
            if not self._is_started:
                raise _starting()


def _starting() -> NotReadyError:
    return NotReadyError("the server is starting", retry_after_seconds=2)


async def _close(model: ServedModel) -> None:
    """Stop a model's engine and workers."""
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(model.chats.close)
        stack.callback(model.grammars.close)
        stack.push_async_callback(model.engine.close)


async def _close_all(models: Sequence[ServedModel]) -> None:
    await close_together(*map(_close, models))
