"""What llgtrt calls an engine: a Hugging Face folder, or one of `loraplex compat build`."""

from pathlib import Path
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.engine_folder import PACKED_NAME, model_fields

TEMPLATE_NAME: Final = "chat_template.j2"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_GOOD: Final = "a Hugging Face folder, or one that loraplex compat build (trtllm-build) wrote"


def check_engine(engine: Path, tokenizer: Path) -> None:
    """Raise ConfigError that names what the folders lack."""
    if not engine.is_dir():
        kind = "a file" if engine.exists() else "not there"
        raise ConfigError(f"--engine {engine}: it is {kind}; give {_GOOD}")
    if not (engine / "config.json").is_file():
        only = f", only {PACKED_NAME}" if (engine / PACKED_NAME).is_file() else ""
        raise ConfigError(f"--engine {engine}: it has no config.json{only}; give {_GOOD}")
    model_fields(engine)
    if not any((tokenizer / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"{tokenizer} has no tokenizer.json: copy tokenizer.json and tokenizer_config.json "
            "of the base model into it, or name their folder with --tokenizer"
        )


def own_chat_template(engine: Path) -> Path | None:
    """Return the template of the engine folder, which replaces every other one."""
    path = engine / TEMPLATE_NAME
    return path if path.is_file() else None
