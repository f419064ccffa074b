"""Start of a server from its configuration: engines first.

An engine needs seconds to import torch, and serving most of one to import its web stack: on two
cores they do so at the same time. This file must stay light, so it imports the web stack late.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loraplex.app.model_settings import with_fair_shares, with_local_paths
from loraplex.app.serving_process import raise_open_file_limit, run_on_event_loop
from loraplex.app.start_checks import check_memory, check_start
from loraplex.core.closing import close_together
from loraplex.core.config import Config, ModelConfig
from loraplex.core.environment import set_log_format
from loraplex.core.errors import LoraplexError
from loraplex.core.imports import without_collection
from loraplex.core.log_lines import log_to_standard_error
from loraplex.core.python_process import module_command
from loraplex.core.server_config import ServerConfig
from loraplex.serving.engines.link import EngineLauncher, EngineLink, LinkFactory, ProcessLink
from loraplex.serving.wire_request import current_request

if TYPE_CHECKING:
    from loraplex.frontends.kserve.models.model_control import ModelControl
    from loraplex.frontends.kserve.models.triton_model import ModelDeclaration

logger = logging.getLogger(__name__)

_FIRST_EPOCH = 1


def run_server(
    config: Config,
    print_line: Callable[[str], None],
    declarations: Sequence["ModelDeclaration"] = (),
    control: "ModelControl | None" = None,
    given_keys: Sequence[str] = (),
    process_name: str = "",
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError if it cannot start.

    print_line: called with each address once the server is ready. declarations: the Triton models
    of a model repository; none: the default names. control: which of them are loaded, and how that
    changes. given_keys: API keys in addition to the configured ones, from a flag of another
    server's command line. process_name: the name that pgrep and pkill find this process by.
    """
    if process_name:
        name_process(process_name)
    set_up_logging(config.server)
    config = with_fair_shares(with_open_files(config), given_keys)
    check_start(config)
    local = with_local_paths(config)
    check_memory(local)
    for name, model in local.models.items():
        logger.info("loading %s from %s on %s", name, model.path, model.device)
    run_on_event_loop(_run_server(local, print_line, declarations, control, given_keys))


def with_open_files(config: Config) -> Config:
    """Raise the limit of open files, and return the configuration with the connections that it
    leaves. Raises ConfigError."""
    number = raise_open_file_limit(config.server.max_connections)
    server = msgspec.structs.replace(config.server, max_connections=number)
    return msgspec.structs.replace(config, server=server)


def name_process(name: str) -> None:
    """Name this process, where Linux is: at most 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


def set_up_logging(settings: ServerConfig) -> None:
    """Log to standard error, by the settings log_level and log_format."""
    set_log_format(settings.log_format)
    log_to_standard_error(settings.log_level, more="%(request)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_request)


def _with_request(record: logging.LogRecord) -> bool:
    """Add the ids of the current request, those of the access log, to a log record."""
    request = current_request()
    ids = "" if request is None else f" [{request.request_id} {request.trace.trace_id}]"
    record.request = ids
    return True


async def _run_server(
    config: Config,
    print_line: Callable[[str], None],
    declarations: Sequence["ModelDeclaration"],
    control: "ModelControl | None",
    given_keys: Sequence[str],
) -> None:
    launch_process = functools.partial(engine_process, log_level=config.server.log_level)
    async with started_engines(config, launch_process) as launch:
        # The engines start meanwhile.
        with without_collection():
            from loraplex.app.server import Server  # noqa: PLC0415

        # A Ctrl-C during the import takes effect here, not while a port is being opened.
        await asyncio.sleep(0)
        print_settled = functools.partial(_print_settled, print_line)
        await Server(config, launch, print_settled, declarations, control, given_keys).run()


def _print_settled(print_line: Callable[[str], None], line: str) -> None:
    """Print a line of a server that is ready, and exclude its present objects from garbage
    collection: a collection that visited them would stop every stream for 50 to 100 ms.
    """
    gc.freeze()
    print_line(line)


def engine_process(model: ModelConfig, log_level: str = "info") -> LinkFactory:
    """Return the factory of an engine in a process of its own."""
    command = module_command("loraplex.app.engine_process", log_level)
    settings = msgspec.msgpack.encode(model)

    def start(epoch: int) -> Awaitable[EngineLink]:
        return ProcessLink.start(command, settings, epoch)

    return start


@contextlib.asynccontextmanager
async def started_engines(config: Config, launch: EngineLauncher) -> AsyncIterator[EngineLauncher]:
    """Start the first engine of every model, and yield a launcher that returns them.

    A second engine of a model is started when it is needed. On leaving, engines that were not
    returned are stopped.
    """
    # By encoded settings: a ModelConfig contains dictionaries, so it has no hash.
    waiting: defaultdict[bytes, list[EngineLink]] = defaultdict(list)

    def returning_started(model: ModelConfig) -> LinkFactory:
        start_another = launch(model)

        async def start(epoch: int) -> EngineLink:
            links = waiting[msgspec.msgpack.encode(model)]
            return links.pop() if links and epoch == _FIRST_EPOCH else await start_another(epoch)

        return start

    try:
        for model in config.models.values():
            # A failure here occurs again, and is reported, when serving starts the engine.
            with contextlib.suppress(LoraplexError, OSError):
                waiting[msgspec.msgpack.encode(model)].append(await launch(model)(_FIRST_EPOCH))
        yield returning_started
    finally:
        left = itertools.chain.from_iterable(waiting.values())
        await close_together(*(link.close() for link in left))
