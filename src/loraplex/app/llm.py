"""loraplex as a library: the same service, without its front ends."""

import asyncio
import dataclasses
import operator
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

from loraplex.app.builder import EngineLauncher, build_service, engine_process, with_local_paths
from loraplex.app.engine import engine_thread
from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName
from loraplex.core.config import Config, Layer, resolve
from loraplex.core.errors import ConfigError, InvalidRequestError, NotReadyError
from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.principal import DEFAULT_TENANT, LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.frontends.streams import close_outputs
from loraplex.serving.backend import AdapterCard
from loraplex.serving.request_metrics import RequestMetrics

T = TypeVar("T")

Prompt = str | Sequence[int]
"""Text, or token ids."""

_LAUNCHERS: Final[Mapping[str, EngineLauncher]] = MappingProxyType(
    {"thread": engine_thread, "process": engine_process}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    """One per token if asked for, else empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """The answer to one prompt. Its own text, tokens and so on are those of the first sequence."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    adapter: ResolvedAdapter | None
    """The very adapter that answered, with its digest; None for the base."""
    timing: RequestTiming
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.completions[0].logprobs


class LLM:
    """A base model with its adapters, in this process.

        with LLM("path/to/model", adapters={"zh": "path/to/adapter"}) as llm:
            answers = llm.generate(["Hello", "Hello"], adapter=[None, "zh"])

    Args:
        model: a Hugging Face folder or hub id.
        adapters: name to PEFT folder.
        engine: "thread" runs the engine in this process, "process" beside it.
        state_dir: where staged adapters are kept; by default the user's state directory.
        settings: any setting of a served model (see core.config.ModelConfig): dtype, device,
            max_model_len, max_num_seqs, kv_cache_bytes, max_lora_rank, ...

    Raises ConfigError for a model or a setting that is wrong. Thread-safe.
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
        config = _config(self._model, adapters or {}, state_dir, settings)
        self._service = build_service(with_local_paths(config), launch, RequestMetrics())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="loraplex-serving", daemon=True
        )
        self._lock = threading.RLock()
        """Held while work is handed to the loop, and while the loop ends."""
        self._thread.start()
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
        """Stop the engine; prompts in work end with an error. Safe to call twice."""
        with self._lock:
            if self._loop.is_closed():
                return
            self._wait(self._service.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Generated]:
        """Answer prompts together, in their order.

        `sampling_params` and `adapter` are one for all prompts, or one per prompt; adapter None is
        the base model. Raises the first error, in the order of the prompts, after all have ended.
        """
        listed = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = _per_prompt("sampling_params", sampling_params, len(listed))
        names = _per_prompt("adapter", adapter, len(listed))
        return self._wait(self._generate_all(listed, params, names))

    def add_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterCard:
        """Load an adapter; what it is and how large. Raises before anything changes."""
        return self._wait(
            self._service.load_adapter(
                LOCAL,
                model=self._model,
                name=name,
                path=os.fspath(path),
                task_id=task_id,
                replace=replace,
            )
        )

    def remove_adapter(self, name: str) -> None:
        """Forget a name; requests that run with it end normally."""
        ref = AdapterRef(self._model, DEFAULT_TENANT, ByName(name))
        self._wait(self._service.unload_adapter(LOCAL, ref))

    def adapters(self) -> list[AdapterCard]:
        return list(self._service.adapters(LOCAL))

    def stats(self) -> EngineStats:
        return self._service.stats(self._model)

    async def _generate_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        names: Sequence[str | None],
    ) -> list[Generated]:
        answers = await asyncio.gather(
            *map(self._generate, prompts, params, names), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, Generated)]

    async def _generate(
        self, prompt: Prompt, params: SamplingParams, name: str | None
    ) -> Generated:
        request = GenerateRequest(
            request_id=self._service.new_request_id(),
            model=self._model,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            sampling=params,
            adapters=() if name is None else (AdapterChoice(ByName(name)),),
        )
        stream = await self._service.generate(request, LOCAL)
        try:
            outputs = [output async for output in stream]
        finally:
            await close_outputs(stream)
        return collect(prompt, outputs, params.n)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work on serving's loop; an interrupt here ends it there."""
        with self._lock:
            if self._loop.is_closed():
                work.close()
                raise NotReadyError("this LLM is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until stopped; then end what is left, so that no task or thread outlives its loop."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def collect(prompt: Prompt, outputs: Sequence[RequestOutput], n: int) -> Generated:
    """The whole answer from its increments."""
    pieces = [piece for output in outputs for piece in output.sequences]
    last = outputs[-1]
    assert last.timing is not None, "the last output tells the timing"
    prompt_logprobs = (output.prompt_logprobs for output in outputs)
    return Generated(
        prompt=prompt,
        prompt_token_ids=last.prompt_token_ids,
        completions=tuple(
            _completion([piece for piece in pieces if piece.index == index]) for index in range(n)
        ),
        adapter=last.adapters[0] if last.adapters else None,
        timing=last.timing,
        prompt_logprobs=next((values for values in prompt_logprobs if values is not None), None),
    )


def _completion(pieces: Sequence[SequenceOutput]) -> Completion:
    last = pieces[-1]
    assert last.finish_reason is not None, "a sequence's last piece tells why it ended"
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
    )


def _config(
    model: str,
    adapters: Mapping[str, str | os.PathLike[str]],
    state_dir: str | os.PathLike[str],
    settings: Mapping[str, Any],
) -> Config:
    if "path" in settings:
        raise ConfigError("path is no setting of LLM: it is the first argument, model")
    values = {
        **settings,
        "path": model,
        "adapters": {name: {"path": os.fspath(path)} for name, path in adapters.items()},
    }
    return resolve(
        [
            Layer("argument of LLM", {"models": {model: values}}),
            Layer("argument of LLM", {"server": {"state_dir": os.fspath(state_dir)}}),
        ]
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [_as_prompt(items)]
    return [_as_prompt(item) for item in items]


def _as_prompt(item: Any) -> Prompt:
    """Numpy's integers are taken, too."""
    if isinstance(item, str):
        return item
    try:
        return [operator.index(token_id) for token_id in item]
    except TypeError as error:
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids, got {item!r}", param="prompts"
        ) from error


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, str | SamplingParams):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts")
    return values
