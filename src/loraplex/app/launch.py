"""From a configuration to a running server, engines first.

An engine needs seconds to import torch, and serving most of one to import its web stack: on two
cores they do so at the same time. This file must stay light, so it imports serving's own late.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from loraplex.app import event_loop
from loraplex.app.build_limits import within_build
from loraplex.core.config import Config, ModelConfig
from loraplex.core.engine_settings import NO_CACHE
from loraplex.core.environment import weights_cache_directory
from loraplex.core.errors import LoraplexError
from loraplex.core.log_lines import log_to_standard_error
from loraplex.execution.weights.hub import resolve_model, resolve_tokenizer
from loraplex.serving.engines.link import EngineLauncher, EngineLink, LinkFactory, ProcessLink
from loraplex.serving.wire_request import current_request

if TYPE_CHECKING:
    from loraplex.frontends.kserve.model_control import ModelControl
    from loraplex.frontends.kserve.models.declaration import ModelDeclaration

_FIRST_EPOCH = 1
_CHATTY = ("asyncio", "grpc")
"""What they say while debugging is about themselves."""


def run_server(
    config: Config,
    say: Callable[[str], None],
    declarations: Sequence["ModelDeclaration"] = (),
    control: "ModelControl | None" = None,
    given_keys: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError if it cannot start.

    `say` is told the addresses once the server is ready. declarations: what a model repository
    says of the Triton models; none: the default names. control: which of them are loaded, and who
    may change that. given_keys: API keys beside those of the configuration, from a flag that
    another server has.
    """
    set_up_logging(config.server.log_level)
    event_loop.run(_run_server(with_local_paths(config), say, declarations, control, given_keys))


def set_up_logging(level: str) -> None:
    """To standard error, from a level of core.config on."""
    log_to_standard_error(level, more="%(request)s")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_request)


def _with_request(record: logging.LogRecord) -> bool:
    """The line says for whom it is, if it is for somebody: by the ids of the access log."""
    request = current_request()
    ids = "" if request is None else f" [{request.request_id} {request.trace.trace_id}]"
    record.request = ids
    return True


async def _run_server(
    config: Config,
    say: Callable[[str], None],
    declarations: Sequence["ModelDeclaration"],
    control: "ModelControl | None",
    given_keys: Sequence[str],
) -> None:
    launch_process = functools.partial(engine_process, log_level=config.server.log_level)
    async with started_engines(config, launch_process) as launch:
        # The engines are on their way.
        from loraplex.app.server import Server  # noqa: PLC0415

        # A Ctrl-C meanwhile is heard here, and not half way through the opening of a port.
        await asyncio.sleep(0)
        told = functools.partial(_say_settled, say)
        await Server(config, launch, told, declarations, control, given_keys).run()


def _say_settled(say: Callable[[str], None], line: str) -> None:
    """The server is ready: what its process has by now stays, and a collection of garbage that
    looked at it would stop every stream for 50 to 100 ms.
    """
    gc.freeze()
    say(line)


def with_local_paths(config: Config) -> Config:
    """The same, with every model in a folder here; a hub id is downloaded. Raises ConfigError.

    Each model's weights cache is then a folder, too, or none. What an engine folder was built for
    holds.
    """
    state_dir = config.server.state_dir
    models = {}
    for name, model in config.models.items():
        folder = resolve_model(model.path, model.revision)
        cache = weights_cache_directory(model.weights_cache_dir, state_dir)
        models[name] = msgspec.structs.replace(
            within_build(name, model, folder),
            path=str(folder),
            tokenizer=model.tokenizer and str(resolve_tokenizer(model.tokenizer)),
            weights_cache_dir=NO_CACHE if cache is None else os.path.abspath(cache),
        )
    return msgspec.structs.replace(config, models=models)


def engine_process(model: ModelConfig, log_level: str = "info") -> LinkFactory:
    """The engine runs in its own process."""
    command = [sys.executable, "-m", "loraplex.app.engine", log_level]
    settings = msgspec.msgpack.encode(model)

    def start(epoch: int) -> Awaitable[EngineLink]:
        return ProcessLink.start(command, settings, epoch)

    return start


@contextlib.asynccontextmanager
async def started_engines(config: Config, launch: EngineLauncher) -> AsyncIterator[EngineLauncher]:
    """Every model's first engine is started at once. Gives a launcher that hands them out.

    A second engine of a model is started when it is asked for. Whatever was not handed out at the
    end is stopped.
    """
    waiting: defaultdict[bytes, list[EngineLink]] = defaultdict(list)

    def handing_out(model: ModelConfig) -> LinkFactory:
        start_another = launch(model)

        async def start(epoch: int) -> EngineLink:
            links = waiting[_settings_of(model)]
            return links.pop() if links and epoch == _FIRST_EPOCH else await start_another(epoch)

        return start

    try:
        for model in config.models.values():
            # What fails now fails again, and is told, when serving asks for the engine.
            with contextlib.suppress(LoraplexError, OSError):
                waiting[_settings_of(model)].append(await launch(model)(_FIRST_EPOCH))
        yield handing_out
    finally:
        left = itertools.chain.from_iterable(waiting.values())
        await asyncio.gather(*(link.close() for link in left))


def _settings_of(model: ModelConfig) -> bytes:
    """A key: a ModelConfig holds tables and has no hash."""
    return msgspec.msgpack.encode(model)
