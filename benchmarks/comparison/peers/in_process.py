"""A started library without a server: its worker has pipes, and times its own tokens.

So a library is measured at its own API, without the cost of a server that it does not have.
"""

from comparison.peers.worker_process import WorkerProcess, decode
from comparison.processes import Launch
from comparison.systems import Adapter, Setup
from loraplex.bench.completions import Exchange, StreamedCompletion
from loraplex.core.errors import ConfigError, UnsupportedFeatureError


class RunningWorker:
    """Implements `Running`."""

    def __init__(self, worker: WorkerProcess, setup: Setup) -> None:
        self._worker = worker
        self._tokens = setup.tokens
        self._adapters: list[str | None] = [adapter.name for adapter in setup.adapters]

    @property
    def launch(self) -> Launch:
        return self._worker.launch

    @property
    def process_ids(self) -> tuple[int, ...]:
        return (self._worker.pid,)

    async def send(self, exchange: Exchange) -> None:
        request = exchange.request
        try:
            line = await self._worker.request(
                "generate",
                prompt=request.prompt_token_ids,
                num_tokens=request.num_output_tokens,
                adapter=None if request.adapter is None else self._adapters[request.adapter],
            )
        except ConfigError as error:
            exchange.error = error.message
        else:
            exchange.chunks.append((0, line))

    def read(self, exchange: Exchange) -> StreamedCompletion:
        """The times are the worker's, one for each token."""
        if exchange.error is not None:
            return StreamedCompletion(error=exchange.error)
        ((_, line),) = exchange.chunks
        reply = decode(line)
        return StreamedCompletion(
            chunk_ns=reply.token_ns,
            num_prompt_tokens=len(exchange.request.prompt_token_ids) if reply.tokens else 0,
            num_output_tokens=len(reply.tokens),
            text="".join(self._tokens[token] for token in reply.tokens),
            error=reply.error,
        )

    async def add_adapter(self, adapter: Adapter) -> int:
        await self._checked("add_adapter", name=adapter.name, path=str(adapter.path))
        self._adapters.append(adapter.name)
        return len(self._adapters) - 1

    async def remove_adapter(self, index: int) -> None:
        await self._checked("remove_adapter", name=self._adapters[index])
        self._adapters[index] = None

    async def counters(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None:
        await self._worker.stop()

    async def _checked(self, op: str, **arguments: object) -> None:
        reply = decode(await self._worker.request(op, **arguments))
        if reply.unsupported is not None:
            raise UnsupportedFeatureError(f"{op}: {reply.unsupported}")
        if reply.error is not None:
            raise ConfigError(f"{op}: {reply.error}")
