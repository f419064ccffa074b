"""The product's Service over engines that echo: everything but the model and the processes is real.

A token is a byte (byte_tokenizer), and the output of a request is `model+adapter: prompt`
(echo_runner). Nothing has to be started or closed: engines step when a reader awaits an output
(echo_engine), and chats, grammars and adapters take no process. A bad day can be requested: delays,
errors at admission or in mid-stream, a server that is not ready. What the front end did is
recorded: `requests`, `finished`, `aborted`, `adapter_tensors`.
"""

import asyncio
import functools
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staged import Examination, ExaminedTensor, StagedAdapter
from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterSource, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import LoraplexError
from loraplex.core.output import RequestOutput
from loraplex.core.principal import DEFAULT_TENANT, Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.score_format import ScoreFormat, ScoreKind
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.core.task import Pool
from loraplex.serving.adapter_cards import AdapterCard, card_of
from loraplex.serving.backend import ModelCard
from loraplex.serving.engines.engine_state import EngineEnd, EngineState
from loraplex.serving.grammar import grammar_worker
from loraplex.serving.local_texts import ChatRenderer
from loraplex.serving.model_memory import ModelMemory
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.sandbox.process import Sandbox
from loraplex.serving.sandbox.worker import Task
from loraplex.serving.served_model import ServedModel
from loraplex.serving.service import AdmittedRequest, Service
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.serving.text.chat_template import make_task
from support.byte_tokenizer import BYTE_TOKENIZER, EOS_TOKEN_ID, PAD_TOKEN_ID, VOCAB_SIZE
from support.echo_engine import EchoEngine
from support.echo_runner import EchoOutput, echo_text

CREATED: Final = 1_700_000_000
"""Unix seconds: when every model and adapter was made."""

CHAT_TEMPLATE: Final = """\
{%- set roles = ['system', 'developer', 'user', 'assistant', 'tool'] -%}
{{- bos_token -}}
{%- for document in documents or [] -%}{{- 'system: ' ~ document ~ '\n' -}}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role not in roles -%}
{{- raise_exception('the chat template knows the roles ' ~ roles | join(', ') ~ '; got '
    ~ message.role) -}}
{%- endif -%}
{{- message.role ~ ': ' ~ (message.content or '') ~ '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""
"""`<s>` and one `role: content` line per message, then `assistant: `."""


class EchoService(Service):
    """A test may set and read the public fields at any time."""

    def __init__(
        self,
        models: Sequence[str] = ("echo",),
        *,
        max_model_len: int = 4096,
        delay_seconds: float = 0.0,
        chat: ChatFormat = UNKNOWN_FORMAT,
    ) -> None:
        """`chat` is how all of the models write reasoning and tool calls."""
        self.delay_seconds = delay_seconds
        """Pause before every output, and before the adapter of a request is staged."""
        self.num_cached_tokens = 0
        """Number that the timing of every request reports."""
        self.fixed_stats: EngineStats | None = None
        """What engines report in place of the truth; None: that. See `engine_stats`."""
        self.activity: AdapterActivity | None = None
        """What engines report in place of the truth; None: that."""
        self.model_memory: ModelMemory | None = None
        """What models report in place of the truth; None: that."""
        self.prompt_ending = ""
        """Text that the chat template appends to every prompt."""
        self.requests: list[GenerateRequest] = []
        self.finished: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self.renderings: list[Mapping[str, Any]] = []
        """Arguments of each rendering of the chat template."""
        self.scripts: deque[Sequence[str]] = deque()
        """Outputs of the next requests instead of the echo: a text for each sequence."""
        self._faults: deque[tuple[Exception, int | None]] = deque()
        self.staging = EchoStaging(self)
        self.store = AdapterStore(lambda: CREATED)
        served = [self._echo_model(name, max_model_len, chat) for name in models]
        worker: Any = self.staging
        self.metrics = RequestMetrics(models)
        super().__init__(served, worker, self.metrics, SystemClock())
        self._is_started = True

    def plant(self, error: Exception, *, after_outputs: int | None = None) -> None:
        """Let the next request fail: at admission, or after so many outputs. Faults queue up."""
        self._faults.append((error, after_outputs))

    def plant_load(self, error: LoraplexError) -> None:
        """Let the next load of an adapter fail."""
        self.staging.faults.append(error)

    def register(
        self,
        name: str,
        *,
        model: str | None = None,
        path: str | None = None,
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterCard:
        """Register an adapter of the default tenant without awaiting, as an earlier run did."""
        path = path or f"/adapters/{name}"
        registration = self.store.register(
            model or self.models()[0].name,
            DEFAULT_TENANT,
            name,
            staged_adapter(path.encode()),
            path=path,
            task_id=task_id,
            replace=replace,
        )
        return card_of(registration.version)

    @property
    def adapter_tensors(self) -> list[tuple[RequestTensor, RequestTensor]]:
        """The weights and the configuration of adapters in requests."""
        return self.staging.tensors

    @property
    def unready_reason(self) -> str:
        """Why the engines are away; empty: they are there."""
        return self._engines[0].problem

    @unready_reason.setter
    def unready_reason(self, reason: str) -> None:
        for engine in self._engines:
            engine.state = EngineState.RESTARTING if reason else EngineState.READY
            engine.problem = reason

    @property
    def engine_stats(self) -> EngineStats:
        return self._engines[0].stats

    @engine_stats.setter
    def engine_stats(self, stats: EngineStats) -> None:
        """Let the engines report these, whatever they do."""
        self.fixed_stats = stats
        for engine in self._engines:
            engine.stats = stats

    def forget_engines(self) -> None:
        """Let it be as before the first start of the engines."""
        for engine in self._engines:
            engine.state = EngineState.STARTING
            engine._capacity = None

    @property
    def engine_restarts(self) -> Mapping[str, int]:
        return self.model(self.models()[0].name).engine_restarts

    @engine_restarts.setter
    def engine_restarts(self, restarts: Mapping[str, int]) -> None:
        for engine in self._engines:
            engine.restarts.update({EngineEnd(end): count for end, count in restarts.items()})

    @property
    def step_records(self) -> Sequence[StepRecord]:
        return list(self._engines[0].steps)

    @step_records.setter
    def step_records(self, records: Sequence[StepRecord]) -> None:
        for engine in self._engines:
            engine.steps = deque(records, maxlen=engine.steps.maxlen)

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        return await super().generate(request, principal)

    async def admitted(self, request: GenerateRequest, principal: Principal) -> AdmittedRequest:
        error, after_outputs = self._faults.popleft() if self._faults else (None, None)
        if error is not None and after_outputs is None:
            raise error
        admitted = await super().admitted(request, principal)
        assert isinstance(admitted.engine, EchoEngine)
        if isinstance(request.task, Pool):
            return admitted
        names = [adapter.name for adapter in admitted.adapters]
        prompt = BYTE_TOKENIZER.decode(admitted.request.prompt_token_ids)
        texts: Sequence[str] = [
            echo_text(request.model, names, prompt, index)
            for index in range(request.sampling.num_sequences)
        ]
        if self.scripts:
            texts = self.scripts.popleft()
        output = EchoOutput(texts, error, after_outputs or 0)
        admitted.engine.let_generate(admitted.request.request_id, output)
        return admitted

    @property
    def _engines(self) -> list[EchoEngine]:
        engines = [model.engine for model in self._models.values()]
        return [engine for engine in engines if isinstance(engine, EchoEngine)]

    def _echo_model(self, name: str, max_model_len: int, chat: ChatFormat) -> ServedModel:
        card = echo_card(name, max_model_len=max_model_len, chat=chat)
        model = EchoModel(
            card=card,
            tokenizer=BYTE_TOKENIZER,
            chats=cast("ChatRenderer", EchoChats(self)),
            eos_token_ids=(EOS_TOKEN_ID,),
            shapes=BaseShapes(1, {"q_proj": (64, 64)}),
            config=ModelConfig(path=card.path),
            store=self.store,
            engine=EchoEngine(name, max_model_len, SystemClock(), self),
        )
        model.service = self
        make_task, setup = grammar_worker.make_task, model.grammars._setup
        model.grammars._sandbox = cast("Sandbox", InlineSandbox(lambda: make_task(setup())))
        return model


class EchoModel(ServedModel):
    """A served model that may report a memory which the test chose."""

    service: EchoService

    def memory(self) -> ModelMemory:
        return self.service.model_memory or super().memory()


class EchoChats:
    """Renders chats in this process, and records what it renders."""

    def __init__(self, service: EchoService) -> None:
        self._service = service

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        self._service.renderings.append(options)
        return await _renderer().render(messages, **options) + self._service.prompt_ending

    def close(self) -> None:
        """It has nothing to close."""


@functools.cache
def _renderer() -> ChatRenderer:
    templates, special_tokens = {"default": CHAT_TEMPLATE}, dict(BYTE_TOKENIZER.special_tokens)
    renderer = ChatRenderer(templates, special_tokens)
    setup = json.dumps({"templates": templates, "special_tokens": special_tokens}).encode()
    renderer._sandbox = cast("Sandbox", InlineSandbox(lambda: make_task(setup)))
    return renderer


class InlineSandbox:
    """Does the work of a serving.sandbox.process.Sandbox in this process."""

    def __init__(self, make_task: Callable[[], Task]) -> None:
        self._task = functools.cache(make_task)

    async def run(self, task: bytes) -> bytes:
        return self._task()(task)

    def close(self) -> None:
        """It has nothing to close."""


class EchoStaging:
    """A staging worker for which every path and all tensors are an adapter, without files.

    The digest is the SHA-256 of the path, or of the tensors.
    """

    policy = SourcePolicy()

    def __init__(self, service: EchoService) -> None:
        self.tensors: list[tuple[RequestTensor, RequestTensor]] = []
        self.faults: deque[LoraplexError] = deque()
        """Errors of the next loads."""
        self.remarks: tuple[str, ...] = ()
        """Warnings and notes of the next adapters."""
        self.trained_on: str | None = None
        """Base model that the next adapters name."""
        self._refused: dict[str, str] = {}
        self._service = service

    async def stage(self, path: str, **_: Any) -> StagedAdapter:
        if self.faults:
            self._refused[path] = self.faults[0].message
            raise self.faults.popleft()
        return msgspec.structs.replace(
            staged_adapter(path.encode()), trained_on=self.trained_on, warnings=self.remarks
        )

    async def examine(self, path: str, **_: Any) -> Examination:
        """Return the account of one tensor, refused for what the last load failed of."""
        refusal = self._refused.pop(path, None)
        tensor = ExaminedTensor(
            name="q_proj.lora_A.weight",
            shape=(8, 64),
            dtype="F32",
            module="q_proj",
            layer=0,
            expert=None,
            rank=8,
            applied=refusal is None,
            refused=refusal is not None,
            reason=refusal,
        )
        return Examination(
            format="PEFT",
            trained_on=self.trained_on,
            tensors=(tensor,),
            num_tensors=1,
            num_refused=int(tensor.refused),
        )

    async def stage_tensors(
        self, weights: RequestTensor, config: RequestTensor, **_: Any
    ) -> StagedAdapter:
        self.tensors.append((weights, config))
        await asyncio.sleep(self._service.delay_seconds)
        if self.faults:
            raise self.faults.popleft()
        return staged_adapter(bytes(weights.view) + bytes(config.view))

    async def start(self) -> None:
        """It has no process."""

    async def keep_spare(self) -> None:
        """It has no process."""

    async def close(self) -> None:
        """It has nothing to close."""


def staged_adapter(content: bytes) -> StagedAdapter:
    """Return a staged adapter of one linear layer, whose digest is that of the content."""
    digest = hashlib.sha256(content).hexdigest()
    targets = (LoraTarget(0, "q_proj", 8, 64, 64),)
    source = AdapterSource(digest, f"/normal/{digest}", 1024, targets)
    return StagedAdapter(source=source, dtypes=("F32",), num_tensors=2, seconds={"read": 0.5})


def echo_card(
    name: str, *, max_model_len: int = 4096, chat: ChatFormat = UNKNOWN_FORMAT
) -> ModelCard:
    """Return the card of a model that echoes."""
    return ModelCard(
        name=name,
        path=f"/models/{name}",
        created=CREATED,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
        kv_dtype="float32",
        has_chat_template=True,
        chat=chat,
        scores=ScoreFormat(kind=ScoreKind.VECTORS),
    )
