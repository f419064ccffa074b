"""A served model as a library has it: the service without front ends, on its own event loop.

`LLM` waits for its work, `AsyncLLM` awaits it. Arguments are checked in the caller's thread.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from loraplex.app.builder import build_service
from loraplex.app.engine import engine_thread
from loraplex.app.launch import engine_process
from loraplex.app.llm_arguments import (
    Adapter,
    Chat,
    LoraArrays,
    RequestOptions,
    adapter_choices,
    as_chats,
    as_prompts,
    is_chat,
    load_policy,
    lora_arrays,
    params_per_prompt,
    per_prompt,
    with_key,
)
from loraplex.app.llm_outputs import (
    Classified,
    Embedded,
    Generated,
    Prompt,
    Scored,
    classified,
    collect,
    embedded,
)
from loraplex.app.model_settings import with_local_paths
from loraplex.app.service_loop import ServiceLoop
from loraplex.core.adapter import (
    AdapterChoice,
    AdapterKey,
    AdapterRef,
    ByName,
    ByTaskId,
    LoadPolicy,
)
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.errors import ConfigError, InvalidRequestError, LoraplexError
from loraplex.core.output import RequestOutput
from loraplex.core.principal import DEFAULT_TENANT, LOCAL
from loraplex.core.request import GenerateRequest, Prefix
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool, Task
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.backend import Admission, admit_together, close_outputs
from loraplex.serving.compare import Compared, compare, comparison_requests
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.scoring import ScoreOptions, pairs_of, scoring
from loraplex.serving.service import Service

T = TypeVar("T")
Engine = Literal["thread", "process"]

_LAUNCHERS: Final[Mapping[str, EngineLauncher]] = MappingProxyType(
    {"thread": engine_thread, "process": engine_process}
)


def library_config(
    model: str,
    adapters: Mapping[str, str | os.PathLike[str]],
    state_dir: str | os.PathLike[str],
    settings: Mapping[str, Any],
) -> Config:
    """Return the configuration of an LLM from its arguments. Raises ConfigError."""
    if "path" in settings:
        raise ConfigError("path is not a setting of LLM: it is the first argument, model")
    values = {
        **settings,
        "path": model,
        "adapters": {name: {"path": os.fspath(path)} for name, path in adapters.items()},
    }
    return resolve(
        [
            Layer("argument of LLM", {"models": {model: values}}),
            Layer("argument of LLM", {"server": {"state_dir": os.fspath(state_dir)}}),
            Layer("LLM", {"server": {"persist_adapters": False}}),
            # The caller of a library could download the adapter, too.
            Layer("LLM", {"server": {"allowed_adapter_hosts": ["*"]}}),
        ]
    )


class LocalModel:
    """A base model with its adapters, in this process. Methods return work for `loop`."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None,
        engine: Engine,
        state_dir: str | os.PathLike[str],
        settings: Mapping[str, Any],
    ) -> None:
        """Start it; see LLM for the arguments. Raises ConfigError."""
        launch = _LAUNCHERS.get(engine)
        if launch is None:
            raise ConfigError(f"engine must be one of {', '.join(_LAUNCHERS)}, got {engine!r}")
        self.name = os.fspath(model)
        config = library_config(self.name, adapters or {}, state_dir, settings)
        self._service = build_service(with_local_paths(config), launch, RequestMetrics())
        self.loop = ServiceLoop(self._service.close)
        try:
            self.loop.wait(self._service.start())
        except BaseException:
            self.loop.close()
            raise

    @property
    def service(self) -> Service:
        """The service, for what needs no loop. Raises ConfigError in a forked process."""
        self.loop.check_process()
        return self._service

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: Adapter | Sequence[Adapter | None] | None,
        options: RequestOptions,
        *,
        lora_task_id: int | Sequence[int | None] | None = None,
        lora_weights: Any = None,
        lora_config: Any = None,
        load_lora_weights: str = "auto",
    ) -> Coroutine[Any, Any, list[Generated]]:
        """Complete prompts together. Raises InvalidRequestError, InvalidTensorError at once."""
        listed = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = params_per_prompt(sampling_params, len(listed))
        adapters = [adapter_choices(a) for a in per_prompt("adapter", adapter, len(listed))]
        arrays = lora_arrays(lora_task_id, lora_weights, lora_config, len(listed))
        policy = load_policy(load_lora_weights)
        return self._generate_all(listed, params, adapters, arrays, policy, options)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        adapter: Adapter | Sequence[Adapter | None] | None,
        options: RequestOptions,
        *,
        dimensions: int | None,
        normalize: bool | None,
        prompt_name: str | None,
    ) -> Coroutine[Any, Any, list[Embedded]]:
        """Return the vectors of texts. Raises InvalidRequestError and the like at once."""
        listed = as_prompts(texts)
        vectors = self.service.model(self.name).card.vectors
        pool = vectors.pool(dimensions=dimensions, normalize=normalize)
        adapters = [adapter_choices(a) for a in per_prompt("adapter", adapter, len(listed))]

        async def embed() -> list[Embedded]:
            outputs = await self._pool_all(listed, pool, adapters, options, Prefix(prompt_name))
            return list(map(embedded, listed, outputs))

        return embed()

    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        adapter: Adapter | Sequence[Adapter | None] | None,
        options: RequestOptions,
        *,
        use_activation: bool | None,
    ) -> Coroutine[Any, Any, list[Classified]]:
        """Return the classes of texts. Raises InvalidRequestError and the like at once."""
        listed = as_prompts(texts)
        classes = self.service.model(self.name).card.classes
        pool = classes.pool(activation=use_activation)
        adapters = [adapter_choices(a) for a in per_prompt("adapter", adapter, len(listed))]

        async def classify() -> list[Classified]:
            outputs = await self._pool_all(listed, pool, adapters, options)
            return list(map(classified, listed, outputs, itertools.repeat(classes)))

        return classify()

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        adapter: Adapter | None,
        options: RequestOptions,
        *,
        instruction: str | None,
        use_activation: bool,
    ) -> Coroutine[Any, Any, list[Scored]]:
        """Score pairs of texts. Raises InvalidRequestError and the like at once."""
        pairs = pairs_of(
            [queries] if isinstance(queries, str) else queries,
            [documents] if isinstance(documents, str) else documents,
            ("queries", "documents"),
        )
        adapters = adapter_choices(adapter)
        sent = self._request("", Generate(), adapters, LoadPolicy.AUTO, options)
        given = ScoreOptions(instruction)

        async def score() -> list[Scored]:
            service = self._service
            model = service.model(self.name)
            wanted = await scoring(model, sent, pairs, given, service.new_request_id)
            outputs = await self._outputs_of(wanted.requests)
            ends = [of_one[-1] for of_one in outputs]
            scores = wanted.scores([end.pooled for end in ends], is_raw=not use_activation)
            used = ends[0].adapters
            return [Scored(*pair, score, used) for pair, score in zip(pairs, scores, strict=True)]

        return score()

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: Adapter | Sequence[Adapter | None] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        options: RequestOptions,
    ) -> Coroutine[Any, Any, list[Generated]]:
        """Continue conversations together. Raises InvalidRequestError at once."""
        chats = as_chats(messages)

        async def generate() -> list[Generated]:
            prompts = await _all_of([self._chat_prompt(chat, tools) for chat in chats])
            return await self.generate(prompts, sampling_params, adapter, options)

        return generate()

    def stream(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None,
        adapter: Adapter | None,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt or continue a conversation, by what is new after each step."""
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return self._stream(prompt, sampling, adapter_choices(adapter), options)

    def compare(
        self,
        prompt: Prompt,
        adapters: Sequence[Adapter | None],
        sampling_params: SamplingParams | None,
    ) -> Coroutine[Any, Any, list[Compared]]:
        """Complete one prompt with each of the adapters."""
        sampling = SamplingParams(temperature=0.0) if sampling_params is None else sampling_params
        [listed] = as_prompts([prompt])
        request = self._request(listed, Generate(sampling), (), LoadPolicy.AUTO, {})
        choices = (adapter_choices(adapter) for adapter in adapters)
        requests = comparison_requests(
            self.service, [msgspec.structs.replace(request, adapters=each) for each in choices]
        )
        return compare(self.service, requests, LOCAL)

    def add_adapter(
        self,
        name: str | None,
        path: str | os.PathLike[str] | None,
        *,
        task_id: int | None,
        replace: bool,
        dry_run: bool,
        canary: bool,
        lora_weights: Any,
        lora_config: Any,
    ) -> Coroutine[Any, Any, AdapterCard]:
        """Load an adapter from a path, or from arrays."""
        if lora_weights is None and lora_config is None:
            if name is None or path is None:
                raise InvalidRequestError("give a name and a path, or lora_weights and lora_config")
            return self.service.adapter_admin.load(
                LOCAL,
                model=self.name,
                name=name,
                path=os.fspath(path),
                task_id=task_id,
                replace=replace,
                dry_run=dry_run,
                canary=canary,
            )
        if name is not None or path is not None or replace or dry_run or canary:
            raise InvalidRequestError(
                "an adapter of arrays is named by its task id or its digest: do not set name, "
                "path, replace, dry_run or canary; alias_adapter gives it a name"
            )
        (arrays,) = lora_arrays(task_id, lora_weights, lora_config, 1)
        return self._add_arrays(arrays)

    def remove_adapter(self, name: str, mode: UnloadMode | str) -> Coroutine[Any, Any, Unloaded]:
        """Unload an adapter."""
        modes = [str(known) for known in UnloadMode]
        if mode not in modes:
            raise InvalidRequestError(f"mode must be {' or '.join(modes)}, got {mode!r}")
        return self.service.adapter_admin.unload(LOCAL, self._ref(name), UnloadMode(mode))

    def rollback_adapter(self, name: str, version: int | None) -> Coroutine[Any, Any, AdapterCard]:
        """Restore an older version."""
        return self.service.adapter_admin.rollback(LOCAL, self._ref(name), version)

    def pin_adapter(
        self, name: str, version: int | None, *, pinned: bool
    ) -> Coroutine[Any, Any, VersionCard]:
        """Pin or unpin a version."""
        admin = self.service.adapter_admin
        return admin.pin(LOCAL, self._ref(name), version, is_pinned=pinned)

    def alias_adapter(
        self, name: str, alias: str, *, replace: bool
    ) -> Coroutine[Any, Any, AdapterCard]:
        """Give an adapter another name."""
        return self.service.adapter_admin.alias(LOCAL, self._ref(name), alias, replace=replace)

    def describe_adapter(self, name: str) -> Coroutine[Any, Any, AdapterDetails]:
        """Return the description of an adapter with its versions."""
        return self.service.adapter_admin.describe(LOCAL, self._ref(name))

    async def _generate_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[tuple[AdapterChoice, ...]],
        arrays: Sequence[LoraArrays],
        policy: LoadPolicy,
        options: RequestOptions,
    ) -> list[Generated]:
        keys = await _all_of(map(self._key, arrays))
        choices = [with_key(*named) for named in zip(adapters, keys, strict=True)]
        same = itertools.repeat(policy), itertools.repeat(options)
        requests = list(map(self._request, prompts, map(Generate, params), choices, *same))
        outputs = await self._outputs_of(requests)
        return [
            collect(prompt, of_prompt, sampling.n)
            for prompt, of_prompt, sampling in zip(prompts, outputs, params, strict=True)
        ]

    async def _pool_all(
        self,
        prompts: Sequence[Prompt],
        pool: Pool,
        adapters: Sequence[tuple[AdapterChoice, ...]],
        options: RequestOptions,
        prefix: Prefix | None = None,
    ) -> list[list[RequestOutput]]:
        same = itertools.repeat(LoadPolicy.AUTO), itertools.repeat(options)
        requests = map(self._request, prompts, itertools.repeat(pool), adapters, *same)
        return await self._outputs_of(
            [msgspec.structs.replace(request, prefix=prefix) for request in requests]
        )

    async def _outputs_of(self, requests: Sequence[GenerateRequest]) -> list[list[RequestOutput]]:
        """Run requests as one batch to their ends. Raises the first error in their order."""
        async with contextlib.AsyncExitStack() as stack:
            streams = await admit_together(self._service, requests, LOCAL, stack)
            return await _all_of(map(_outputs, streams))

    async def _stream(
        self,
        prompt: Prompt | Chat,
        sampling: SamplingParams,
        adapters: tuple[AdapterChoice, ...],
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        given = await self._chat_prompt(prompt) if is_chat(prompt) else cast("Prompt", prompt)
        [listed] = as_prompts([given])
        request = self._request(listed, Generate(sampling), adapters, LoadPolicy.AUTO, options)
        outputs = await self._service.generate(request, LOCAL)
        try:
            async for output in outputs:
                yield output
        finally:
            await close_outputs(outputs)

    async def _chat_prompt(
        self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        model = self._service.model(self.name)
        text = await model.chats.render(chat, tools=tools)
        return model.tokenize(text, add_special_tokens=False)

    def _request(
        self,
        prompt: Prompt,
        task: Task,
        adapters: tuple[AdapterChoice, ...],
        policy: LoadPolicy,
        options: RequestOptions,
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=self._service.new_request_id(),
            model=self.name,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            task=task,
            adapters=adapters,
            load_policy=policy,
            **options,
        )

    async def _key(self, arrays: LoraArrays) -> AdapterKey | None:
        """Return the key of an adapter in arrays, which it registers, or of a task id."""
        if arrays.tensors is None:
            return None if arrays.task_id is None else ByTaskId(arrays.task_id)
        weights, config = arrays.tensors
        return await self._service.adapter_admin.load_tensors(
            LOCAL, model=self.name, task_id=arrays.task_id, weights=weights, config=config
        )

    async def _add_arrays(self, arrays: LoraArrays) -> AdapterDetails:
        key = await self._key(arrays)
        assert key is not None
        ref = AdapterRef(self.name, DEFAULT_TENANT, key)
        return await self._service.adapter_admin.describe(LOCAL, ref)

    def _ref(self, name: str) -> AdapterRef:
        return AdapterRef(self.name, DEFAULT_TENANT, ByName(name))


async def _all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all the work to its end; return the results, or raise the first error in their order."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


async def _outputs(stream: Admission) -> list[RequestOutput]:
    if isinstance(stream, LoraplexError):
        raise stream
    return [output async for output in stream]
