"""What a call is, and how the files with calls write them down."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from support.both_tritons.answers import GRPC, HTTP, Answer
from support.both_tritons.servers import Address, Repository

WIRES: Mapping[str, ModuleType] = {"http": HTTP, "grpc": GRPC}


@dataclasses.dataclass(frozen=True)
class Call:
    """Something that a client does; it leaves a server as it was."""

    name: str
    repository: Repository
    ask: Callable[..., Answer]
    """Takes a server, and then `args`."""
    args: tuple[Any, ...] = ()

    def run(self, server: Address) -> Answer:
        return self.ask(server, *self.args)


def on_both_wires(
    name: str, repository: Repository, ask: Callable[..., Answer], *args: Any
) -> list[Call]:
    """Named `NAME/http` and `NAME/grpc`. ask takes a server, a wire, and then args."""
    return [
        Call(f"{name}/{wire}", repository, ask, (module, *args)) for wire, module in WIRES.items()
    ]


def by_name(*groups: Sequence[Call]) -> dict[str, Call]:
    """Raises AssertionError for a name that two calls have."""
    calls = [call for group in groups for call in group]
    named = {call.name: call for call in calls}
    assert len(named) == len(calls), "two calls have one name"
    return named
