"""POST /v1/run and /guidance: the protocol of Guidance's remote clients, always as events."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import LoadPolicy
from loraplex.core.errors import InvalidParameterError, LoraplexError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import RequestOutput, SequenceOutput
from loraplex.core.request import GenerateRequest
from loraplex.core.task import Generate
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.adapter_fields import ModelTarget, adapter_choices
from loraplex.frontends.openai.context import DIGESTS, OpenAIContext, request_id
from loraplex.frontends.openai.convert import rendered_chat
from loraplex.frontends.openai.generation import ENDS
from loraplex.frontends.openai.llgtrt.dialect import DEFAULT_MAX_TOKENS
from loraplex.frontends.openai.sampling import sampling_params
from loraplex.frontends.openai.schema import GenerationBody, Messages
from loraplex.frontends.openai.sse import ChunkStream
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    ResponseDoc,
    described,
    events_of,
    json_body,
)
from loraplex.frontends.streams import generate_all

if TYPE_CHECKING:
    from loraplex.serving.grammar.captures import Capture, CaptureReader

CONTROLLER: Final = "llguidance"
_NAMES: Final = {"grammar": "controller_arg", "top_p_reset_id": "top_p_reset_ids"}
LOG_PREFIX: Final = "JSON-OUT: "
"""Prefix of the lines in a fork's logs that its client reads."""


class GuidanceBody(GenerationBody):
    """The fields of Guidance's clients, and those of a completion that go with them."""

    controller: str | None = None
    controller_arg: dict[str, Any] | None = None
    prompt: str | None = None
    messages: Messages | None = None


class InitialRun(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    object: str = "initial-run"


class RunUsage(msgspec.Struct, frozen=True):
    sampled_tokens: int
    ff_tokens: int
    """Those of the prompt: they were given, not drawn."""
    cost: int


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    text: str
    error: str = ""
    logs: str
    storage: list[Any] = []
    micros: int
    logprobs: list[float]


class Run(msgspec.Struct, frozen=True):
    forks: list[Fork]
    usage: RunUsage
    object: str = "run"


class Step(msgspec.Struct, frozen=True):
    """An output, and what was captured by it, by the index of its sequence."""

    output: RequestOutput
    captures: Mapping[int, "list[Capture]"]
    micros: int


class GuidanceEndpoints:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(
        ResponseDoc(200, (events_of(InitialRun, ENDS), events_of(Run, ENDS))),
        tag="guidance",
        body=json_body(GuidanceBody),
        response_headers=(DIGESTS,),
        errors=ANY_ERROR,
    )
    async def run(self, request: Request) -> Response:
        """Text that a grammar of Guidance's clients constrains, as events."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, GuidanceBody)
        dialect = self._context.options.dialect
        target = await dialect.target(self._context, body, principal)
        generation = await self._request(request, body, target)
        outputs = _steps(
            generate_all(self._context.backend, (generation,), principal, _reworded),
            generation.sampling.grammar,
        )
        model = body.model or target.model.name
        writer = RunWriter(f"run-{request_id(request)}", model)
        return ChunkStream(outputs, writer, request_id(request), dialect.errors)

    async def _request(
        self, request: Request, body: GuidanceBody, target: ModelTarget
    ) -> GenerateRequest:
        backend = self._context.backend
        grammar = _grammar(body)
        prompt, is_chat = await self._prompt(body, target)
        fields = {"max_tokens": body.max_tokens or DEFAULT_MAX_TOKENS, "logprobs": 0}
        sampling = sampling_params(body, fields, target.model.vocab_size)
        add_special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
        return GenerateRequest(
            request_id=backend.new_request_id(),
            client_request_id=request_id(request),
            model=target.model.name,
            prompt=prompt,
            task=Generate(msgspec.structs.replace(sampling, grammar=grammar)),
            adapters=adapter_choices(body, target, "")[0],
            load_policy=LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO),
            add_special_tokens=add_special,
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
        )

    async def _prompt(self, body: GuidanceBody, target: ModelTarget) -> tuple[str, bool]:
        """The text, and whether a template made it."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameterError("give prompt or messages, one of them", param="prompt")
        if body.messages is None:
            return body.prompt or "", False
        return await rendered_chat(self._context.backend, target.model, body.messages), True


def _reworded(error: LoraplexError) -> LoraplexError:
    return as_sent(error, _NAMES)


def _grammar(body: GuidanceBody) -> Grammar:
    if body.controller != CONTROLLER:
        got = "it is missing" if body.controller is None else f"got {body.controller!r}"
        raise InvalidParameterError(f"controller must be {CONTROLLER!r}, {got}", param="controller")
    grammar = (body.controller_arg or {}).get("grammar")
    if isinstance(grammar, str) and grammar:
        return Grammar(GrammarKind.LARK, grammar)
    if not isinstance(grammar, dict):
        raise InvalidParameterError(
            "controller_arg.grammar must be a grammar as llguidance writes it, an object",
            param="controller_arg",
        )
    return Grammar(GrammarKind.LLGUIDANCE, msgspec.json.encode(grammar).decode())


async def _steps(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], grammar: Grammar | None
) -> AsyncGenerator[Step, None]:
    """Outputs with their captures, which are parsed in a thread."""
    readers: dict[int, CaptureReader] = {}
    async with aclosing(outputs):
        before = time.perf_counter()
        async for _, output in outputs:
            captures = await asyncio.to_thread(_captures, output, grammar, readers)
            now = time.perf_counter()
            yield Step(output, captures, int((now - before) * 1e6))
            before = now


def _captures(
    output: RequestOutput, grammar: Grammar | None, readers: "dict[int, CaptureReader]"
) -> "dict[int, list[Capture]]":
    # Not at the top: no start of a server is to wait for llguidance.
    from loraplex.serving.grammar.captures import CaptureReader  # noqa: PLC0415
    from loraplex.serving.grammar.forms import llguidance_form  # noqa: PLC0415

    found: dict[int, list[Capture]] = {}
    for sequence in output.sequences:
        if grammar is not None and sequence.index not in readers:
            readers[sequence.index] = CaptureReader(llguidance_form(grammar))
        reader = readers.get(sequence.index)
        found[sequence.index] = reader.push(sequence.text) if reader else []
    return found


class RunWriter:
    """The events of one run."""

    def __init__(self, run_id: str, model: str) -> None:
        self._run_id = run_id
        self._model = model
        self._has_begun = False

    def headers(self, first: Step) -> Mapping[str, str]:
        return adapter_headers(first.output)

    def chunks(self, step: Step) -> Iterator[msgspec.Struct]:
        if not self._has_begun:
            self._has_begun = True
            yield InitialRun(self._run_id, int(time.time()), self._model)
        forks = [_fork(sequence, step) for sequence in step.output.sequences]
        if forks:
            yield Run(forks, _usage(step.output))

    def last_chunks(self) -> Iterator[msgspec.Struct]:
        yield from ()


def _fork(sequence: SequenceOutput, step: Step) -> Fork:
    logprobs = [logprob.logprob for logprob in sequence.logprobs]
    lines: list[dict[str, Any]] = [
        {
            **_said("text", sequence.text.encode(), sum(logprobs)),
            "num_tokens": len(sequence.token_ids),
            "is_generated": True,
        }
    ]
    lines += [
        {**_said("capture", capture.value, 0.0), "name": capture.name}
        for capture in step.captures[sequence.index]
    ]
    return Fork(
        index=sequence.index,
        finish_reason=sequence.finish_reason,
        text=sequence.text,
        logs="".join(f"{LOG_PREFIX}{msgspec.json.encode(line).decode()}\n" for line in lines),
        micros=step.micros,
        logprobs=logprobs,
    )


def _said(kind: str, value: bytes, logprob: float) -> dict[str, Any]:
    text = value.decode(errors="replace")
    return {"object": kind, "str": text, "hex": value.hex(), "log_prob": logprob}


def _usage(output: RequestOutput) -> RunUsage:
    sampled, given = output.num_output_tokens, len(output.prompt_token_ids)
    return RunUsage(sampled, given, 2 * sampled + sampled + given)
