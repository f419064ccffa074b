"""What a tokenizer puts around every text: BOS, EOS or nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from loraplex.core.errors import ConfigError

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
