"""loraplex as a library: the same service, without its front ends."""

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from loraplex.app.builder import build_service, engine_process
from loraplex.app.engine import engine_thread
from loraplex.core.adapter import AdapterChoice, AdapterKey, AdapterRef, ByName
from loraplex.core.config import Config, Layer, resolve
from loraplex.core.errors import InvalidRequestError
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
from loraplex.execution.checkpoint import resolve_model
from loraplex.serving.backend import AdapterCard
from loraplex.serving.request_metrics import RequestMetrics

T = TypeVar("T")

Prompt = str | Sequence[int]
"""Text, or token ids."""

_MODEL_NAME = "model"


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
        model: str,
        adapters: Mapping[str, str] | None = None,
        *,
        engine: Literal["thread", "process"] = "thread",
        state_dir: str = "",
        **settings: Any,
    ) -> None:
        config = _config(model, adapters or {}, state_dir, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="loraplex-serving", daemon=True
        )
        self._thread.start()
        launch = engine_thread if engine == "thread" else engine_process
        self._service = build_service(config, launch, RequestMetrics())
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
        """Stop the engine. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._wait(self._service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Generated]:
        """Answer prompts together, in their order.

        `sampling_params` and `adapter` are one for all prompts, or one per prompt; adapter None is
        the base model. Raises the first RequestError, after all prompts have ended.
        """
        listed = _as_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params or SamplingParams(), len(listed))
        names = _per_prompt("adapter", adapter, len(listed))
        return self._wait(self._generate_all(listed, params, names))

    def add_adapter(
        self, name: str, path: str, *, task_id: int | None = None, replace: bool = False
    ) -> AdapterCard:
        """Load an adapter; what it is and how large. Raises before anything changes."""
        return self._wait(
            self._service.load_adapter(
                LOCAL, model=_MODEL_NAME, name=name, path=path, task_id=task_id, replace=replace
            )
        )

    def remove_adapter(self, name: str) -> None:
        """Forget a name; requests that run with it end normally."""
        ref = AdapterRef(_MODEL_NAME, DEFAULT_TENANT, ByName(name))
        self._wait(self._service.unload_adapter(LOCAL, ref))

    def adapters(self) -> list[AdapterCard]:
        return list(self._service.adapters(LOCAL))

    def stats(self) -> EngineStats:
        return self._service.stats(_MODEL_NAME)

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
        key: AdapterKey | None = None if name is None else ByName(name)
        request = GenerateRequest(
            request_id=self._service.new_request_id(),
            model=_MODEL_NAME,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            sampling=params,
            adapters=() if key is None else (AdapterChoice(key),),
        )
        outputs = [output async for output in await self._service.generate(request, LOCAL)]
        return collect(prompt, outputs, params.n)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


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
    model: str, adapters: Mapping[str, str], state_dir: str, settings: Mapping[str, Any]
) -> Config:
    values = {
        **settings,
        "path": str(resolve_model(model, settings.get("revision"))),
        "adapters": {name: {"path": str(path)} for name, path in adapters.items()},
    }
    return resolve(
        [
            Layer("argument of LLM", {"models": {_MODEL_NAME: values}}),
            Layer("argument of LLM", {"server": {"state_dir": state_dir}}),
        ]
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, str | SamplingParams):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts")
    return values
