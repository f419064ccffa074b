"""`loraplex keys`: API keys of tenants, in the file that a server reads.

A key is shown once, when it is made; the file holds its hash. A running server takes a change
within a second.
"""

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.core.errors import ConfigError
from loraplex.serving.access.key_file import KeyFile, read_key_file
from loraplex.serving.access.key_file_changes import create_key, revoke_key

app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option("--file", help="The server's api_keys_file.", envvar="LORAPLEX_API_KEYS_FILE"),
]


@app.command("create")
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Whose key it is; a new name is a new tenant.")],
    operator: Annotated[
        bool, typer.Option("--operator", help="A new tenant is an operator of the server.")
    ] = False,
) -> None:
    """Make a key, print it on standard output, and keep its hash."""
    with errors_to_exit_code():
        now = datetime.datetime.now(datetime.UTC)
        key_id, key, is_new = create_key(file, tenant, now, is_operator=operator)
        told = f"key {key_id} of tenant {tenant!r} is in {file}; it is shown only now:"
        if is_new:
            told = f"{tenant!r} is a new tenant: its rights and limits are in {file}\n{told}"
        typer.echo(told, err=True)
        print(key)


@app.command("list")
def list_keys(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show ids, tenants and times; no key can be shown again."""
    with errors_to_exit_code():
        known = read_key_file(file)
        rows = _rows(known)
        if as_json:
            print(json.dumps(rows, indent=2))
            return
        for row in rows:
            state = "revoked" if row["revoked"] else "valid"
            print(f"{row['id']}  {state:7}  {row['created'] or '-':25}  {row['tenant']}")


@app.command("revoke")
def revoke(
    file: File,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `loraplex keys list` shows it.")],
) -> None:
    """Take a key out of use, for good."""
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
