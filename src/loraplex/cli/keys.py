"""`loraplex keys`: manages the API keys of tenants in the file that a server reads.

A key is shown once, when it is made; the file contains its hash. A running server applies a change
within a second.
"""

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.command_table import CommandGroup
from loraplex.cli.options import errors_to_exit_code, print_table
from loraplex.core.errors import ConfigError
from loraplex.serving.access.key_file import KeyFile, read_key_file
from loraplex.serving.access.key_file_changes import create_key, revoke_key

app = CommandGroup(help="Create, list and revoke the API keys of tenants.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option(
        "--file", help="File of keys: the server's api_keys_file.", envvar="LORAPLEX_API_KEYS_FILE"
    ),
]


@app.command("create")
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Tenant of the key; a new name is a new tenant.")],
    operator: Annotated[
        bool, typer.Option("--operator", help="Make a new tenant an operator of the server.")
    ] = False,
    manage: Annotated[
        bool,
        typer.Option("--manage", help="Let a new tenant load, replace and unload its adapters."),
    ] = False,
) -> None:
    """Create a key, print it on standard output, and store its hash."""
    with errors_to_exit_code():
        now = datetime.datetime.now(datetime.UTC)
        key_id, key, is_new = create_key(file, tenant, now, is_operator=operator, may_manage=manage)
        report = f"key {key_id} of tenant {tenant!r} is in {file}; it is shown only now:"
        if is_new:
            report = f"{tenant!r} is a new tenant: its rights and limits are in {file}\n{report}"
        typer.echo(report, err=True)
        print(key)


@app.command("list")
def list_keys(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the keys' ids, tenants and times; the keys themselves cannot be shown again."""
    with errors_to_exit_code():
        known = read_key_file(file)
        rows = _rows(known)
        if as_json:
            print(json.dumps(rows, indent=2))
            return
        print_table(
            ("ID", "STATE", "CREATED", "TENANT"),
            [
                (
                    str(row["id"]),
                    "revoked" if row["revoked"] else "valid",
                    str(row["created"] or "-"),
                    str(row["tenant"]),
                )
                for row in rows
            ],
        )


@app.command("revoke")
def revoke(
    file: File,
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key, as in the output of `list`.")
    ],
) -> None:
    """Revoke a key for ever."""
    with errors_to_exit_code():
        if not file.exists():
            raise ConfigError(f"there is no file {file}")
        revoke_key(file, key_id)
        print(f"key {key_id} is revoked")


def _rows(known: KeyFile) -> list[dict[str, str | bool | None]]:
    return [
        {
            "id": key.id,
            "tenant": key.tenant,
            "created": None if key.created is None else key.created.isoformat(),
            "revoked": key.id in known.revoked,
        }
        for key in known.keys
    ]
