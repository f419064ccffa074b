"""Code blocks of the documentation, and a folder in which they run as a reader would run them.

A block in sh, bash, console or python runs, or has the reason why not in the line above it:

    <!-- not run: needs a GPU -->

Blocks of a page run from top to bottom in one folder, which has the models and adapters of the
examples under the names that the pages use (FOLDERS). A `console` block has commands after `$ `
and what they print; `...` there stands for any text. In pages of STARTING, `loraplex serve` starts
a server, to which the page's later blocks speak; elsewhere its flags and files are checked, and one
server is shared by all pages.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
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
SHOWN = frozenset({"json", "yaml", "toml", "text", "ini", "promql"})
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
        "needs an object store",
        "needs another system",
        "takes long",
    }
)
"""Why a block may stay without a run."""

STARTING = frozenset({"README.md", "docs/tutorials/first-adapter.md"})
"""Pages that start servers."""

FOLDERS: Mapping[str, Path] = {
    "MODEL": BASE_PATH,
    "PATH": CHINESE,
    "PEFT_FOLDER": CHINESE,
    "adapters/zh": CHINESE,
    "DIR/zh": CHINESE,
    "DIR/ja": JAPANESE,
    "zh": CHINESE,
    "fr": CHINESE,
    "Qwen/Qwen3-0.6B": BASE_PATH,
    "charent/self_cognition_Alice": CHINESE,
    "charent/self_cognition_Bob": JAPANESE,
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
"""What stands for the models and adapters that the pages name."""

SHARED_ADAPTERS = {"zh": CHINESE, "ja": JAPANESE, "summaries": CHINESE}
SHARED_MODEL_NAMES = ("capitals", "base")
MESSAGE = "What is the capital of France?\n"
"""What a reader types into a program that reads standard input."""
TIMEOUT_SECONDS = 300.0
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

    @property
    def starts_server(self) -> bool:
        return bool(_SERVES.search(self.source))

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
    for match in _FENCE.finditer(text):
        indent, language, source = match.groups()
        reason = _REASON.search(text, 0, match.start())
        lines = [line.removeprefix(indent) for line in source.splitlines()]
        line = text.count("\n", 0, match.start()) + 1
        found.append(
            Block(name, line, language, "\n".join(lines) + "\n", reason and reason.group(1))
        )
    return found


class Sandbox:
    """The folder in which the blocks of one page run."""

    def __init__(self, folder: Path, shared: RunningServer | None) -> None:
        self.folder = folder
        self._server = shared
        self._servers: list[RunningServer] = []
        for name, source in FOLDERS.items():
            # The base model's files are large; adapters are not read through links.
            copy = os.symlink if source == BASE_PATH else shutil.copy2
            shutil.copytree(source, folder / name, copy_function=copy)
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

    def run(self, block: Block) -> None:
        """Run a block. AssertionError: a command failed, or printed something else."""
        if block.starts_server and block.page in STARTING:
            self._start(block)
        elif block.language == "python":
            self._execute([sys.executable, "-c", self._named(block.source)], block)
        elif block.language in {"sh", "bash"}:
            self._execute(["bash", "-euo", "pipefail", "-c", self._named(block.source)], block)
        else:
            for command, expected in console_commands(block.source):
                shell = ["bash", "-euo", "pipefail", "-c", self._named(command)]
                printed = self._execute(shell, block)
                is_shown_only = not expected or block.starts_server
                assert is_shown_only or is_printed(self._named(expected), printed), (
                    f"{block}: {command}\nprints\n{printed}\nand not\n{expected}"
                )

    def close(self) -> None:
        for server in self._servers:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()

    def _execute(self, command: list[str], block: Block) -> str:
        url = self._server.url if self._server else ""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self._environment, "DOCUMENTED_URL": url},
            input=MESSAGE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (
            f"{block} ended with status {done.returncode}\n{done.stdout[-3000:]}"
        )
        return done.stdout

    def _start(self, block: Block) -> None:
        lines = [line.removeprefix("$ ") for line in block.source.splitlines()]
        source = self._named("\n".join(lines))
        environment = {**self._environment, "DOCUMENTED_SERVER": "started"}
        server, _ = start(
            ["bash", "-euc", source], cwd=self.folder, env=environment, start_new_session=True
        )
        self._servers.append(server)
        server.wait_until_printed()
        self._server = server

    def _named(self, source: str) -> str:
        """Return the source with this machine's ports and with paths below the folder."""
        source = _ABSOLUTE.sub(rf"{self.folder}/\1/", source)
        if self._server is None:
            return source
        ports = {8000: self._server.http_port, 8001: self._server.grpc_port}
        ports[8002] = self._server.metrics_port
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
def sandbox(folder: Path, shared: RunningServer | None) -> Iterator[Sandbox]:
    opened = Sandbox(folder, shared)
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
exec {shutil.which("curl") or "curl"} --fail-with-body "$@"
""",
    "python": f"""#!/bin/sh
exec {shlex.quote(sys.executable)} "$@"
""",
}
"""Commands of the blocks: servers on free ports, and failures that end a block."""
