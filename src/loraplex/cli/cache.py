"""`loraplex cache`: lists and removes what loraplex keeps on the disk."""

import json
import re
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from loraplex.cli.command_table import CommandGroup
from loraplex.cli.options import errors_to_exit_code, print_table
from loraplex.cli.settings_flags import environment_layers, flag_layers, with_settings
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.counts import counted
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.app.caches import Cached

app = CommandGroup(
    help="List and remove states of models, packed weights, and models from the hub.",
    no_args_is_help=True,
)

_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60}
_PLACES: Final = ("state_dir", "weights_cache_dir")


@app.command("list")
@with_settings(*_PLACES)
def list_caches(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """List what is kept: kind, model and its path, size, last use, path."""
    from loraplex.app.caches import find_caches  # noqa: PLC0415 - numpy

    with errors_to_exit_code():
        found = find_caches(_config(settings))
        if as_json:
            print(json.dumps(msgspec.to_builtins(found), indent=2))
            return
        now = time.time()
        if found:
            head = ("KIND", "MODEL", "MODEL'S PATH", "SIZE", "USED", "PATH")
            print_table(head, [_row(one, now) for one in found])
        total = readable_bytes(sum(one.num_bytes for one in found))
        print(f"{counted(len(found), 'entry', 'entries')}, {total}")


@app.command("clean")
@with_settings(*_PLACES)
def clean(
    older_than: Annotated[
        str, typer.Option(help="Least time since the last use: 30d, 12h or 45m.")
    ] = "30d",
    model: Annotated[
        str | None, typer.Option(help="Name or hub id of the model; without it all models.")
    ] = None,
    with_state: Annotated[
        bool,
        typer.Option(
            "--with-state", help="Remove states, too: adapters that clients loaded are then lost."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    **settings: Any,
) -> None:
    """Remove packed weights and downloads that were not used for a time, and no process uses."""
    from loraplex.app.caches import find_caches, remove  # noqa: PLC0415 - numpy

    with errors_to_exit_code():
        now = time.time()
        newest = now - _seconds(older_than)
        total = 0
        for one in find_caches(_config(settings)):
            is_kept = one.is_state and not with_state
            if is_kept or one.last_use > newest or not (model is None or one.is_of(model)):
                continue
            try:
                is_removed = not one.is_used and (dry_run or remove(one))
            except OSError as error:
                raise ConfigError(f"cannot remove {error.filename}: {error.strerror}") from error
            if not is_removed:
                print(f"in use, stays:   {_line(one, now)}")
                continue
            total += one.num_bytes
            print(f"{'would remove' if dry_run else 'removed'}:   {_line(one, now)}")
        print(f"{readable_bytes(total)} {'would be freed' if dry_run else 'freed'}")


def _config(settings: dict[str, Any]) -> Config:
    """Return the places as a server would have them. Raises ConfigError."""
    model = Layer("cache", {"models": {"": {"path": ""}}})
    return resolve([model, *environment_layers([""]), *flag_layers(settings, [""])])


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+)([dhm])", text)
    if match is None:
        raise ConfigError(f"--older-than must be a time such as 30d, 12h or 45m, got {text!r}")
    return int(match[1]) * _SECONDS[match[2]]


def _line(one: "Cached", now: float) -> str:
    return "  ".join(cell for cell in _row(one, now) if cell != "-")


def _row(one: "Cached", now: float) -> tuple[str, ...]:
    days = int(max(now - one.last_use, 0) // _SECONDS["d"])
    used = f"used {days} days ago" if days else "used today"
    if one.is_used:
        used = "in use" + (f" by process {', '.join(map(str, one.used_by))}" if one.used_by else "")
    size = readable_bytes(one.num_bytes)
    return one.kind, one.model or "-", one.model_path or "-", size, used, one.path
