"""Serving as a front-end process has it: texts are here, everything else is the owner's."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.adapter import AdapterKey
from loraplex.core.errors import (
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
    error_from_info,
)
from loraplex.core.output import Pooled, RequestOutput
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest, RequestBatch, RequestId
from loraplex.serving.admission import check_request
from loraplex.serving.backend import ModelCard, vector_of
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.generation import Generation, Pooling, outputs_of
from loraplex.serving.local_texts import LocalTexts
from loraplex.serving.logits_files import discard
from loraplex.serving.remote.frames import FrameConnection
from loraplex.serving.remote.messages import (
    Abort,
    AdmittedByOwner,
    CloseBatch,
    Find,
    FoundName,
    FromOwner,
    GenerateRemotely,
    Leave,
    Opened,
    OwnerOutputs,
    Refused,
    State,
)
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory

_NUMBER_SHIFT: Final = 40
"""Bits of a request id below the number of its process."""
_DECODER = msgspec.msgpack.Decoder(FromOwner)


class RemoteService:
    """Implementation of `serving.backend.TextBackend` over a connection to the owner.

    A prompt is tokenized here, and the outputs of the engine become text here.
    """

    def __init__(
        self,
        number: int,
        texts: Mapping[str, LocalTexts],
        metrics: RequestMetrics,
        on_command: Callable[[FromOwner], None],
        on_lost: Callable[[], None],
    ) -> None:
        """number: of this process, not that of any before. on_command: called with the messages
        that are about the process. on_lost: called when the owner has ended."""
        self._number = number
        self._texts = texts
        self._metrics = metrics
        self._on_command = on_command
        self._on_lost = on_lost
        self.responses = ResponseMemory()
        """Memory of the responses of this process."""
        self._ids = itertools.count((number << _NUMBER_SHIFT) + 1)
        self.new_request_id: Callable[[], RequestId] = self._ids.__next__
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[RequestId, OutputStream] = {}
        self._batches = weakref.WeakKeyDictionary[RequestBatch, int]()
        self.is_draining = False
        self.connection = FrameConnection(_DECODER, self._take, self._lose)

    async def connect(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.connection, path)

    def opened(self) -> None:
        """Report to the owner that the port of this process is open."""
        self.connection.send(Opened(self._number))

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        allowed = principal.rights.models
        return [texts.card for name, texts in self._texts.items() if name in allowed]

    def model(self, name: str) -> LocalTexts:
        if name not in self._texts:
            raise ModelNotFoundError(f"there is no model {name!r} here", param="model")
        return self._texts[name]

    async def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        if name in self._texts and name in principal.rights.models:
            return self._texts[name].card, None
        query_id = next(self._ids)
        found: FoundName = await self._reply(query_id, Find(query_id, name, principal))
        return self.model(found.model).card, found.key

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        with self._metrics.admission(request, principal) as record:
            outputs = await self._admitted(request, principal)
        lease = _RemoteLease(self._leave, request.request_id)
        return self._metrics.observe(request, outputs, record, lease)

    async def pool(self, request: GenerateRequest, principal: Principal) -> Pooled:
        return await vector_of(await self.generate(request, principal))

    async def _admitted(
        self, request: GenerateRequest, principal: Principal
    ) -> Generation | Pooling:
        check_request(request)  # a number out of its range may not fit into a message
        request_id, sent = request.request_id, await self._tokenized(request, principal)
        batch = 0 if request.batch is None else self._number_of(request.batch)
        message = GenerateRemotely(msgspec.structs.replace(sent, batch=None), principal, batch)
        try:
            admitted: AdmittedByOwner = await self._reply(request_id, message)
        except asyncio.CancelledError:
            self._leave(request_id, 0)
            raise
        engine_request = admitted.request
        if not engine_request.prompt_token_ids:
            assert not isinstance(sent.prompt, str)
            engine_request = msgspec.structs.replace(engine_request, prompt_token_ids=sent.prompt)
        try:
            self.responses.reserve(
                engine_request.task,
                len(engine_request.prompt_token_ids),
                self.model(request.model).card.vocab_size,
                request.logit_bytes,
                request.repeated_bytes,
            )
        except LoraplexError:
            self._leave(request_id, 0, is_error=True)
            raise
        return outputs_of(
            request,
            engine_request,
            admitted.adapters,
            self.model(request.model).tokenizer,
            self._streams[request_id],
            self,
        )

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End one sequence of a request; the end of its lease ends the whole request."""
        if sequence_index is not None:
            self.connection.send(Abort(request_id, sequence_index))

    async def _tokenized(self, request: GenerateRequest, principal: Principal) -> GenerateRequest:
        """The request with its prompt as tokens.

        The owner refuses what is wrong, in the order of its checks: a prompt that cannot be
        tokenized stays a text.
        """
        is_known = request.model in self._texts and request.model in principal.rights.models
        if not is_known or not isinstance(request.prompt, str) or not request.prompt:
            return request
        texts, truncation = self._texts[request.model], request.truncation
        if request.prefix is not None and request.adapters:
            return request  # its prompts are the owner's
        try:
            request = texts.prefixed(request, texts.card.vectors.prompts)
            token_ids = await texts.prompt_ids(
                request.prompt, request.add_special_tokens, is_cut=truncation is not None
            )
        except LoraplexError:
            return request
        if truncation is not None:  # tokens do not show what the tokenizer put around them
            kept = texts.kept_tokens(request)
            truncation = msgspec.structs.replace(truncation, kept=kept)
        return msgspec.structs.replace(request, prompt=tuple(token_ids), truncation=truncation)

    def _number_of(self, batch: RequestBatch) -> int:
        """The number of an open batch; 0 for one of a single request."""
        if not batch.is_open:
            return 0
        number = self._batches.get(batch)
        if number is None:
            number = self._batches[batch] = next(self._ids)
            batch.when_closed(lambda: self.connection.send(CloseBatch(number)))
        return number

    async def _reply(self, query_id: int, message: msgspec.Struct) -> Any:
        """Send a message, and return the reply. Raises the error that it was refused with."""
        reply = self._replies[query_id] = asyncio.get_running_loop().create_future()
        self.connection.send(message)
        try:
            return await reply
        finally:
            self._replies.pop(query_id, None)

    def _leave(self, request_id: RequestId, num_tokens: int, is_error: bool = False) -> None:
        self._streams.pop(request_id, None)
        self.connection.send(Leave(request_id, num_tokens, is_error))

    def _take(self, message: FromOwner) -> None:
        match message:
            case OwnerOutputs(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is None:
                        discard((output,))
                    else:
                        stream.put(output)
            case AdmittedByOwner(request):
                if request.request_id in self._replies:  # else its client has left
                    self._streams[request.request_id] = OutputStream()
                self._resolve(request.request_id, message)
            case FoundName(query_id):
                self._resolve(query_id, message)
            case Refused(query_id, error):
                self._resolve(query_id, error_from_info(error))
            case State(is_draining, max_model_lens):
                self.is_draining = is_draining
                for name, texts in self._texts.items():
                    length = max_model_lens.get(name, texts.card.max_model_len)
                    texts.card = msgspec.structs.replace(texts.card, max_model_len=length)
            case _:
                self._on_command(message)

    def _resolve(self, query_id: int, reply: Any) -> None:
        waiting = self._replies.get(query_id)
        if waiting is None or waiting.done():
            return
        if isinstance(reply, LoraplexError):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def _lose(self) -> None:
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(NotReadyError("the server has ended"))
        self._on_lost()


class _RemoteLease:
    """The lease of one request, which the owner has."""

    def __init__(
        self, leave: Callable[[RequestId, int, bool], None], request_id: RequestId
    ) -> None:
        self._leave = leave
        self._request_id = request_id
        self._is_over = False

    def end(self, num_tokens: int = 0, *, is_error: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            self._leave(self._request_id, num_tokens, is_error)
