"""loraplex as a library: the same service, without its front ends."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, Unpack, cast

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
from loraplex.app.llm_outputs import Completion, Generated, Prompt, collect
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
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.core.task import Generate
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    LoadReport,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.backend import Admission, admit_together, close_outputs
from loraplex.serving.compare import Compared, compare, comparison_requests
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.request_metrics import RequestMetrics


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


__all__ = ["LLM", "Completion", "Generated", "Prompt"]

T = TypeVar("T")

_LAUNCHERS: Final[Mapping[str, EngineLauncher]] = MappingProxyType(
    {"thread": engine_thread, "process": engine_process}
)


class LLM:
    """A base model with its adapters, in this process.

        with LLM("path/to/model", adapters={"zh": "path/to/adapter"}) as llm:
            outputs = llm.generate(["Hello", "Hello"], adapter=[None, "zh"])

    Args:
        model: Hugging Face folder or hub id.
        adapters: paths of adapters by name.
        engine: "thread" runs the engine in this process, "process" in one of its own.
        state_dir: folder of staged adapters (default: the model's in the user's state directory).
        settings: any setting of a served model (see core.config.ModelConfig): dtype, device,
            max_model_len, max_num_seqs, kv_cache_bytes, max_lora_rank, ...

    Raises ConfigError for a wrong model or setting. Thread-safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        engine: Literal["thread", "process"] = "thread",
        state_dir: str | os.PathLike[str] = "",
        **settings: Any,
    ) -> None:
        launch = _LAUNCHERS.get(engine)
        if launch is None:
            raise ConfigError(f"engine must be one of {', '.join(_LAUNCHERS)}, got {engine!r}")
        self._model = os.fspath(model)
        config = library_config(self._model, adapters or {}, state_dir, settings)
        self._service = build_service(with_local_paths(config), launch, RequestMetrics())
        self._loop = ServiceLoop(self._service.close)
        self._wait = self._loop.wait
        try:
            self._wait(self._service.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; running prompts end with an error. Safe to call twice."""
        self._loop.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        lora_task_id: int | Sequence[int | None] | None = None,
        lora_weights: Any = None,
        lora_config: Any = None,
        load_lora_weights: Literal["auto", "always", "never"] = "auto",
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Complete prompts together; the results have the order of the prompts.

        Each argument is one value for all prompts, or a list with one for each. No adapter is the
        base model; {"fr": 0.7, "legal": 0.3} composes two. `lora_task_id`, `lora_weights` and
        `lora_config` are TensorRT-LLM's, the latter two arrays of numpy or torch: they register an
        adapter, which later requests name by its id alone. `options` (priority, timeout_seconds,
        end_id, retention) apply to all prompts. Raises the first error, in the order of the
        prompts, after all have ended; if an adapter of arrays is refused, none begins.
        """
        listed = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = params_per_prompt(sampling_params, len(listed))
        adapters = [adapter_choices(a) for a in per_prompt("adapter", adapter, len(listed))]
        arrays = lora_arrays(lora_task_id, lora_weights, lora_config, len(listed))
        policy = load_policy(load_lora_weights)
        return self._wait(self._generate_all(listed, params, adapters, arrays, policy, options))

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Continue conversations by the model's chat template, as `generate` completes prompts.

        messages: one conversation, a list of {"role": ..., "content": ...}, or several.
        """
        chats = [self._chat_prompt(chat, tools) for chat in as_chats(messages)]
        prompts = self._wait(_all_of(chats))
        return self.generate(prompts, sampling_params, adapter=adapter, **options)

    def stream(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: Adapter | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """Complete a prompt, or continue a conversation; yield what is new after each step.

            for output in llm.stream([{"role": "user", "content": "Hello"}], adapter="zh"):
                print(output.text, end="", flush=True)

        The last output has the timing. An iterator that is closed early ends the request.
        """
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return self._loop.iterate(self._stream(prompt, sampling, adapter_choices(adapter), options))

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template, which `chat` needs."""
        return bool(self._service.model(self._model).chats.text)

    def compare(
        self,
        prompt: Prompt,
        adapters: Sequence[Adapter | None],
        sampling_params: SamplingParams | None = None,
    ) -> list[Compared]:
        """Complete one prompt with each of the adapters in one batch; None is the base model.

        The default is greedy decoding; with other sampling parameters all adapters use one seed.
        The entry of an adapter that fails is its error. If None is among the adapters, each entry
        includes where its output first differs from the base model's.
        """
        sampling = SamplingParams(temperature=0.0) if sampling_params is None else sampling_params
        [listed] = as_prompts([prompt])
        request = self._request(listed, sampling, (), LoadPolicy.AUTO, {})
        choices = [adapter_choices(adapter) for adapter in adapters]
        requests = comparison_requests(self._service, request, choices)
        return self._wait(compare(self._service, requests, LOCAL))

    def add_adapter(
        self,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        task_id: int | None = None,
        replace: bool = False,
        dry_run: bool = False,
        canary: bool = False,
        lora_weights: Any = None,
        lora_config: Any = None,
    ) -> AdapterCard:
        """Load an adapter, and return its description. An error changes nothing.

        An adapter from a path gets a name; see `serving.backend.Backend.load_adapter` for the
        flags. An adapter from arrays, as `generate` takes them, is named by its task id or digest.
        """
        if lora_weights is None and lora_config is None:
            return self._wait(self._load(name, path, task_id, replace, dry_run, canary))
        if name is not None or path is not None or replace or dry_run or canary:
            raise InvalidRequestError(
                "an adapter of arrays is named by its task id or its digest: do not set name, "
                "path, replace, dry_run or canary; alias_adapter gives it a name"
            )
        (arrays,) = lora_arrays(task_id, lora_weights, lora_config, 1)
        return self._wait(self._add_arrays(arrays))

    def remove_adapter(self, name: str, mode: UnloadMode | str = UnloadMode.DRAIN) -> Unloaded:
        """Unload an adapter; its running requests end normally, or at once ("immediate")."""
        modes = [str(known) for known in UnloadMode]
        if mode not in modes:
            raise InvalidRequestError(f"mode must be {' or '.join(modes)}, got {mode!r}")
        ref = self._ref(name)
        return self._wait(self._service.adapter_admin.unload(LOCAL, ref, UnloadMode(mode)))

    def rollback_adapter(self, name: str, version: int | None = None) -> AdapterCard:
        """Restore an older version of an adapter: by default the one before the present one."""
        return self._wait(self._service.adapter_admin.rollback(LOCAL, self._ref(name), version))

    def pin_adapter(
        self, name: str, version: int | None = None, *, pinned: bool = True
    ) -> VersionCard:
        """Pin a version, so that it is never removed, or unpin it; None: the present version."""
        ref = self._ref(name)
        return self._wait(self._service.adapter_admin.pin(LOCAL, ref, version, is_pinned=pinned))

    def alias_adapter(self, name: str, alias: str, *, replace: bool = False) -> AdapterCard:
        """Give an adapter another name; remove_adapter removes that name."""
        ref = self._ref(name)
        return self._wait(self._service.adapter_admin.alias(LOCAL, ref, alias, replace=replace))

    def adapter(self, name: str) -> AdapterDetails:
        """Return the description of an adapter with its versions."""
        return self._wait(self._service.adapter_admin.describe(LOCAL, self._ref(name)))

    def adapters(self) -> list[AdapterCard]:
        return list(self._service.adapters(LOCAL))

    def stats(self) -> EngineStats:
        return self._service.model(self._model).stats

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
        requests = list(map(self._request, prompts, params, choices, *same))
        async with contextlib.AsyncExitStack() as stack:
            streams = await admit_together(self._service, requests, LOCAL, stack)
            outputs = await _all_of(map(_outputs, streams))
        return [
            collect(prompt, of_prompt, sampling.n)
            for prompt, of_prompt, sampling in zip(prompts, outputs, params, strict=True)
        ]

    async def _stream(
        self,
        prompt: Prompt | Chat,
        sampling: SamplingParams,
        adapters: tuple[AdapterChoice, ...],
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        given = await self._chat_prompt(prompt) if is_chat(prompt) else cast("Prompt", prompt)
        [listed] = as_prompts([given])
        request = self._request(listed, sampling, adapters, LoadPolicy.AUTO, options)
        outputs = await self._service.generate(request, LOCAL)
        try:
            async for output in outputs:
                yield output
        finally:
            await close_outputs(outputs)

    async def _chat_prompt(
        self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        model = self._service.model(self._model)
        text = await model.chats.render(chat, tools=tools)
        return model.tokenize(text, add_special_tokens=False)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapters: tuple[AdapterChoice, ...],
        policy: LoadPolicy,
        options: RequestOptions,
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=self._service.new_request_id(),
            model=self._model,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            task=Generate(params),
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
            LOCAL, model=self._model, task_id=arrays.task_id, weights=weights, config=config
        )

    async def _add_arrays(self, arrays: LoraArrays) -> AdapterDetails:
        key = await self._key(arrays)
        assert key is not None
        ref = AdapterRef(self._model, DEFAULT_TENANT, key)
        return await self._service.adapter_admin.describe(LOCAL, ref)

    async def _load(
        self,
        name: str | None,
        path: str | os.PathLike[str] | None,
        task_id: int | None,
        replace: bool,
        dry_run: bool,
        canary: bool,
    ) -> LoadReport:
        if name is None or path is None:
            raise InvalidRequestError("give a name and a path, or lora_weights and lora_config")
        return await self._service.adapter_admin.load(
            LOCAL,
            model=self._model,
            name=name,
            path=os.fspath(path),
            task_id=task_id,
            replace=replace,
            dry_run=dry_run,
            canary=canary,
        )

    def _ref(self, name: str) -> AdapterRef:
        return AdapterRef(self._model, DEFAULT_TENANT, ByName(name))


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
