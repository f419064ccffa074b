"""loraplex as a library of asyncio programs: `AsyncLLM`."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self, Unpack

from loraplex.app.llm_arguments import Adapter, Chat, RequestOptions
from loraplex.app.llm_outputs import Classified, Embedded, Generated, Prompt, Scored
from loraplex.app.local_model import Engine, LocalModel
from loraplex.core.errors import NotReadyError
from loraplex.core.output import RequestOutput
from loraplex.core.principal import LOCAL
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.compare import Compared


class AsyncLLM:
    """A base model with its adapters, in this process, for asyncio: an `LLM` whose work is awaited.

        async with AsyncLLM("path/to/model", adapters={"zh": "path/to/adapter"}) as llm:
            async for output in llm.stream("Hello", adapter="zh"):
                print(output.text, end="")

    The arguments are those of `LLM`. The model is loaded, and everything computed, in other
    threads: the event loop goes on. Requests of all tasks, and of several event loops, are batched
    together. A task that is cancelled ends its requests.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        engine: Engine = "thread",
        state_dir: str | os.PathLike[str] = "",
        **settings: Any,
    ) -> None:
        self._arguments = (model, adapters, engine, state_dir, settings)
        self._starting: asyncio.Future[LocalModel] | None = None
        self._started: LocalModel | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __reduce__(self) -> str:
        raise TypeError("an AsyncLLM cannot be sent to another process: make one in that process")

    async def start(self) -> None:
        """Load the model. Safe to call twice. Raises ConfigError for a wrong model or setting."""
        if self._started is None:
            if self._starting is None:
                load = asyncio.to_thread(LocalModel, *self._arguments)
                self._starting = asyncio.ensure_future(load)
            try:
                self._started = await asyncio.shield(self._starting)
            except Exception:
                self._starting = None
                raise

    async def close(self) -> None:
        """Stop the engine; running prompts end with an error. Safe to call twice."""
        starting, self._starting = self._starting, None
        if self._started is None and starting is not None:
            await asyncio.wait([starting])
            if starting.exception() is None:
                self._started = starting.result()
        if self._started is not None:
            await asyncio.to_thread(self._started.loop.close)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Complete prompts together, as `LLM.generate` does.

        An adapter of arrays is loaded by add_adapter first.
        """
        model = self._model
        return await model.loop.run(model.generate(prompts, sampling_params, adapter, options))

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedded]:
        """Return the vectors of texts, as `LLM.embed` does."""
        model = self._model
        work = model.embed(
            *(texts, adapter, options),
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
        )
        return await model.loop.run(work)

    async def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        use_activation: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Classified]:
        """Return the labels of texts, as `LLM.classify` does."""
        work = self._model.classify(texts, adapter, options, use_activation=use_activation)
        return await self._model.loop.run(work)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        adapter: Adapter | None = None,
        instruction: str | None = None,
        use_activation: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Scored]:
        """Return how well documents fit queries, as `LLM.score` does."""
        model = self._model
        work = model.score(
            *(queries, documents, adapter, options),
            instruction=instruction,
            use_activation=use_activation,
        )
        return await model.loop.run(work)

    async def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Continue conversations, as `LLM.chat` does."""
        model = self._model
        work = model.chat(messages, sampling_params, adapter, tools, options)
        return await model.loop.run(work)

    def stream(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: Adapter | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, or continue a conversation; yield what is new after each step.

        The last output has the timing. A generator that is closed early ends the request.
        """
        model = self._model
        return model.loop.iterate_async(model.stream(prompt, sampling_params, adapter, options))

    async def compare(
        self,
        prompt: Prompt,
        adapters: Sequence[Adapter | None],
        sampling_params: SamplingParams | None = None,
    ) -> list[Compared]:
        """Complete one prompt with each of the adapters, as `LLM.compare` does."""
        model = self._model
        return await model.loop.run(model.compare(prompt, adapters, sampling_params))

    async def add_adapter(
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
        """Load an adapter, and return its description, as `LLM.add_adapter` does."""
        work = self._model.add_adapter(
            *(name, path),
            task_id=task_id,
            replace=replace,
            dry_run=dry_run,
            canary=canary,
            lora_weights=lora_weights,
            lora_config=lora_config,
        )
        return await self._model.loop.run(work)

    async def remove_adapter(
        self, name: str, mode: UnloadMode | str = UnloadMode.DRAIN
    ) -> Unloaded:
        """Unload an adapter; its running requests end normally, or at once ("immediate")."""
        return await self._model.loop.run(self._model.remove_adapter(name, mode))

    async def rollback_adapter(self, name: str, version: int | None = None) -> AdapterCard:
        """Restore an older version of an adapter: by default the one before the present one."""
        return await self._model.loop.run(self._model.rollback_adapter(name, version))

    async def pin_adapter(
        self, name: str, version: int | None = None, *, pinned: bool = True
    ) -> VersionCard:
        """Pin a version, so that it is never removed, or unpin it; None: the present version."""
        return await self._model.loop.run(self._model.pin_adapter(name, version, pinned=pinned))

    async def alias_adapter(self, name: str, alias: str, *, replace: bool = False) -> AdapterCard:
        """Give an adapter another name; remove_adapter removes that name."""
        return await self._model.loop.run(self._model.alias_adapter(name, alias, replace=replace))

    async def adapter(self, name: str) -> AdapterDetails:
        """Return the description of an adapter with its versions."""
        return await self._model.loop.run(self._model.describe_adapter(name))

    def adapters(self) -> list[AdapterCard]:
        """Return the adapters that are loaded."""
        return list(self._model.service.adapters(LOCAL))

    def stats(self) -> EngineStats:
        """Return the engine's present numbers."""
        return self._model.service.model(self._model.name).stats

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template, which `chat` needs."""
        return bool(self._model.service.model(self._model.name).chats.text)

    @property
    def _model(self) -> LocalModel:
        if self._started is None:
            raise NotReadyError(
                "this AsyncLLM is not started: use it in `async with`, or await start()"
            )
        return self._started
