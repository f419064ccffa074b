"""`loraplex adapters`: shows and changes the adapters of a running server."""

import os
from typing import Annotated, Any

import typer

from loraplex.cli.command_table import CommandGroup
from loraplex.cli.options import (
    SERVER_URL,
    AsJson,
    Url,
    errors_to_exit_code,
    print_json,
    print_table,
)
from loraplex.cli.server_client import ServerClient, quoted
from loraplex.core.byte_sizes import readable_bytes

app = CommandGroup(
    help="List, load, unload and roll back the adapters of a running server.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="Name or alias of the adapter, or BASE:NAME.")]
Version = Annotated[int | None, typer.Option(help="Version number, as in the output of `show`.")]

_NUM_DIGITS = 12


@app.command("list")
def list_adapters(url: Url = SERVER_URL, as_json: AsJson = False) -> None:
    """List the adapters, one on each line."""
    with errors_to_exit_code():
        response = ServerClient(url).get("/v1/adapters")
        if as_json:
            print_json(response)
            return
        head = ("NAME", "MODEL", "TASK", "VERSION", "DIGEST", "RANK", "SIZE", "WHERE", "STATE")
        print_table(head, [_row(adapter) for adapter in response["data"]])


@app.command()
def show(name: Name, url: Url = SERVER_URL, as_json: AsJson = False) -> None:
    """Show one adapter with its versions."""
    with errors_to_exit_code():
        adapter = ServerClient(url).get(f"/v1/adapters/{quoted(name)}")
        if as_json:
            print_json(adapter)
            return
        _print_adapter(adapter)
        print()
        head = ("VERSION", "DIGEST", "PINNED", "ORIGIN", "SOURCE")
        print_table(head, [_version_row(version) for version in adapter["versions"]])


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name of the adapter in requests.")],
    source: Annotated[
        str,
        typer.Argument(help="Folder or file on the server's machine, or hf://, https://, s3://."),
    ],
    model: Annotated[str | None, typer.Option(help="Base model (default: the first).")] = None,
    task_id: Annotated[int | None, typer.Option(help="LoRA task id of the adapter.")] = None,
    replace: Annotated[bool, typer.Option(help="Replace an adapter of this name.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check the adapter without loading it.")] = False,
    canary: Annotated[
        bool, typer.Option(help="Refuse an adapter whose outputs are the base model's.")
    ] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Load an adapter, and print a report."""
    body = {
        "name": name,
        "source": os.path.abspath(source) if os.path.exists(source) else source,
        "model": model,
        "task_id": task_id,
        "replace": replace,
        "dry_run": dry_run,
        "canary": canary,
    }
    with errors_to_exit_code():
        report = ServerClient(url).post("/v1/adapters", body)
        if as_json:
            print_json(report)
            return
        if report["dry_run"]:
            print("nothing was loaded: a dry run")
        elif report["unchanged"]:
            print("unchanged: the name has the same bytes already")
        _print_adapter(report)


@app.command()
def unload(
    name: Name,
    immediate: Annotated[
        bool, typer.Option(help="Abort its requests; otherwise they end normally.")
    ] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Unload an adapter with its versions; with the name of an alias, remove only the alias."""
    mode = "immediate" if immediate else "drain"
    with errors_to_exit_code():
        response = ServerClient(url).delete(f"/v1/adapters/{quoted(name)}?mode={mode}")
        ended = f"; {response['num_ended']} requests were ended" if response["num_ended"] else ""
        _report(response, f"{response['object']} {response['name']} is unloaded{ended}", as_json)


@app.command()
def rollback(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Restore an older version of an adapter: by default the one before the present one."""
    with errors_to_exit_code():
        response = ServerClient(url).post(
            f"/v1/adapters/{quoted(name)}/rollback", {"version": version}
        )
        digest = response["digest"][:_NUM_DIGITS]
        text = f"{response['name']} is {digest} now, as version {response['version']}"
        _report(response, text, as_json)


@app.command()
def pin(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Pin a version, so that it is never removed; the present one also stays on the device."""
    _set_pinned(url, name, version, True, as_json)


@app.command()
def unpin(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Unpin a version."""
    _set_pinned(url, name, version, False, as_json)


@app.command()
def alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Another name of the adapter; `unload` removes it.")],
    replace: Annotated[bool, typer.Option(help="Replace an alias of another adapter.")] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Give an adapter another name, which means its present version."""
    with errors_to_exit_code():
        body = {"alias": alias, "replace": replace}
        response = ServerClient(url).post(f"/v1/adapters/{quoted(name)}/alias", body)
        _report(response, f"{alias} means {response['name']} now", as_json)


def _set_pinned(url: str, name: str, version: int | None, pinned: bool, as_json: bool) -> None:
    with errors_to_exit_code():
        body = {"version": version, "pinned": pinned}
        response = ServerClient(url).post(f"/v1/adapters/{quoted(name)}/pin", body)
        done = "pinned" if response["pinned"] else "not pinned"
        _report(response, f"version {response['version']} of {name} is {done}", as_json)


def _report(response: Any, text: str, as_json: bool) -> None:
    if as_json:
        print_json(response)
    else:
        print(text)


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    return (
        adapter["name"],
        adapter["model"],
        "-" if adapter["task_id"] is None else str(adapter["task_id"]),
        str(adapter["version"]),
        adapter["digest"][:_NUM_DIGITS],
        str(adapter["rank"]),
        readable_bytes(adapter["num_bytes"]),
        adapter["residency"],
        adapter["state"],
    )


def _version_row(version: dict[str, Any]) -> tuple[str, ...]:
    restored = version["restored"]
    again = "" if restored is None else f" (version {restored} again)"
    return (
        str(version["version"]),
        version["digest"][:_NUM_DIGITS],
        "yes" if version["pinned"] else "no",
        version["origin"],
        version["source"] + again,
    )


def _print_adapter(adapter: dict[str, Any]) -> None:
    """Print the report of a load, or an adapter, with the entries that it has."""
    content = adapter["content"]
    ranks = ", ".join(
        f"{module} {low}" if low == high else f"{module} {low} to {high}"
        for module, (low, high) in content["ranks"].items()
    )
    dtypes = ", ".join(content["dtypes"])
    lines = {
        "name": adapter["name"],
        "model": adapter["model"],
        "task id": adapter["task_id"],
        "aliases": ", ".join(adapter.get("aliases", ())),
        "version": adapter["version"],
        "digest": adapter["digest"],
        "source": adapter["source"],
        "state": adapter["state"],
        "where": adapter.get("residency"),
        "running": adapter.get("num_running"),
        "ranks": ranks,
        "layers": len(content["layers"]),
        "experts": _experts(content.get("experts", {})),
        "tensors": f"{content['num_tensors']}, {dtypes} to {content['device_dtype']}",
        "host": readable_bytes(content["host_bytes"]),
        "device": f"{readable_bytes(content['device_bytes'])}, {content['device_pages']} pages",
        "seconds": ", ".join(f"{k} {v:.3f}" for k, v in adapter.get("seconds", {}).items()),
        "canary": _canary(adapter.get("canary")),
    }
    for label, value in lines.items():
        if value not in (None, ""):
            print(f"{label:<8} {value}")
    for warning in adapter["warnings"]:
        print(f"warning: {warning}")
    for note in adapter["notes"]:
        print(f"note: {note}")


def _experts(experts: dict[str, dict[str, Any]]) -> str:
    """Return the changed experts by module: "experts.up_proj 0-127 (layers 1-47)"."""
    return ", ".join(
        f"{module} {of_layers} (layers {layers})"
        for module, use in experts.items()
        for layers, of_layers in use["layers"].items()
    )


def _canary(report: dict[str, Any] | None) -> str | None:
    if report is None:
        return None
    return (
        f"log probabilities differ by up to {report['largest_difference']:.4f}, "
        f"by {report['mean_difference']:.4f} in the mean of {report['num_compared']}"
    )
