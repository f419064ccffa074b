"""Sends broken inputs to the Triton front ends in one process, without sockets.

A response has one of the known statuses and a text that names what was wrong; it never contains the
text of an internal error. Afterwards no request is in flight and none waits.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message

from loraplex.core.errors import InternalError, LoraplexError
from loraplex.core.principal import LOCAL
from loraplex.frontends.kserve.errors import status_of
from loraplex.frontends.kserve.grpc.codec import decode_request, encode_piece, encode_response
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import TenantMemory
from loraplex.frontends.middleware import PathRouter
from support import kserve_inputs
from support.echo_service import EchoService

MAX_BODY_BYTES = 2**20
STATUSES = frozenset({200, 400, 404, 405, 413, 501, 503})
DEADLINE_SECONDS = 60.0
"""Time limit of a response; a longer one counts as a hang."""


class KserveProber:
    """A served EchoService, and the checks of its responses."""

    def __init__(self) -> None:
        self.backend = EchoService(max_model_len=256)
        self.backend.register("sheep", task_id=1)
        self.service = TritonService(self.backend)
        routes = kserve_routes(self.service, max_body_bytes=MAX_BODY_BYTES)
        self._app: ASGIApp = PathRouter(routes)
        self.statuses: dict[str, int] = {}
        """Number of responses by status."""

    async def probe(self, seed: int) -> None:
        """Send one input. Raises AssertionError, with the seed, for an invalid response."""
        rng = random.Random(seed)
        kind = rng.randrange(4)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                if kind == 0:
                    model = rng.choice(kserve_inputs.MODELS)
                    headers, body = kserve_inputs.infer_body(rng, model)
                    await self.post(f"/v2/models/{model}/infer", headers, body)
                elif kind == 1:
                    model = rng.choice(kserve_inputs.MODELS)
                    action = rng.choice(("generate", "generate_stream"))
                    body = kserve_inputs.generate_body(rng)
                    await self.post(f"/v2/models/{model}/{action}", {}, body)
                else:
                    is_streamed = kind == 2
                    await self.call(kserve_inputs.infer_message(rng), is_streamed=is_streamed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        assert self.service.num_active == 0, f"seed {seed} left a request"
        counts = [self.service.counts.of(name) for name in kserve_inputs.MODELS]
        assert not any(each.num_pending for each in counts), f"seed {seed} left one pending"
        self._forget()

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Check that the status is known, and that an error is JSON with a text."""
        status, content = await self._posted(path, headers, body)
        self._count(f"HTTP {status}")
        assert status in STATUSES, f"{status}: {content[:300]!r}"
        if status != 200:
            text = content.removeprefix(b"data: ")
            words = json.loads(text)["error"]
            assert words
            assert "internal error" not in words, words

    async def call(self, message: Any, *, is_streamed: bool) -> None:
        """Send a request as a servicer does; a refusal must be one of our errors, with a reason."""
        error = await self._refusal(message, is_streamed=is_streamed)
        if error is None:
            self._count("gRPC OK")
            return
        self._count(f"gRPC {status_of(error).grpc}")
        assert error.message
        assert not isinstance(error, InternalError), error

    async def _refusal(self, message: Any, *, is_streamed: bool) -> LoraplexError | None:
        try:
            memory = TenantMemory(self.service.memory, LOCAL.tenant)
            request, wishes = decode_request(message, message.raw_input_contents, memory)
            if not is_streamed:
                encode_response(await self.service.infer(request, LOCAL), wishes)
                return None
            async with aclosing(await self.service.stream(request, LOCAL)) as responses:
                async for response in responses:
                    encode_piece(response, wishes)
        except LoraplexError as error:
            return error
        return None

    async def _posted(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        messages: list[Message] = []

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError("never")

        async def send(message: Message) -> None:
            messages.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.encode("latin1"), v.encode("latin1")) for k, v in headers.items()],
        }
        await self._app(scope, receive, send)
        return messages[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])

    def _count(self, response: str) -> None:
        self.statuses[response] = self.statuses.get(response, 0) + 1

    def _forget(self) -> None:
        """What the backend records for tests would grow without end."""
        self.backend.requests.clear()
        self.backend.finished.clear()
        self.backend.aborted.clear()
        self.backend.adapter_tensors.clear()
