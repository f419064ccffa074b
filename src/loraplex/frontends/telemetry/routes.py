"""Routes that say by which pattern a path was found: a plain route in a FastAPI app does not."""

from starlette.routing import Match, Route
from starlette.types import Scope


class ToldRoute(Route):
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self} if match is not Match.NONE else found
