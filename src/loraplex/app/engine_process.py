"""`python -m loraplex.app.engine_process LOG_LEVEL`: the process of an engine.

engine.process describes its start. torch is imported after it, so that the process ignores signals
and notices the end of serving from its first moment.
"""

import sys
from typing import Final

import msgspec

from loraplex.core.config import ModelConfig
from loraplex.core.imports import deferred, without_collection
from loraplex.core.log_lines import log_to_standard_error
from loraplex.core.threads import switch_threads_often
from loraplex.engine.channel import EngineChannel
from loraplex.engine.process import be_engine_process

_FOR_COMPILERS: Final = "torch._meta_registrations"
"""Shapes of the results of operations, for torch.compile: a third of the time of torch's import. An
engine on a CPU does without.
"""


def main() -> None:
    """Run an engine process."""
    (log_level,) = sys.argv[1:]
    log_to_standard_error(log_level, "engine")
    switch_threads_often()
    be_engine_process(_run)


def _run(settings: bytes, channel: EngineChannel) -> None:
    with without_collection():
        with deferred(_FOR_COMPILERS) as import_now:
            import torch  # noqa: PLC0415

            if torch.cuda.is_available():
                import_now()
        from loraplex.app.engine import run_engine  # noqa: PLC0415
    run_engine(msgspec.msgpack.decode(settings, type=ModelConfig), channel, is_alone=True)


if __name__ == "__main__":
    main()
