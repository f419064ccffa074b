"""Which tokens of a model folder have a role, and which it adds to the vocabulary.

Sources, as transformers reads them: tokenizer_config.json, and where that has no
added_tokens_decoder also special_tokens_map.json and added_tokens.json, the older layout.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from loraplex.core.errors import ConfigError

NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class FolderTokens(msgspec.Struct, frozen=True):
    """`named`: role (`bos_token`, ...) to text. The others: in the order in which they get ids."""

    named: dict[str, str]
    added: tuple[AddedToken, ...]
    """Added whether or not the tokenizer has them: how they are searched in a text counts."""
    added_if_absent: tuple[AddedToken, ...] = ()


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_special_tokens(
    folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> FolderTokens:
    """`config` is the folder's tokenizer_config.json with the operator's overrides, which come
    before every other file, too. Raises ConfigError."""
    is_old_layout = "added_tokens_decoder" not in config
    roles = dict(config)
    if is_old_layout:
        roles |= read_json_object(folder / "special_tokens_map.json") | dict(overrides)
    if isinstance(own_roles := roles.get("extra_special_tokens"), dict):
        roles |= own_roles
    try:
        named = {name: text for name in _role_names(roles) if (text := _text(roles[name]))}
        extra = _extra_tokens(roles)
        numbered = _numbered_tokens(config, folder, set(named.values()), set(map(str, extra)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the special tokens in {folder / 'tokenizer_config.json'} are not understood: {error}"
        ) from error
    known = {str(token) for token in numbered}
    others = [*(_added(roles[name]) for name in named), *extra]
    absent = tuple(token for token in others if str(token) not in known)
    return FolderTokens(named, tuple(numbered), absent)


def _role_names(roles: Mapping[str, Any]) -> list[str]:
    """The usual roles first; then a model's own, such as image_token."""
    own = [
        name
        for name, value in roles.items()
        if name.endswith("_token") and name not in NAMES and isinstance(value, str | dict)
    ]
    return [name for name in NAMES if roles.get(name)] + own


def _text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _added(value: Any, *, special: bool = True) -> AddedToken:
    if isinstance(value, dict):
        flags = {key: bool(value[key]) for key in _FLAGS if key in value}
        return AddedToken(value["content"], **{"special": special, **flags})
    return AddedToken(str(value), special=special)


_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


def _extra_tokens(roles: Mapping[str, Any]) -> list[AddedToken]:
    """Special tokens without a role."""
    extra = roles.get("extra_special_tokens") or roles.get("additional_special_tokens") or []
    return [] if isinstance(extra, dict) else [_added(value) for value in extra]


def _numbered_tokens(
    config: Mapping[str, Any], folder: Path, named: set[str], extra: set[str]
) -> list[AddedToken]:
    """Tokens with an id of their own, in the order of their ids."""
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        ids = read_json_object(folder / "added_tokens.json")
        decoder = {number: text for text, number in ids.items()}
        named = named | extra
    tokens = []
    for number in sorted(decoder, key=int):
        token = _added(decoder[number], special=False)
        if str(token) in named:
            token.special = True
        tokens.append(token)
    return tokens


_SOME_TEXT = "a"


def set_frame(tokenizer: Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Let encode put these (texts of tokens) around a text. Raises ConfigError."""
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
    try:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=ids
        )
    except ValueError as error:
        # A text that begins with $ or ends with a colon and a number has a meaning in templates.
        raise ConfigError(
            f"the tokens {[*before, *after]} cannot be put around texts: {error}"
        ) from error


def override_frame(
    tokenizer: Tokenizer, overrides: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Apply an operator's entries for tokenizer_config.json to the frame.

    add_bos_token and add_eos_token put the token there or take away what is there; so does a
    bos_token or eos_token of None. `named`: role to text, the entries in it already.
    """
    sides: list[Sequence[str]] = list(_frame(tokenizer))
    is_changed = False
    for index, role in enumerate(("bos", "eos")):
        token = named.get(f"{role}_token")
        adds = overrides.get(f"add_{role}_token")
        if token is None and f"{role}_token" in overrides:
            adds = False
        if adds is not None:
            sides[index] = [token] if adds and token is not None else []
            is_changed = True
    if is_changed:
        set_frame(tokenizer, *sides)


def _frame(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The tokens before and after a text."""
    bare = tokenizer.encode(_SOME_TEXT, add_special_tokens=False).tokens
    framed = tokenizer.encode(_SOME_TEXT).tokens
    num_added = len(framed) - len(bare)
    start = next((n for n in range(num_added) if framed[n : n + len(bare)] == bare), num_added)
    return framed[:start], framed[start + len(bare) :]
