"""Finds the chat templates of a model folder: name to source."""

from pathlib import Path
from typing import Any

from loraplex.core.errors import ConfigError
from loraplex.text.special_tokens import read_json_object


def find_templates(folder: Path) -> dict[str, str]:
    """Empty if the folder has none. chat_template.jinja (with additional_chat_templates/NAME.jinja)
    comes before chat_template.json, and that before tokenizer_config.json, as in transformers.

    Raises ConfigError.
    """
    templates = {
        path.stem: _read(path)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        return templates | {"default": _read(folder / "chat_template.jinja")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        section = read_json_object(folder / name).get("chat_template")
        if section:
            return templates | _named_templates(section, folder / name)
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _named_templates(section: Any, path: Path) -> dict[str, str]:
    """One string, a list of {name, template}, or an object from name to template."""
    if isinstance(section, str):
        return {"default": section}
    try:
        pairs = (
            section.items()
            if isinstance(section, dict)
            else [(entry["name"], entry["template"]) for entry in section]
        )
        templates = {name: text for name, text in pairs if isinstance(text, str)}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"chat_template in {path} must be a string or a list of objects with name and template"
        ) from error
    return templates
