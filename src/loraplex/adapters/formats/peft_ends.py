"""End tokens and prompts that a PEFT folder names next to its weights.

A trainer saves the tokenizer with the adapter, and may have given it another end token than the
base has: a chat adapter of a base model ends its turns with <|im_end|>. sentence-transformers saves
the prompts of texts with the adapter.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.adapters.tensor_file import read_bounded
from loraplex.core.errors import InvalidAdapterError, LoraplexError
from loraplex.core.vector_format import PROMPTS_FILE, TextPrompts

_TOKENIZER: Final = "tokenizer_config.json"
_GENERATION: Final = "generation_config.json"
END_FILES: Final = (_TOKENIZER, _GENERATION, PROMPTS_FILE)
"""Files that change what a request with the adapter is, but not the adapter."""
_MAX_CHARACTERS: Final = 200
_MAX_IDS: Final = 64
_MAX_PROMPTS: Final = 64
_MAX_PROMPT: Final = 10_000
"""Characters."""


class EndTokens(msgspec.Struct, frozen=True):
    """Tokens that end an output in addition to the base model's."""

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


def read_end_tokens(folder: Path, max_bytes: int) -> tuple[EndTokens, list[str]]:
    """Return the end tokens of a folder, and warnings about files that cannot be read."""
    found: dict[str, Any] = {}
    warnings: list[str] = []
    for name, field in ((_TOKENIZER, "eos_token"), (_GENERATION, "eos_token_id")):
        try:
            found[field] = _values(folder / name, max_bytes).get(field)
        except LoraplexError as error:
            warnings.append(f"{name} is left out, and with it its {field}: {error.message}")
    text, ids = found.get("eos_token"), found.get("eos_token_id")
    if isinstance(text, dict):
        text = text.get("content")
    texts = [] if text is None else [text]
    numbers = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(one, str) and 0 < len(one) <= _MAX_CHARACTERS for one in texts):
        warnings.append(
            f"{_TOKENIZER}: eos_token is no text of at most {_MAX_CHARACTERS} characters"
        )
        texts = []
    if len(numbers) > _MAX_IDS or not all(type(one) is int for one in numbers):
        warnings.append(f"{_GENERATION}: eos_token_id is no list of at most {_MAX_IDS} token ids")
        numbers = []
    return EndTokens(tuple(texts), tuple(numbers)), warnings


def read_prompts(folder: Path, max_bytes: int) -> tuple[TextPrompts | None, list[str]]:
    """Return the prompts of a folder, and a warning about a file that cannot be read."""
    if not (folder / PROMPTS_FILE).exists():
        return None, []
    left_out = f"{PROMPTS_FILE} is left out, so the base model's prompts are used"
    try:
        values = _values(folder / PROMPTS_FILE, max_bytes)
    except LoraplexError as error:
        return None, [f"{left_out}: {error.message}"]
    texts, default = values.get("prompts") or {}, values.get("default_prompt_name") or ""
    is_read = (
        isinstance(texts, dict)
        and len(texts) <= _MAX_PROMPTS
        and all(isinstance(text, str) and len(text) <= _MAX_PROMPT for text in texts.values())
        and all(len(name) <= _MAX_CHARACTERS for name in texts)
    )
    if not is_read:
        return None, [
            f"{left_out}: prompts is no object of at most {_MAX_PROMPTS} texts of at most "
            f"{_MAX_PROMPT} characters"
        ]
    if default not in ("", *texts):
        return None, [f"{left_out}: default_prompt_name is none of its prompts: {default!r}"]
    return TextPrompts(texts, default), []


def _values(path: Path, max_bytes: int) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(bytes(read_bounded(path, max_bytes)), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapterError(f"not a JSON object: {error}") from error
