"""Routes that record which pattern matched a path; a plain Starlette route does not."""

import re
from collections.abc import Callable
from typing import Any

from starlette.routing import Match, Route
from starlette.types import Scope


class RecordedRoute(Route):
    """Route that puts itself into the scope of the requests that it matches."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **fields: Any) -> None:
        super().__init__(path, endpoint, **fields)
        # A name in a path may have any character, a line break too.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self} if match is not Match.NONE else found
