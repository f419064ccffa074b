"""`python -m loraplex.app.engine_process LOG_LEVEL`: the process of an engine.

engine.process describes its start. torch is imported after it, so that the process ignores signals
and notices the end of serving from its first moment.
"""

import sys

import msgspec

from loraplex.core.config import ModelConfig
from loraplex.core.imports import without_collection
from loraplex.core.log_lines import log_to_standard_error
from loraplex.engine.channel import EngineChannel
from loraplex.engine.process import be_engine_process


def main() -> None:
    """Run an engine process."""
    (log_level,) = sys.argv[1:]
    log_to_standard_error(log_level, "engine")
    be_engine_process(_run)


def _run(settings: bytes, channel: EngineChannel) -> None:
    with without_collection():
        from loraplex.app.engine import run_engine  # noqa: PLC0415
    run_engine(msgspec.msgpack.decode(settings, type=ModelConfig), channel, is_alone=True)


if __name__ == "__main__":
    main()
