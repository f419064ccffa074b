"""Sources of output in the terminal: an engine in this process, or a server."""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loraplex.cli.server_client import ServerClient
from loraplex.core.errors import ConfigError, InvalidRequestError, LoraplexError
from loraplex.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from loraplex.app.llm import LLM
    from loraplex.app.llm_arguments import Chat
    from loraplex.app.llm_outputs import Prompt

Message = dict[str, str]


class OutputPiece(NamedTuple):
    """New text of an output."""

    text: str
    num_tokens: int
    """Number of tokens since the piece before it, or, in the last one of a server, of all."""


Pieces = Generator[OutputPiece, None, None]


class ChatSource(Protocol):
    """A base model with adapters. Methods raise LoraplexError."""

    @property
    def has_chat_template(self) -> bool:
        """Return False if `stream` completes the text of the last message instead."""
        ...

    def adapters(self) -> list[str]: ...

    def stream(
        self, messages: Sequence[Message], adapter: str | None, options: Mapping[str, Any]
    ) -> Pieces:
        """Yield the output; no adapter is the base model.

        options: fields of SamplingParams that have the same names in OpenAI's API.
        """
        ...


class LocalSource:
    """Engine in this process. Implements ChatSource."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    @property
    def has_chat_template(self) -> bool:
        return self._llm.has_chat_template

    def adapters(self) -> list[str]:
        return [card.name for card in self._llm.adapters()]

    def stream(
        self, messages: Sequence[Message], adapter: str | None, options: Mapping[str, Any]
    ) -> Pieces:
        prompt = messages if self.has_chat_template else messages[-1]["content"]
        # Without a limit of its own an output may be as long as the model allows.
        sampling = SamplingParams(**{"max_tokens": None, **options})
        return local_pieces(self._llm, prompt, adapter, sampling)


def local_pieces(
    llm: "LLM", prompt: "Prompt | Chat", adapter: str | None, sampling: SamplingParams
) -> Pieces:
    """Yield the output of an engine in this process."""
    for output in llm.stream(prompt, sampling, adapter=adapter):
        yield OutputPiece(output.text, sum(len(one.token_ids) for one in output.sequences))


class ServerSource:
    """Server with OpenAI's API. Implements ChatSource."""

    def __init__(self, client: ServerClient) -> None:
        """Read the server's list of models. Raises LoraplexError."""
        self._client = client
        bases = [entry["id"] for entry in self._models() if not entry.get("parent")]
        if not bases:
            raise ConfigError("the server lists no base model at /v1/models")
        self._base = bases[0]
        self.has_chat_template = self._renders_chats()

    def adapters(self) -> list[str]:
        return [entry["id"] for entry in self._models() if entry.get("parent") == self._base]

    def stream(
        self, messages: Sequence[Message], adapter: str | None, options: Mapping[str, Any]
    ) -> Pieces:
        body = {
            "model": adapter or self._base,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        if self.has_chat_template:
            events = self._client.stream("/v1/chat/completions", {**body, "messages": messages})
        else:
            text = messages[-1]["content"]
            events = self._client.stream("/v1/completions", {**body, "prompt": text})
        for event in events:
            text = "".join(map(_text, event.get("choices") or ()))
            yield OutputPiece(text, (event.get("usage") or {}).get("completion_tokens", 0))

    def _models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self._client.get("/v1/models")["data"]
        return models

    def _renders_chats(self) -> bool:
        """Return False if the server refuses to render a chat; other servers than loraplex and
        vLLM do not have the route."""
        body = {"model": self._base, "messages": [{"role": "user", "content": "Hello"}]}
        try:
            self._client.post("/tokenize", body)
        except InvalidRequestError:
            return False
        except LoraplexError:
            pass
        return True


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


@contextlib.contextmanager
def read_together(streams: Sequence[Pieces]) -> Iterator[list[Iterator[OutputPiece]]]:
    """Read streams at the same time, so that an engine computes them in one batch.

    Yields one iterator for each, which raises the error of its stream. On leaving, streams that
    have not ended are closed.
    """
    is_over = threading.Event()

    def read(stream: Pieces, found: "queue.SimpleQueue[OutputPiece | Exception | None]") -> None:
        try:
            with contextlib.closing(stream):
                for piece in stream:
                    if is_over.is_set():
                        return
                    found.put(piece)
            found.put(None)
        except Exception as error:
            found.put(error)

    queues = []
    for stream in streams:
        found: queue.SimpleQueue[OutputPiece | Exception | None] = queue.SimpleQueue()
        queues.append(found)
        threading.Thread(target=read, args=(stream, found), daemon=True).start()
    try:
        yield [_taken(found) for found in queues]
    finally:
        is_over.set()


def _taken(found: "queue.SimpleQueue[OutputPiece | Exception | None]") -> Iterator[OutputPiece]:
    while (item := found.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item
