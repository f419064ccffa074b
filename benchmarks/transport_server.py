"""Our Triton front ends over a model that only echoes, in a process of its own: see transport.py.

    PYTHONPATH=tests python benchmarks/transport_server.py [SETTING=VALUE ...]

Settings are those of the server. It is wired as `loraplex compat triton` wires it: all frontends on
the HTTP port, gRPC on its own. Prints both addresses once they respond; ends with standard input.
"""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from loraplex.app.http_app import http_app
from loraplex.app.reporting import reporting_requests
from loraplex.app.server import Ports, end_of_input
from loraplex.app.serving_process import run_on_event_loop
from loraplex.core.clock import SystemClock
from loraplex.core.config import Config
from loraplex.core.errors import NotReadyError
from loraplex.core.output import FinishReason, RequestOutput, RequestTiming, SequenceOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import everyone_is_local
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.models.kinds import ENSEMBLE
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.ops.history import History
from loraplex.frontends.ops.latencies import Latencies
from loraplex.serving.draining import Draining
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory
from support.echo_service import EchoService

UNARY, STREAMED, ENSEMBLE_OF_THREE = "echo", "echo_stream", "ensemble"
MAX_BATCH_SIZE = 8


class OneStepEcho(EchoService):
    """Respond without a model: one output for each requested token, each with the prompt."""

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        del principal
        return _Outputs(request)


class _Outputs(AsyncIterator[RequestOutput]):
    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_sent = 0
        self._arrival = RequestTiming(0)

    async def __anext__(self) -> RequestOutput:
        last = self._request.sampling.max_tokens or 1
        if self._num_sent == last:
            raise StopAsyncIteration
        self._num_sent += 1
        is_last = self._num_sent == last
        text = str(self._request.prompt)
        reason = FinishReason.LENGTH if is_last else None
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id="",
            model=self._request.model,
            adapters=(),
            prompt_token_ids=(1,),
            sequences=(SequenceOutput(0, text, (1,), (), reason),),
            num_output_tokens=self._num_sent,
            finished=is_last,
            timing=self._arrival if is_last else None,
        )

    async def aclose(self) -> None:
        """Nothing runs."""


def _declaration(name: str, *, is_decoupled: bool) -> ModelDeclaration:
    return ModelDeclaration(
        name=name,
        kind=ENSEMBLE,
        base_model="echo",
        max_batch_size=MAX_BATCH_SIZE,
        is_decoupled=is_decoupled,
    )


async def serve(values: dict[str, Any]) -> None:
    settings = ServerConfig(http_port=0, grpc_port=0, **values)
    backend = OneStepEcho()
    draining = Draining(SystemClock(), num_running=lambda: 0, end_all=_nothing_runs)
    declarations = [
        _declaration(name, is_decoupled=name == STREAMED)
        for name in (UNARY, STREAMED, ENSEMBLE_OF_THREE)
    ]
    triton = TritonService(backend, declarations=declarations)
    async with contextlib.AsyncExitStack() as stack:
        reporting = stack.enter_context(reporting_requests(settings))
        bodies = BodyMemory.of(settings, has_keys=False)
        responses = ResponseMemory.of(settings, has_keys=False)
        latencies = Latencies(RequestMetrics())
        app = http_app(
            backend,
            draining,
            triton,
            Config(server=settings),
            everyone_is_local,
            reporting,
            metrics=_no_metrics,
            history=History(backend, latencies),
            latencies=latencies,
            bodies=bodies,
            responses=responses,
        )
        ports = Ports(stack, settings, None)
        await ports.open_http(app, reporting.connections)
        await ports.open_grpc(triton, everyone_is_local, reporting, bodies, responses)
        gc.freeze()  # as the server does once it is ready
        print(f"127.0.0.1:{ports.bound['http']} 127.0.0.1:{ports.bound['grpc']}", flush=True)
        stop = asyncio.Event()
        end_of_input(stop.set)
        await stop.wait()


def _nothing_runs(error: NotReadyError) -> None:
    del error


async def _no_metrics(scope: Any, receive: Any, send: Any) -> None:
    """Return nothing: no client scrapes metrics here."""


def main(arguments: Sequence[str] | None = None) -> None:
    pairs = [pair.partition("=") for pair in arguments or sys.argv[1:]]
    run_on_event_loop(serve({name: value for name, _, value in pairs}))


if __name__ == "__main__":
    main()
