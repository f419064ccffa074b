"""Run `uv pip ARGS...` with the indexes, folders of wheels and certificates that pip would use.

uv does not read pip's configuration: without this it would ignore a user's mirror, or a CPU build
of torch in a local folder. Variables of uv that the user sets win.

On Linux, torch from the usual index is a CUDA build of several GB. A machine without an NVIDIA card
gets the CPU build from PyTorch's index, where that can be reached.
"""

import ast
import glob
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Name of a setting of pip: the variable that means the same to uv, and what separates its values.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
# Versions that only some places have would make a lock file that no one else can install.
_LOCAL = {"UV_INDEX", "UV_FIND_LINKS"}


def pip_settings(listed: str) -> dict[str, str]:
    """Return the settings that `pip config list` prints; the environment overrides files."""
    sections: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = ast.literal_eval(value)
    order = ("global", "install", ":env:")
    return {name: value for section in order for name, value in sections.get(section, {}).items()}


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings as variables of uv."""
    return {
        # pip takes the newest version of all indexes, uv by default only looks into the first one.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        **{
            variable: separator.join(settings[name].split())
            for name, (variable, separator) in _VARIABLES.items()
            if name in settings
        },
    }


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_INDEX_FLAGS = (
    "--index",
    "--default-index",
    "--extra-index-url",
    "--find-links",
    "--torch-backend",
)
_TIMEOUT_SECONDS = 5


def is_reachable(index: str) -> bool:
    """Return whether an index lists torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=_TIMEOUT_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def chooses_build(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a user, or an earlier installation, has chosen the build of torch."""
    if "UV_TORCH_BACKEND" in environment or any(a.startswith(_INDEX_FLAGS) for a in arguments):
        return True
    if "--python" in arguments:
        python = Path(arguments[arguments.index("--python") + 1])
        if [*python.absolute().parents[1].glob("lib/python*/site-packages/torch")]:
            return True
    folders = environment.get("UV_FIND_LINKS", "").split(",")
    return any(glob.glob(f"{folder}/torch-*+cpu-*.whl") for folder in folders if folder)


def torch_backend(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    has_card: bool,
    is_reachable: Callable[[str], bool] = is_reachable,
) -> tuple[dict[str, str], str]:
    """Return variables of uv that choose the build of torch, and a line for the user, or none.

    Without PyTorch's index, pip's configuration decides, as it does on a machine with a card.
    """
    if arguments[0] != "install" or has_card or chooses_build(arguments, environment):
        return {}, ""
    if is_reachable(CPU_INDEX):
        line = f"No NVIDIA card: taking the CPU build of torch from {CPU_INDEX}"
        return {"UV_TORCH_BACKEND": "cpu"}, f"{line} (UV_TORCH_BACKEND=cu130 takes another)"
    line = f"No NVIDIA card, but {CPU_INDEX} does not respond: torch comes from pip's index"
    return {}, f"{line}, perhaps as a CUDA build of several GB"


def main(arguments: list[str]) -> int:
    """Run uv, and return its exit status."""
    listing = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    variables = uv_environment(pip_settings(listed))
    if arguments[0] == "compile":
        variables = {name: value for name, value in variables.items() if name not in _LOCAL}
    uv = Path(sys.executable).with_name("uv")
    environment = {**variables, **os.environ}
    if sys.platform == "linux":
        backend, line = torch_backend(arguments, environment, _NVIDIA_DRIVER.exists())
        environment |= backend
        if line:
            print(line, file=sys.stderr)
    return subprocess.run([uv, "pip", *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
