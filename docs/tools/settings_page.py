"""docs/settings.md, made from the metadata of the settings."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.core.config import ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.core.setting import SettingField, Settings, setting_fields

_ABOUT: Final = Path(__file__).with_name("settings_about.md")
_TABLES: Final = "<!-- tables -->\n"
_SECTIONS: Final[tuple[tuple[str, type[Settings]], ...]] = (
    ("`[server]`", ServerConfig),
    ("`[models.NAME]`", ModelConfig),
)


def settings_page() -> str:
    """Return settings_about.md with a table for each group of settings in the marked place."""
    blocks = (block for title, settings in _SECTIONS for block in _section(title, settings))
    return _ABOUT.read_text(encoding="utf-8").replace(_TABLES, "\n\n".join(blocks) + "\n")


def _section(title: str, settings: type[Settings]) -> Iterator[str]:
    yield f"## {title}"
    fields = sorted(setting_fields(settings).values(), key=lambda field: field.setting.group)
    for group, members in itertools.groupby(fields, lambda field: field.setting.group):
        rows = ["| name | default | meaning |", "|---|---|---|", *map(_row, members)]
        yield f"### {group}"
        yield "\n".join(rows)


def _row(field: SettingField) -> str:
    setting = field.setting
    meaning = " ".join([setting.summary + ".", *([setting.details] if setting.details else [])])
    if setting.aliases:
        meaning += f" Also {', '.join(f'`{alias}`' for alias in setting.aliases)}."
    if setting.flag:
        meaning += f" The flag is `--{setting.flag}`."
    if setting.is_file_only and field.name != "path":
        meaning += " In the file only."
    return f"| `{field.name}` | {field.default} | {meaning.replace('|', chr(92) + '|')} |"
