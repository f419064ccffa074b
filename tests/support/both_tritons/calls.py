"""What a call is, and how the files with calls write them down."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from support.both_tritons.responses import GRPC, HTTP, Response
from support.both_tritons.servers import Address, Repository

WIRES: Mapping[str, ModuleType] = {"http": HTTP, "grpc": GRPC}


@dataclasses.dataclass(frozen=True)
class Call:
    """Something that a client does; it leaves a server as it was."""

    name: str
    repository: Repository
    send: Callable[..., Response]
    """Takes a server, and then `args`."""
    args: tuple[Any, ...] = ()

    def run(self, server: Address) -> Response:
        return self.send(server, *self.args)


def on_both_wires(
    name: str, repository: Repository, send: Callable[..., Response], *args: Any
) -> list[Call]:
    """Return calls `NAME/http` and `NAME/grpc`. send takes a server, a wire, and then args."""
    return [
        Call(f"{name}/{wire}", repository, send, (module, *args)) for wire, module in WIRES.items()
    ]


def by_name(*groups: Sequence[Call]) -> dict[str, Call]:
    """Raises AssertionError for a name that two calls have."""
    calls = [call for group in groups for call in group]
    named = {call.name: call for call in calls}
    assert len(named) == len(calls), "two calls have one name"
    return named
