"""Version of a registered adapter, and the rules for names and task ids.

These are plain values, independent of the index and the database that hold them.
"""

import dataclasses
import enum
import functools
import unicodedata

from loraplex.adapters.base_check import Remarks, divided
from loraplex.adapters.sources.reference import shown_source
from loraplex.adapters.staged import StagedAdapter
from loraplex.core.adapter import MAX_TASK_ID, AdapterSource
from loraplex.core.errors import InvalidParameterError

MAX_NAME_LENGTH = 256
_DIRECTIONS = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
"""Unicode's bidirectional controls: with them a name can look like another one."""
_DIRECTION_MARKS = "\u200e\u200f\u061c"

Owner = tuple[str, str]
"""(model, tenant)"""


class VersionOrigin(enum.StrEnum):
    """Origin of a version's latest registration."""

    API = "api"
    CONFIGURED = "configured"
    """A flag or a configuration file: valid as long as the setting exists."""
    DECLARED = "declared"
    """A declaration that servers share: valid as long as it exists, and numbered by it."""


@dataclasses.dataclass(frozen=True)
class AdapterVersion:
    """Meaning of a name when it was resolved; a request keeps it to its end."""

    model: str
    tenant: str
    name: str
    task_id: int | None
    """Task id of the name: it follows the present version."""
    number: int
    """Version number: 1 at first, one more with each replacement or rollback."""
    staged: StagedAdapter
    path: str
    """Source. It may contain a signature: show people only `shown_path`."""
    created: int
    """Unix seconds."""
    origin: VersionOrigin = VersionOrigin.API
    restored: int | None = None
    """Number of the older version that a rollback restored as this one."""
    is_pinned: bool = False
    """Whether it stays in the history, and its file on the disk, at any age."""

    @property
    def owner(self) -> Owner:
        return self.model, self.tenant

    @functools.cached_property
    def source(self) -> AdapterSource:
        return self.staged.source

    @functools.cached_property
    def digest(self) -> str:
        return self.staged.source.digest

    @functools.cached_property
    def label(self) -> tuple[str, str]:
        """What its requests are found by in their engine, whatever their version."""
        return self.tenant, self.name

    @property
    def shown_path(self) -> str:
        return shown_source(self.path)

    @functools.cached_property
    def remarks(self) -> Remarks:
        return divided(self.staged.warnings)

    @functools.cached_property
    def rank(self) -> int:
        """Largest of its ranks; 0 without LoRA. Cached: listings have thousands of adapters."""
        return max((target.lora_rank or 0 for target in self.source.targets), default=0)


def check_name(name: str) -> None:
    """Raise InvalidParameterError for a bad name. It is free text and never becomes a path."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameterError(
            f"an adapter's name must have 1 to {MAX_NAME_LENGTH} characters, got {len(name)}",
            param="name",
        )
    bad = next((c for c in name if _is_hidden_control(c)), None)
    if bad is not None:
        raise InvalidParameterError(
            f"an adapter's name must not hold the control character U+{ord(bad):04X}", param="name"
        )
    if not {".", ".."}.isdisjoint(name.split("/")):
        raise InvalidParameterError(
            f"{name!r} cannot be the name of an adapter: clients and proxies remove . and .. from "
            "the path of a URL",
            param="name",
        )


def _is_hidden_control(character: str) -> bool:
    """Whether a character is a control, or changes the direction in which others are shown."""
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return True
    return character in _DIRECTION_MARKS or unicodedata.bidirectional(character) in _DIRECTIONS


def check_task_id(task_id: int | None) -> None:
    """Raise InvalidParameterError for a task id that is no uint64."""
    if task_id is not None and not 0 <= task_id <= MAX_TASK_ID:
        raise InvalidParameterError(
            f"a LoRA task id must be in [0, {MAX_TASK_ID}], got {task_id}", param="task_id"
        )
