"""Run `uv pip ARGS...` with the indexes, folders of wheels and certificates that pip would use.

uv does not read pip's configuration: without this it would ignore a user's mirror, or a CPU build
of torch in a local folder. Variables of uv that the user sets win.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
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


def main(arguments: list[str]) -> int:
    """Run uv, and return its exit status."""
    listing = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    variables = uv_environment(pip_settings(listed))
    if arguments[0] == "compile":
        variables = {name: value for name, value in variables.items() if name not in _LOCAL}
    uv = Path(sys.executable).with_name("uv")
    environment = {**variables, **os.environ}
    return subprocess.run([uv, "pip", *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
