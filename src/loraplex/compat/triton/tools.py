"""Tools of Triton's users: launch_triton_server.py starts `loraplex compat triton` in the
background, fill_template.py fills the `${name}` of a template.

Of a template the two settings of the queue have default values; all other names without a value
stay.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import string
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.adapters.durable_files import write_atomically
from loraplex.core.environment import server_environment
from loraplex.core.errors import ConfigError
from loraplex.core.python_process import module_command

_PROCESSES = Path("/proc")
_SERVER = "tritonserver"
_LOG_VERBOSE = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is to be started."""

    model_repository: Path
    grpc_port: int
    http_port: int
    metrics_port: int
    log_file: Path | None = None
    """Gets what the server prints, in detail; None: this process's own output does."""
    program: str | None = None
    """Instead of `loraplex compat triton`: any program with tritonserver's flags."""

    @property
    def command(self) -> list[str]:
        start = module_command("loraplex", "compat", "triton")
        flags = [
            f"--model-repository={self.model_repository}",
            f"--grpc-port={self.grpc_port}",
            f"--http-port={self.http_port}",
            f"--metrics-port={self.metrics_port}",
            "--disable-auto-complete-config",
        ]
        if self.log_file is not None:
            flags.append(f"--log-verbose={_LOG_VERBOSE}")
        return [*(start if self.program is None else [self.program]), *flags]


def launch(what: Launch, *, force: bool) -> int:
    """Start it, and give its process id: it goes on when this process ends.

    Raises ConfigError if a server runs already and `force` is not set, or if nothing can start.
    """
    if not what.model_repository.is_dir():
        raise ConfigError(f"there is no model repository {what.model_repository}")
    running = list(running_servers())
    if running and not force:
        raise ConfigError(
            f"a server runs already, with process id {', '.join(map(str, running))}: stop it "
            "(kill), or start one more with --force"
        )
    try:
        with contextlib.ExitStack() as stack:
            log = None if what.log_file is None else stack.enter_context(what.log_file.open("ab"))
            process = subprocess.Popen(
                what.command,
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(f"cannot start {error.filename}: {error.strerror}") from error
    return process.pid


def running_servers() -> Iterator[int]:
    """Process ids of Triton servers of this user, ours and others."""
    for folder in sorted(_PROCESSES.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            is_own = folder.stat().st_uid == os.getuid()
        except OSError:  # it has ended
            continue
        if is_own and is_server([argument.decode(errors="replace") for argument in arguments]):
            yield int(folder.name)


def is_server(arguments: Sequence[str]) -> bool:
    """Whether a command line is that of a Triton server."""
    names = [Path(argument).name for argument in arguments[:6]]
    if _SERVER in names[:2]:
        return True
    # Both `loraplex compat triton` and `loraplex triton` start one.
    words = [name for name in names if name != "compat"]
    return any(pair == ("loraplex", "triton") for pair in itertools.pairwise(words))


_DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_PIECE = re.compile(r"\\[,:\\]|.", re.DOTALL)


def parse_substitutions(text: str) -> dict[str, str]:
    r"""Parse `name:value,name:value`, with the escapes `\,`, `\:` and `\\` in a value.

    Raises ConfigError that names the wrong pair.
    """
    found = {}
    for pair in _split(text, ","):
        parts = _split(pair, ":")
        if len(parts) != 2 or not parts[0].strip():
            raise ConfigError(
                f"substitutions are NAME:VALUE,NAME:VALUE, got {pair!r}; within a value write "
                r"\: for a colon and \, for a comma"
            )
        found[_unescaped(parts[0])] = _unescaped(parts[1])
    return found


def filled(text: str, substitutions: dict[str, str], source: str) -> str:
    """Fill a text of this source. Raises ConfigError for a name that does not occur.

    The queue's settings need not occur: the backend's instructions name them for all models.
    """
    for name in substitutions:
        if name not in text and name not in _DEFAULTS:
            placeholders = sorted(set(re.findall(r"\$\{(\w+)\}", text)))
            there = ", ".join(placeholders) or "no placeholder any more"
            raise ConfigError(f"{name} does not occur in {source}; it has {there}")
    return string.Template(text).safe_substitute(_DEFAULTS | substitutions)


def write_filled(path: Path, text: str) -> None:
    """Replace the template atomically. Raises ConfigError."""
    target = path.resolve()
    try:
        mode = target.stat().st_mode
        write_atomically(target, [text.encode()])
        target.chmod(mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _split(text: str, separator: str) -> list[str]:
    """Split at separators without a backslash; the backslashes stay."""
    parts = [""]
    for piece in _PIECE.findall(text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unescaped(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)
