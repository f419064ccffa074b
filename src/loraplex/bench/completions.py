"""OpenAI's /v1/completions, streamed: the request of a benchmark, and its stream.

Prompts are token ids and the end token is ignored, so lengths are exactly those of the workload.
"""

import msgspec

from loraplex.bench.exchange import Completion, Exchange
from loraplex.bench.streaming import lines
from loraplex.bench.workload import PlannedRequest

PATH = "/v1/completions"
_DATA = b"data:"
_DONE = b"[DONE]"
_MAX_ERROR_LENGTH = 300


def completion_body(model: str, request: PlannedRequest) -> bytes:
    """model: the base, or an adapter of it, as the server names them."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # A server may leave out a chunk without text, so that its token would go unseen.
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def read_completion(exchange: Exchange) -> Completion:
    """Read a stream, with its usage at the end."""
    chunk_ns: list[int] = []
    text: list[str] = []
    usage = _Usage()
    error = exchange.error
    for arrived_ns, line in lines(exchange):
        data = line.removeprefix(_DATA).strip()
        if data == _DONE or not line.startswith(_DATA):
            continue
        chunk = _parse(data)
        if chunk.error is not None:
            error = f"the stream broke: {str(chunk.error)[:_MAX_ERROR_LENGTH]}"
        if chunk.choices:
            chunk_ns.append(arrived_ns)
            text.extend(choice.text or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    return Completion(
        chunk_ns=tuple(chunk_ns),
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=0 if details is None else details.cached_tokens or 0,
        num_output_tokens=usage.completion_tokens,
        text="".join(text),
        error=error,
    )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Chunk(msgspec.Struct):
    """What matters of a chunk of the stream: choices, and at its end the usage or an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


def _parse(data: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        return _Chunk(error=f"{data!r} is not a chunk: {error}")
