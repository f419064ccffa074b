"""What --print-config and its like print: the configuration that is in effect, as llgtrt.json5."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loraplex.compat.llgtrt.config_file import LlgtrtConfig
from loraplex.compat.llgtrt.config_keys import LLGUIDANCE, PY, RUNTIME, Key
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.text.special_tokens import read_json_object

_MEGABYTE = 1 << 20


def shown_config(config: LlgtrtConfig, model: ModelConfig, tokenizer: Path | None) -> str:
    """Return JSON, which is valid JSON5; with the entries of the tokenizer's folder, too."""
    written = config.values
    tokens = read_json_object(tokenizer / "tokenizer_config.json") if tokenizer else {}
    if tokenizer is not None:
        tokens["chat_template"] = chat_template(model, tokenizer)
    sections = {
        "runtime": {key.name: _in_effect(key, model, written) for key in RUNTIME},
        "tokenizer": tokens | dict(written.get("tokenizer", {})),
        "llguidance": {
            "limits": msgspec.structs.asdict(model.grammar_limits),
            **_as_written("llguidance", LLGUIDANCE[1:], written),
        },
        "py": _as_written("py", PY, written) | config.shown_paths(),
    }
    if tokenizer is not None and model.chat_template is not None:
        sections["tokenizer"]["chat_template"] = tokens["chat_template"]
    return json.dumps(sections, indent=2, ensure_ascii=False)


def chat_template(model: ModelConfig, tokenizer: Path) -> str | None:
    """The text of the template that renders conversations; None if there is none."""
    if model.chat_template is not None:
        path = Path(model.chat_template)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --chat-template {path}: {error}") from error
    if "chat_template" in model.tokenizer_config:
        text: str | None = model.tokenizer_config["chat_template"]
        return text
    return find_templates(tokenizer).get("default")


def _in_effect(key: Key, model: ModelConfig, written: Mapping[str, Any]) -> Any:
    if not key.setting:
        return written.get("runtime", {}).get(key.name, key.default)
    value = getattr(model, key.setting)
    match key.name:
        case "guaranteed_no_evict":
            return value == "guaranteed_no_evict"
        case "kv_cache_host_memory_megabytes":
            return value // _MEGABYTE
    return value


def _as_written(section: str, keys: tuple[Key, ...], written: Mapping[str, Any]) -> dict[str, Any]:
    values = written.get(section, {})
    return {key.name: values.get(key.name, key.default) for key in keys}
