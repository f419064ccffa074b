"""One version of a registered adapter, and what names and task ids may look like.

Plain values: it knows neither the index nor the database that hold them.
"""

import dataclasses
import enum
import functools
import unicodedata

from loraplex.adapters.sources.reference import shown_source
from loraplex.adapters.staged import StagedAdapter
from loraplex.core.adapter import MAX_TASK_ID, AdapterSource
from loraplex.core.errors import InvalidParameterError

MAX_NAME_LENGTH = 256

Owner = tuple[str, str]
"""(model, tenant)"""


class VersionOrigin(enum.StrEnum):
    """Who registered a version last."""

    API = "api"
    CONFIGURED = "configured"
    """A flag or a configuration file: it holds as long as the setting stands."""


@dataclasses.dataclass(frozen=True)
class AdapterVersion:
    """What a name meant when it was resolved; a request keeps it to its end."""

    model: str
    tenant: str
    name: str
    task_id: int | None
    """Of the name: it follows the present version."""
    number: int
    """1 for the first version of a name; grows with every replacement and rollback."""
    staged: StagedAdapter
    path: str
    """Where it was staged from. It may hold a signature: only `shown_path` is for people."""
    created: int
    """Unix seconds."""
    origin: VersionOrigin = VersionOrigin.API
    restored: int | None = None
    """The older version that a rollback brought back as this one."""
    is_pinned: bool = False
    """Kept in the history, and its file with it, however old it grows."""

    @property
    def owner(self) -> Owner:
        return self.model, self.tenant

    @property
    def source(self) -> AdapterSource:
        return self.staged.source

    @property
    def digest(self) -> str:
        return self.staged.source.digest

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.staged.warnings

    @property
    def shown_path(self) -> str:
        return shown_source(self.path)

    @functools.cached_property
    def rank(self) -> int:
        """The largest of its ranks; 0 without LoRA. A listing of thousands must not look again."""
        return max((largest for _, largest in self.source.ranks.values()), default=0)


def check_name(name: str) -> None:
    """Raises InvalidParameterError. A name is free text and never becomes a path."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameterError(
            f"an adapter's name must have 1 to {MAX_NAME_LENGTH} characters, got {len(name)}",
            param="name",
        )
    bad = next((c for c in name if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise InvalidParameterError(
            f"an adapter's name must not hold the control character U+{ord(bad):04X}", param="name"
        )


def check_task_id(task_id: int | None) -> None:
    """Raises InvalidParameterError: a task id is a uint64."""
    if task_id is not None and not 0 <= task_id <= MAX_TASK_ID:
        raise InvalidParameterError(
            f"a LoRA task id must be in [0, {MAX_TASK_ID}], got {task_id}", param="task_id"
        )
