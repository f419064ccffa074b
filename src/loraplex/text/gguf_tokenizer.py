"""Builds the files of a tokenizer from the metadata of a GGUF file.

Keys and values of `tokenizer.ggml.*` are those of llama.cpp. A byte-level tokenizer names its rule
for splitting texts (`pre`); one that is not known here is refused, because a wrong rule would only
show as worse completions.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.gguf_names import END_TEXTS
from loraplex.text.sentencepiece_model import (
    BPE,
    Piece,
    PieceType,
    SentencePieceModel,
    build_tokenizer,
)
from loraplex.text.special_tokens import set_frame

_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_INSTEAD: Final = "put the model's tokenizer.json into the file's folder"
_ROLES: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name of a role in Hugging Face's files: in GGUF's."""

_LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
    """How a byte-level tokenizer splits texts."""

    pattern: str = ""
    """Pattern of the parts; empty: GPT-2's."""
    has_single_digits: bool = False
    """Whether each digit is a part, before the pattern."""
    normalizes: bool = False
    """Whether texts are composed (NFC) first."""
    prefers_whole: bool = False
    """Whether a part that is a token needs no merges."""


_QWEN_2: Final = _Rule(_LLAMA_3.replace("{1,3}", ""), normalizes=True)
_QWEN_35: Final = _Rule(
    # Marks go with letters.
    _QWEN_2.pattern.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
        r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
    ),
    normalizes=True,
)
_RULES: Final[Mapping[str, _Rule]] = {
    "gpt-2": _Rule(),
    "llama-bpe": _Rule(_LLAMA_3, prefers_whole=True),
    "llama3": _Rule(_LLAMA_3, prefers_whole=True),
    "qwen2": _QWEN_2,
    "qwen35": _QWEN_35,
    "deepseek-r1-qwen": _QWEN_2,
    "smollm": _Rule(has_single_digits=True),
    "dbrx": _Rule(_LLAMA_3),
    "lfm2": _Rule(_LLAMA_3),
    "smaug-bpe": _Rule(_LLAMA_3),
}


class TokenizerFiles(NamedTuple):
    tokenizer: str
    """Content of tokenizer.json."""
    config: dict[str, Any]
    """Content of tokenizer_config.json."""


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> TokenizerFiles:
    """source: name of the file, for errors. Raises ConfigError, UnsupportedModelError."""
    tokens = _Tokens(metadata, source)
    kind = metadata.get(f"{_PREFIX}model")
    if kind == "llama":
        tokenizer, adds_bos = _sentencepiece(tokens), True
    elif kind == "gpt2":
        tokenizer, adds_bos = _byte_level(tokens), False
    else:
        state = "is missing" if kind is None else f"{str(kind)[:80]!r} is not supported"
        raise UnsupportedModelError(
            f"{source}: {_PREFIX}model {state} (supported: llama, gpt2); {_INSTEAD}"
        )
    config = gguf_tokenizer_config(metadata, source)
    bos, eos = config.get("bos_token"), config.get("eos_token")
    set_frame(
        tokenizer,
        [bos] if bos and tokens.flag("add_bos_token", adds_bos) else [],
        [eos] if eos and tokens.flag("add_eos_token", default=False) else [],
    )
    return TokenizerFiles(tokenizer.to_str(), config)


def gguf_tokenizer_config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: tokens with a role, and chat templates.

    Raises ConfigError.
    """
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if f"{_PREFIX}tokens" in metadata:
        tokens = _Tokens(metadata, source)
        config |= {f"{role}_token": text for role in _ROLES if (text := tokens.role(role))}
    if templates := _chat_templates(metadata, source):
        config["chat_template"] = templates
    return config


def _chat_templates(metadata: Mapping[str, Any], source: str) -> list[dict[str, str]]:
    """Return the default template and named ones, such as tool_use. Raises ConfigError."""
    templates = []
    for key, text in metadata.items():
        name = "default" if key == _TEMPLATE else key.removeprefix(f"{_TEMPLATE}.")
        if name == key:
            continue
        if not isinstance(text, str):
            raise ConfigError(f"{source}: {key} must be a text")
        templates.append({"name": name, "template": text})
    return templates


class _Tokens:
    """Vocabulary in the metadata."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source
        self.texts: Sequence[str] = self.texts_of("tokens")

    @functools.cached_property
    def kinds(self) -> list[PieceType]:
        """Type of each token; what ends an output is a control token. Raises ConfigError."""
        stored = self._metadata.get(f"{_PREFIX}token_type")
        kinds = [PieceType.NORMAL] * len(self.texts) if stored is None else self._kinds(stored)
        return [
            PieceType.CONTROL if text in END_TEXTS else kind
            for text, kind in zip(self.texts, kinds, strict=True)
        ]

    def texts_of(self, name: str) -> list[str]:
        """Return a list of texts. Raises ConfigError."""
        values = self._metadata.get(_PREFIX + name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self.source}: {_PREFIX}{name} must be a list of texts")
        return values

    def scores(self) -> list[float]:
        """Return a number for each token. Raises ConfigError."""
        values = self._metadata.get(f"{_PREFIX}scores")
        if (
            not isinstance(values, list)
            or len(values) != len(self.texts)
            or not all(isinstance(value, int | float) for value in values)
        ):
            raise ConfigError(f"{self.source}: {_PREFIX}scores must have a number for each token")
        return [float(value) for value in values]

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + name, default)
        return value if isinstance(value, bool) else default

    def pre(self) -> str | None:
        """Return the name of the rule for splitting texts; None: the file names none."""
        name = self._metadata.get(f"{_PREFIX}pre")
        return None if name in (None, "", "default") else str(name)[:80]

    def role_id(self, role: str) -> int | None:
        """Return the id of a role's token. Raises ConfigError for one that is out of range."""
        name = f"{_PREFIX}{_ROLES[role]}_token_id"
        value = self._metadata.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.texts):
            raise ConfigError(
                f"{self.source}: {name} {str(value)[:80]} is no id of {len(self.texts)} tokens"
            )
        return value

    def role(self, role: str) -> str | None:
        token_id = self.role_id(role)
        return None if token_id is None else self.texts[token_id]

    def _kinds(self, stored: object) -> list[PieceType]:
        kinds = [kind.value for kind in PieceType]
        if (
            not isinstance(stored, list)
            or len(stored) != len(self.texts)
            or not all(kind in kinds for kind in stored)
        ):
            raise ConfigError(
                f"{self.source}: {_PREFIX}token_type must have one of {kinds} for each token"
            )
        return [PieceType(kind) for kind in stored]


def _sentencepiece(tokens: _Tokens) -> Tokenizer:
    pieces = zip(tokens.texts, tokens.scores(), tokens.kinds, strict=True)
    model = SentencePieceModel(
        pieces=tuple(Piece(text, score, kind) for text, score, kind in pieces),
        model_type=BPE,
        byte_fallback=PieceType.BYTE in tokens.kinds,
        unk_id=tokens.role_id("unk") or 0,
        adds_dummy_prefix=tokens.flag("add_space_prefix", default=True),
        removes_extra_spaces=tokens.flag("remove_extra_whitespaces", default=False),
    )
    return build_tokenizer(model, {})


def _byte_level(tokens: _Tokens) -> Tokenizer:
    pre = tokens.pre()
    if pre is None:
        raise UnsupportedModelError(
            f"{tokens.source}: {_PREFIX}pre, the rule by which texts are split, is missing or "
            "'default', as in files that were converted before May 2024. llama.cpp takes a rule of "
            "its own then, which may give other tokens than the model was trained with. "
            f"{_INSTEAD.capitalize()}, or convert the model again"
        )
    if pre not in _RULES:
        raise UnsupportedModelError(
            f"{tokens.source}: {_PREFIX}pre {pre!r} is not supported (supported: "
            f"{', '.join(_RULES)}); {_INSTEAD}"
        )
    rule = _RULES[pre]
    vocabulary = {text: token_id for token_id, text in enumerate(tokens.texts)}
    if len(vocabulary) != len(tokens.texts):
        raise ConfigError(f"{tokens.source}: {_PREFIX}tokens has a text twice")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(tokens), ignore_merges=rule.prefers_whole)
    )
    if rule.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitting(rule)
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens.texts, tokens.kinds, strict=True):
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED):
            is_special = kind is PieceType.CONTROL
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special)])
    return tokenizer


def _merges(tokens: _Tokens) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    known = set(tokens.texts)
    for merge in tokens.texts_of("merges"):
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise ConfigError(f"{tokens.source}: {_PREFIX}merges has {merge[:80]!r}, not of tokens")
        merges.append((left, right))
    return merges


def _splitting(rule: _Rule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.pattern)
    return pre_tokenizers.Sequence([*steps, last]) if steps else last
