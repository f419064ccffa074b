"""`loraplex adapters`: what a running server serves, and changing it."""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from loraplex.cli.options import SERVER_URL, AsJson, Url, errors_to_exit_code, print_json
from loraplex.cli.server_client import ServerClient, quoted
from loraplex.core.byte_sizes import readable_bytes

app = typer.Typer(
    help="List, load, unload and roll back the adapters of a running server.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="An adapter's name, an alias, or BASE:NAME.")]
Version = Annotated[int | None, typer.Option(help="Its number, as `show` lists them.")]

_NUM_DIGITS = 12


@app.command("list")
def list_adapters(url: Url = SERVER_URL, as_json: AsJson = False) -> None:
    """A line for every adapter."""
    with errors_to_exit_code():
        answer = ServerClient(url).get("/v1/adapters")
        if as_json:
            print_json(answer)
            return
        head = ("NAME", "MODEL", "TASK", "VERSION", "DIGEST", "RANK", "SIZE", "WHERE", "STATE")
        _print_table(head, [_row(adapter) for adapter in answer["data"]])


@app.command()
def show(name: Name, url: Url = SERVER_URL, as_json: AsJson = False) -> None:
    """All that is known of one adapter, with its versions."""
    with errors_to_exit_code():
        adapter = ServerClient(url).get(f"/v1/adapters/{quoted(name)}")
        if as_json:
            print_json(adapter)
            return
        _print_adapter(adapter)
        print()
        head = ("VERSION", "DIGEST", "PINNED", "ORIGIN", "SOURCE")
        _print_table(head, [_version_row(version) for version in adapter["versions"]])


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="What it will be called.")],
    path: Annotated[
        str,
        typer.Argument(help="A folder or file on the server's machine, or hf://, https://, s3://."),
    ],
    model: Annotated[str | None, typer.Option(help="The base model [the first].")] = None,
    task_id: Annotated[int | None, typer.Option(help="Its LoRA task id.")] = None,
    replace: Annotated[bool, typer.Option(help="Take the name's place if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check and report; load nothing.")] = False,
    canary: Annotated[bool, typer.Option(help="Compare a forward with the base's first.")] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Load an adapter; a report of what it is."""
    body = {
        "name": name,
        "path": os.path.abspath(path) if os.path.exists(path) else path,
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
            print("unchanged: the name has these very bytes already")
        _print_adapter(report)


@app.command()
def unload(
    name: Name,
    immediate: Annotated[
        bool, typer.Option(help="End its requests now; otherwise they end normally.")
    ] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Forget an adapter with its versions; by the name of an alias only the alias."""
    mode = "immediate" if immediate else "drain"
    with errors_to_exit_code():
        answer = ServerClient(url).delete(f"/v1/adapters/{quoted(name)}?mode={mode}")
        ended = f"; {answer['num_ended']} requests were ended" if answer["num_ended"] else ""
        _say(answer, f"{answer['object']} {answer['name']} is unloaded{ended}", as_json)


@app.command()
def rollback(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Give a name its older bytes again: a version's, or those before the present."""
    with errors_to_exit_code():
        answer = ServerClient(url).post(
            f"/v1/adapters/{quoted(name)}/rollback", {"version": version}
        )
        digest = answer["digest"][:_NUM_DIGITS]
        text = f"{answer['name']} is {digest} now, as version {answer['version']}"
        _say(answer, text, as_json)


@app.command()
def pin(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Keep a version however old it grows; the present one (without --version) on the device."""
    _set_pinned(url, name, version, True, as_json)


@app.command()
def unpin(
    name: Name, version: Version = None, url: Url = SERVER_URL, as_json: AsJson = False
) -> None:
    """Undo a pin."""
    _set_pinned(url, name, version, False, as_json)


@app.command()
def alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Another name for it; `unload` takes it away.")],
    replace: Annotated[bool, typer.Option(help="Turn over another adapter's alias.")] = False,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Another name, which follows the adapter's present version."""
    with errors_to_exit_code():
        body = {"alias": alias, "replace": replace}
        answer = ServerClient(url).post(f"/v1/adapters/{quoted(name)}/alias", body)
        _say(answer, f"{alias} means {answer['name']} now", as_json)


def _set_pinned(url: str, name: str, version: int | None, pinned: bool, as_json: bool) -> None:
    with errors_to_exit_code():
        body = {"version": version, "pinned": pinned}
        answer = ServerClient(url).post(f"/v1/adapters/{quoted(name)}/pin", body)
        done = "pinned" if answer["pinned"] else "not pinned"
        _say(answer, f"version {answer['version']} of {name} is {done}", as_json)


def _say(answer: Any, text: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
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
    """A load's report, or a whole adapter: each with what it has."""
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


def _canary(report: dict[str, Any] | None) -> str | None:
    if report is None:
        return None
    return (
        f"log probabilities differ by up to {report['largest_difference']:.4f}, "
        f"by {report['mean_difference']:.4f} in the mean of {report['num_compared']}"
    )


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is free."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
