"""Code blocks of the documentation, and a folder in which they run as a reader would run them.

A block in sh, bash, console or python runs, or has the reason why not in the line above it:

    <!-- not run: needs a GPU -->

Blocks of a page run from top to bottom in one session of bash: a variable that one block exports is
there in the next one, and a folder that it enters is left by no other. A `console` block has
commands after `$ ` and what they print; `...` there stands for any text.

A tutorial, and the README, is followed to the letter. Its folder is empty at the start, except for
what a hub has (HUB). `loraplex serve` starts a server in a terminal of its own, to which the page's
later blocks speak. The page must write Ctrl-C before it starts the next one. Other pages name
models and adapters that a reader has (FOLDERS); there the flags and files of `loraplex serve` are
checked, and one server is shared by all pages.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.compat.triton.five_models import write_filled_models
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import PORT_FLAGS, RunningServer, start

ROOT = Path(__file__).parents[2]
CHINESE, JAPANESE = ADAPTER_PATHS["chinese"], ADAPTER_PATHS["japanese"]

RUN = frozenset({"sh", "bash", "console", "python"})
"""Languages of blocks that run."""
SHOWN = frozenset({"json", "yaml", "toml", "text", "ini", "promql", "nginx"})
"""Languages of blocks that are only shown: data, output, pictures of text."""

REASONS = frozenset(
    {
        "a form, not a command",
        "a part of a file",
        "CI runs it",
        "installs packages",
        "needs a cluster",
        "needs Docker",
        "needs a GPU",
        "needs a model with an encoder",
        "needs an adapter with a classification head",
        "needs an object store",
        "needs another system",
        "takes long",
    }
)
"""Why a block may stay without a run."""

TUTORIALS = "docs/tutorials/"
STARTING = frozenset({"README.md"})
"""Pages that start servers, next to the tutorials."""
TUTORIAL_REASONS = frozenset({"installs packages"})
"""Why a block of a tutorial may stay without a run."""

HUB: Mapping[str, Path] = {
    "Qwen/Qwen3-0.6B": BASE_PATH,
    "charent/self_cognition_Alice": CHINESE,
    "charent/self_cognition_Bob": JAPANESE,
}
"""What stands for models and adapters of the hub, which the tests do not download."""
FOLDERS: Mapping[str, Path] = {
    **HUB,
    "MODEL": BASE_PATH,
    "PATH": CHINESE,
    "PEFT_FOLDER": CHINESE,
    "adapters/zh": CHINESE,
    "DIR/zh": CHINESE,
    "DIR/ja": JAPANESE,
    "zh": CHINESE,
    "fr": CHINESE,
    "models/llama": BASE_PATH,
    "src/loraplex/demo": BASE_PATH.parent,
    "path/to/model": BASE_PATH,
    "path/to/Meta-Llama-3.1-8B-Instruct": BASE_PATH,
    "path/to/lora/zh": CHINESE,
    "path/to/adapter": CHINESE,
    "path/to/adapters/zh": CHINESE,
    "path/to/adapters/ja": JAPANESE,
    "path/to/chinese-adapter": CHINESE,
    "path/to/japanese-adapter": JAPANESE,
}
"""What stands for the models and adapters that the other pages name."""

SHARED_ADAPTERS = {"zh": CHINESE, "ja": JAPANESE, "summaries": CHINESE}
SHARED_MODEL_NAMES = ("capitals", "base")
MESSAGE = "What is the capital of France?\n"
"""What a reader types into a program that reads standard input."""
TIMEOUT_SECONDS = 900.0
"""Limit for a command that never ends: a busy machine takes its time."""
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_REASON = re.compile(r"<!-- not run: (.+?) -->\n\s*$")
_VARYING = re.compile(r"\.\.\.|\b[0-9a-f]{8}\b|\d{4}-\d\d-\d\dT[\d:.+-]+")
"""What differs from run to run: `...`, ids of keys, times."""
_ABSOLUTE = re.compile(r"(?<![\w.:/-])/(path/to|opt|srv|mnt|etc|var|shared|adapters)/")
"""Absolute paths of the pages, which lie in the folder instead."""
_SERVES = re.compile(
    r"^(?:\$ )?loraplex (?:compat )?(?:serve|triton(?= --)|llgtrt)\b", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    source: str
    reason: str | None
    """Why it is not run."""
    follows_ctrl_c: bool = False
    """Whether the text between this block and the one before has Ctrl-C."""

    @property
    def starts_server(self) -> bool:
        return bool(_SERVES.search(self.source)) and "--print-config" not in self.source

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages whose blocks run."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("*.md")]
    return sorted(page for page in found if "adr" not in page.parts)


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in its order."""
    return parse(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))


def parse(name: str, text: str) -> list[Block]:
    found = []
    end = 0
    for match in _FENCE.finditer(text):
        indent, language, source = match.groups()
        reason = _REASON.search(text, 0, match.start())
        lines = [line.removeprefix(indent) for line in source.splitlines()]
        line = text.count("\n", 0, match.start()) + 1
        follows = "Ctrl-C" in text[end : match.start()]
        end = match.end()
        found.append(
            Block(name, line, language, "\n".join(lines) + "\n", reason and reason[1], follows)
        )
    return found


def ends_with_ctrl_c(page: Path) -> bool:
    """Return whether the text after the last block of a page has Ctrl-C."""
    return "Ctrl-C" in page.read_text(encoding="utf-8").rpartition("```")[2]


def is_followed(page: str) -> bool:
    """Return whether the commands of a page run to the letter, servers and all."""
    return page in STARTING or page.startswith(TUTORIALS)


class Session:
    """One bash, which reads commands one after another, as in a terminal."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """folder: the session begins there, and keeps its own files in its `.session`."""
        self._files = folder / ".session"
        self._files.mkdir(exist_ok=True)
        (self._files / "input").write_text(MESSAGE, encoding="utf-8")
        self._failures = self._files / "failures"
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-euo", "pipefail"],
            cwd=folder,
            env={**environment, "DOCUMENTED_FAILURES": str(self._failures)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Return the status of a command, and what it printed. A status other than 0 ends bash.

        A request that failed in the background, where bash takes no notice, counts as 1.
        """
        script, output = self._files / "command", self._files / "output"
        script.write_text(command, encoding="utf-8")
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        limit = threading.Timer(TIMEOUT_SECONDS, self._kill)
        limit.start()
        self._bash.stdin.write(
            f". {script} <{self._files / 'input'} >{output} 2>&1; echo the command has ended\n"
        )
        self._bash.stdin.flush()
        is_running = bool(self._bash.stdout.readline())
        limit.cancel()
        status = self._failures.exists() if is_running else self._bash.wait()
        return int(status), output.read_text(encoding="utf-8")

    def close(self) -> None:
        """End bash, and what it left running."""
        self._kill()
        self._bash.communicate()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)


class Sandbox:
    """The folder in which the blocks of one page run."""

    def __init__(
        self, folder: Path, shared: RunningServer | None, folders: Mapping[str, Path] = FOLDERS
    ) -> None:
        self.folder = folder
        self._server = shared
        self._own: RunningServer | None = None
        for name, source in folders.items():
            # The base model's files are large; adapters are not read through links.
            copy = os.symlink if source == BASE_PATH else shutil.copy2
            shutil.copytree(source, folder / name, copy_function=copy)
        if folders is FOLDERS:
            write_filled_models(folder / "path/to/triton_model_repo", str(BASE_PATH))
        commands = folder / ".bin"
        commands.mkdir()
        for command, text in _COMMANDS.items():
            (commands / command).write_text(text, encoding="utf-8")
            (commands / command).chmod(0o755)
        venv = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(commands), str(venv), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "src"), str(ROOT / "tests"), os.environ["PYTHONPATH"]]
            ),
            "XDG_STATE_HOME": str(folder / ".state"),
            "XDG_CACHE_HOME": str(folder / ".cache"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }
        self._session = Session(folder, self._environment)

    def run(self, block: Block) -> None:
        """Run a block. AssertionError: a command failed, or printed something else."""
        if block.follows_ctrl_c:
            self.end_server()
        if block.starts_server and is_followed(block.page):
            self._start(block)
        elif block.language == "python":
            self._execute(f"python -c {shlex.quote(self._named(block.source))}", block)
        elif block.language in {"sh", "bash"}:
            self._execute(self._named(block.source), block)
        else:
            for command, expected in console_commands(block.source):
                printed = self._execute(self._named(command), block)
                is_shown_only = not expected or block.starts_server
                assert is_shown_only or is_printed(self._named(expected), printed), (
                    f"{block}: {command}\nprints\n{printed}\nand not\n{expected}"
                )

    @property
    def has_server(self) -> bool:
        """Whether a server of the page runs."""
        return self._own is not None

    def end_server(self) -> None:
        """Press Ctrl-C in the terminal of the page's server, if there is one."""
        if self._own is not None:
            os.killpg(self._own.process.pid, signal.SIGINT)
            assert self._own.process.wait(TIMEOUT_SECONDS) == 0
            self._own = None

    def close(self) -> None:
        self._session.close()
        if self._own is not None:
            if self._own.process.poll() is None:
                os.killpg(self._own.process.pid, signal.SIGKILL)
            self._own.process.wait()

    def _execute(self, command: str, block: Block) -> str:
        url = self._server.url if self._server else ""
        status, printed = self._session.run(f"export DOCUMENTED_URL={url}\n{command}\n")
        assert status == 0, f"{block} ended with status {status}\n{printed[-3000:]}"
        return printed

    def _start(self, block: Block) -> None:
        """Start a server in a terminal of its own, in which Ctrl-C ended the one before."""
        assert self._own is None, f"{block}: the server before still runs: write Ctrl-C"
        lines = [line.removeprefix("$ ") for line in block.source.splitlines()]
        environment = {**self._environment, "DOCUMENTED_SERVER": "started"}
        server, _ = start(
            ["bash", "-euc", self._named("\n".join(lines))],
            cwd=self.folder,
            env=environment,
            start_new_session=True,
        )
        self._own = self._server = server
        server.wait_until_printed()

    def _named(self, source: str) -> str:
        """Return the source with this machine's ports and with paths below the folder."""
        source = _ABSOLUTE.sub(rf"{self.folder}/\1/", source)
        if self._server is None:
            return source
        ports = {8000: self._server.http_port, 8001: self._server.grpc_port}
        ports |= {8002: self._server.metrics_port, 3000: self._server.http_port}
        for documented, port in ports.items():
            source = re.sub(
                rf"\b(localhost|127\.0\.0\.1):{documented}\b", f"127.0.0.1:{port}", source
            )
        return source


def console_commands(source: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with what it prints."""
    for part in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n?", part)
        assert command is not None
        yield command.group().rstrip(), part[command.end() :]


def is_printed(expected: str, printed: str) -> bool:
    """Compare the words of each line, whatever is between them, and leave out what varies."""
    pattern = ".*".join(re.escape(part) for part in _VARYING.split(_lines(expected)))
    return re.fullmatch(pattern, _lines(printed), re.DOTALL) is not None


def _lines(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


@contextlib.contextmanager
def sandbox(
    folder: Path, shared: RunningServer | None, folders: Mapping[str, Path] = FOLDERS
) -> Iterator[Sandbox]:
    """Open a sandbox whose folder has copies of these, and end what runs there."""
    opened = Sandbox(folder, shared, folders)
    try:
        yield opened
    finally:
        opened.close()


def shared_command(folder: Path) -> list[str]:
    """Return the command of the server to which pages speak that start none."""
    command = [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH)]
    command += ["--served-model-name", *SHARED_MODEL_NAMES]
    for name, path in SHARED_ADAPTERS.items():
        command += ["--adapter", f"{name}={path}"]
    return [*command, *PORT_FLAGS, "--state-dir", str(folder), "--uploads"]


_LORAPLEX = f"{shlex.quote(sys.executable)} -m"
_COMMANDS = {
    "loraplex": f"""#!/bin/bash
case "$1 $2 $3" in
    "compare "*|"adapters "*)
        set -- "$@" --url "$DOCUMENTED_URL";;
    "serve "*|"compat triton --"*|"compat llgtrt "*)
        if [ -n "${{DOCUMENTED_SERVER-}}" ]; then
            exec {_LORAPLEX} loraplex "$@" {" ".join(PORT_FLAGS)}
        fi
        exec {_LORAPLEX} support.checked_serve "$@";;
esac
exec {_LORAPLEX} loraplex "$@"
""",
    "curl": f"""#!/bin/sh
{shutil.which("curl") or "curl"} --fail-with-body "$@" || {{
    status=$?
    echo "$@" >> "$DOCUMENTED_FAILURES"
    exit $status
}}
""",
    "python": f"""#!/bin/sh
exec {shlex.quote(sys.executable)} "$@"
""",
}
"""Commands of the blocks: servers on free ports, and failures that end a block."""
