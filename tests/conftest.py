"""Settings and fixtures of every test."""

import atexit
import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.environment import let_threads_sleep
from support.covering_cases import mark_what_soak_takes
from support.examples import register_profiles
from support.sampled_cases import has_no_test, left_to_others, part_of_slow

# Tests start programs of `support` with `python -m`.
_PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

# What a user of this machine keeps does not count, and tests leave nothing there.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="loraplex-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# No public authority vouches for a server of a test, so each client reads one of 140 certificates:
# all of them take longer than most tests. `make test-wheel` installs from an index, and a machine
# with a GPU may have no certifi.
if "WHEELS" not in os.environ:
    with contextlib.suppress(ModuleNotFoundError):
        import certifi

        first, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
        os.environ["SSL_CERT_FILE"] = os.path.join(os.environ["XDG_STATE_HOME"], "certificate.pem")
        Path(os.environ["SSL_CERT_FILE"]).write_text(first + end)

# Several test processes share few cores: before anything imports torch.
let_threads_sleep()

# bitsandbytes compiles functions when PEFT imports it, which imports 550 modules of torch.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Without a GPU its kernels are interpreted. Triton reads this when it meets a kernel.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

register_profiles()

# Folders with the longest tests come first: what is left at the end can be shared evenly.
_FOLDERS = ("e2e", "golden", "property", "unit/kernels", "contract", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "take the K-th of N parts of the slow tests"
    parser.addoption("--slow-part", metavar="K/N", type=part_of_slow, help=help_text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file, in each process, whose tests are all left out. A named file is imported."""
    if collection_path.suffix != ".py" or f"{collection_path.name}" in " ".join(config.args):
        return None
    return has_no_test(collection_path.read_text("utf-8"), config.option.markexpr) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without a garbage collector: modules and thousands of tests are no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, Any, Any]:
    """Choose cases, and sort tests by folder, in the order that pytest-randomly chose in each."""
    mark_what_soak_takes(config, items)  # before the marker expression is applied
    result = yield
    left_out = set(left_to_others(config, items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]

    def rank(item: pytest.Item) -> int:
        return next(i for i, folder in enumerate(_FOLDERS) if f"tests/{folder}" in item.nodeid)

    items.sort(key=rank)
    return result


def pytest_collection_finish() -> None:
    """Take from each test what the imported modules would cost it."""
    # To each logger that does not propagate pytest adds handlers, six times a test. Torch has 40.
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    # Before the first launch, and only where a test has imported kernels.
    if "triton.runtime.interpreter" in sys.modules:
        from support.interpreted_kernels import patch_once_in_a_launch

        patch_once_in_a_launch()
    # The garbage collector looks through modules and tests neither now nor later.
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file or of an xdist_group in one process, which sets them up once."""
    from xdist.scheduler import LoadGroupScheduling  # a machine with a GPU has no xdist

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A server's log settings, and its start, set it for the whole process."""
    loggers = logging.getLogger(), logging.getLogger("loraplex")
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
