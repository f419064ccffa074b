"""Text to token ids and back, for one model folder. Chat templates and sequences are elsewhere.

Encoding is done by the `tokenizers` library; what it gives is equal to what transformers gives for
the same folder. Decoding is `token_decoding`.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.text.sentencepiece_model import (
    Piece,
    PieceType,
    SentencePieceModel,
    build_tokenizer,
    read_sentencepiece_model,
)
from loraplex.text.special_tokens import (
    FolderTokens,
    override_frame,
    read_json_object,
    read_special_tokens,
    set_frame,
)
from loraplex.text.token_decoding import BYTE_OF_CHAR, TextStream, Vocabulary, parse_decoder


class PairTokens(NamedTuple):
    """Tokens of two texts that are joined."""

    token_ids: list[int]
    start: int
    """Place of the first token of the second text."""
    end: int
    """Place after its last one."""


class Tokenizer(Protocol):
    """Immutable after loading: any number of threads may call it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. A model may have more rows, never fewer."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Role to text: `bos_token`, `eos_token`, ...; what a chat template sees."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError for a text that is not Unicode (a lone surrogate)."""
        ...

    def encode_pair(self, first: str, second: str) -> PairTokens:
        """Encode two texts with the tokens that the folder puts around and between them.

        Raises as `encode`.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing."""
        ...

    def text_stream(
        self, skip_special_tokens: bool = True, shown_ids: Sequence[int] = ()
    ) -> TextStream:
        """`decode` for ids that come one after the other; shown_ids are not skipped."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token is within a text; empty for an id without a token."""
        ...

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people: half a character becomes U+FFFD."""
        ...

    def is_special(self, token_id: int) -> bool: ...


def load_tokenizer(
    path: Path | str, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """Read a model folder: its tokenizer.json, else its sentencepiece tokenizer.model, else what
    encoder-decoder models have: T5's spiece.model, nothing (ByT5), Marian's source.spm.

    overrides: entries instead of those of its tokenizer_config.json; None takes one away. What is
    put around a text is what a tokenizer.json has (add_bos_token and add_eos_token next to one do
    not count, as in transformers) and these entries change. Raises ConfigError if it has neither or
    they are broken, UnsupportedModelError if the tokenizer needs something that is not served.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no model folder {folder}")
    config = read_json_object(folder / "tokenizer_config.json") | dict(overrides)
    special_tokens = read_special_tokens(folder, config, overrides)
    if (folder / "tokenizer.json").is_file():
        return _load_json(folder / "tokenizer.json", config, special_tokens, overrides)
    if (folder / "tokenizer.model").is_file():
        absent = {name for name, value in overrides.items() if value is None}
        return _load_sentencepiece(folder / "tokenizer.model", config, special_tokens, absent)
    if (folder / "spiece.model").is_file():
        return _load_t5(folder / "spiece.model", config, special_tokens)
    if config.get("tokenizer_class") == "ByT5Tokenizer":
        return _load_bytes(config, special_tokens)
    if (folder / "source.spm").is_file():
        return _load_marian(folder, config, special_tokens)
    raise ConfigError(
        f"{folder} has no tokenizer: a tokenizer.json, a sentencepiece tokenizer.model or "
        "spiece.model, or a source.spm with vocab.json is needed; to write a tokenizer.json, load "
        "the tokenizer with transformers' AutoTokenizer and save it"
    )


def _load_json(
    path: Path,
    config: Mapping[str, Any],
    special_tokens: FolderTokens,
    overrides: Mapping[str, Any],
) -> "LibraryTokenizer":
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
    decoder = json.loads(text).get("decoder")
    tokenizer = LibraryTokenizer(backend, decoder, config, special_tokens)
    override_frame(backend, overrides, special_tokens.named)
    return tokenizer


def _load_sentencepiece(
    path: Path, config: Mapping[str, Any], special_tokens: FolderTokens, absent: Collection[str]
) -> "LibraryTokenizer":
    model = read_sentencepiece_model(path)
    backend = build_tokenizer(model, config)
    decoder = json.loads(backend.to_str())["decoder"]
    special_tokens = _with_model_names(special_tokens, model, absent)
    tokenizer = LibraryTokenizer(backend, decoder, config, special_tokens)
    names = special_tokens.named
    bos = names.get("bos_token") if config.get("add_bos_token", True) else None
    eos = names.get("eos_token") if config.get("add_eos_token", False) else None
    set_frame(backend, [bos] if bos else [], [eos] if eos else [])
    return tokenizer


def _with_model_names(
    special_tokens: FolderTokens, model: SentencePieceModel, absent: Collection[str]
) -> FolderTokens:
    """Roles that the folder does not name, nor the operator denies, have the model's pieces."""
    pieces = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    own = {
        name: text
        for name, at in pieces.items()
        if name not in absent and (text := model.text_of(at)) is not None
    }
    return msgspec.structs.replace(special_tokens, named=own | special_tokens.named)


_T5_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Roles in folders of T5, ByT5 and Marian that do not name them."""
_MAX_GAPS = 1000


def _load_t5(
    path: Path, config: Mapping[str, Any], special_tokens: FolderTokens
) -> "LibraryTokenizer":
    """Read a spiece.model. The tokens of T5's gaps follow its pieces, the last one first."""
    special_tokens = _with_gaps(special_tokens, _gaps(config, 100)[::-1])
    frame = {"add_bos_token": False, "add_eos_token": True}
    return _load_sentencepiece(path, {**config, **frame}, special_tokens, {"bos_token"})


def _load_bytes(config: Mapping[str, Any], special_tokens: FolderTokens) -> "LibraryTokenizer":
    """Make ByT5's tokenizer: three special tokens, one for each byte, and those of the gaps."""
    special_tokens = _with_gaps(special_tokens, _gaps(config, 125))
    named = special_tokens.named
    special = [named[role] for role in ("pad_token", "eos_token", "unk_token")]
    tokens = [*special, *sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[])
    )
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = by_byte, decoders.ByteLevel()
    decoder = {"type": "ByteLevel"}
    tokenizer = LibraryTokenizer(backend, decoder, config, special_tokens)
    set_frame(backend, [], [named["eos_token"]])
    return tokenizer


def _gaps(config: Mapping[str, Any], default: int) -> range:
    count = config.get("extra_ids", default)
    if not isinstance(count, int) or not 0 <= count <= _MAX_GAPS:
        raise ConfigError(
            f"tokenizer_config.json: extra_ids must be a number from 0 to {_MAX_GAPS}, "
            f"got {count!r}"
        )
    return range(count)


def _with_gaps(special_tokens: FolderTokens, numbers: Iterable[int]) -> FolderTokens:
    """Return the tokens with T5's roles, and with <extra_id_N> in this order."""
    named = {**_T5_TOKENS, **special_tokens.named}
    gaps = [f"<extra_id_{number}>" for number in numbers]
    own = [token for token in special_tokens.added_if_absent if str(token) not in gaps]
    unnamed = [text for text in named.values() if text not in map(str, own)]
    made = [tokenizers.AddedToken(text, special=True) for text in (*unnamed, *gaps)]
    return msgspec.structs.replace(special_tokens, named=named, added_if_absent=(*own, *made))


def _load_marian(
    folder: Path, config: Mapping[str, Any], special_tokens: FolderTokens
) -> "MarianTokenizer":
    """Read the files of a MarianMT checkpoint, as transformers' MarianTokenizer does.

    source.spm cuts texts into pieces, whose ids are those of vocab.json; it has the other
    language's pieces, too, which no text is cut into.
    """
    path = folder / "vocab.json"
    ids = read_json_object(path)
    named = {**_T5_TOKENS, **special_tokens.named}
    unknown, eos = named["unk_token"], named["eos_token"]
    if set(map(repr, ids.values())) != set(map(repr, range(len(ids)))):
        raise ConfigError(f"{path} must number its {len(ids)} tokens from 0 on, each once")
    if missing := {unknown, eos} - set(ids):
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}")
    model = read_sentencepiece_model(folder / "source.spm")
    own = {
        piece.text: piece
        for piece in model.pieces
        if piece.type not in (PieceType.UNKNOWN, PieceType.CONTROL)
    }
    special = dict.fromkeys(named.values(), PieceType.CONTROL) | {unknown: PieceType.UNKNOWN}
    pieces = [
        Piece(token, type=special[token])
        if token in special
        else own.pop(token, Piece(f" {token}"))  # in no text: spaces have become "▁"
        for token in sorted(ids, key=ids.__getitem__)
    ]
    # The model's pieces that vocab.json lacks follow: a text may be cut into them.
    model = dataclasses.replace(model, pieces=(*pieces, *own.values()), unk_id=ids[unknown])
    backend = build_tokenizer(model, config)
    decoder = json.loads(backend.to_str())["decoder"]
    special_tokens = msgspec.structs.replace(special_tokens, named=named)
    tokenizer = MarianTokenizer(backend, decoder, config, special_tokens, ids)
    set_frame(backend, [], [eos])
    return tokenizer


_SHORT_CHARACTERS = 1024
"""A longer text is encoded as a batch of one: `tokenizers` releases the interpreter's lock in this
method only, so that other threads run meanwhile."""


class LibraryTokenizer:
    """A Tokenizer over one of the `tokenizers` library."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        special_tokens: FolderTokens,
    ) -> None:
        """Takes the backend over; `decoder` is its section of a tokenizer.json."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        backend.add_tokens(list(special_tokens.added))
        present = {str(token) for token in backend.get_added_tokens_decoder().values()}
        absent = [t for t in special_tokens.added_if_absent if str(t) not in present]
        backend.add_tokens(absent)
        self._backend = backend
        self._named = dict(special_tokens.named)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            None if (text := self._named.get(name)) is None else backend.token_to_id(text)
            for name in ("bos_token", "eos_token", "pad_token")
        )
        special_ids = {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._vocabulary = Vocabulary(
            {token_id: token for token, token_id in backend.get_vocab().items()},
            special_ids,
            parse_decoder(decoder),
            cleans_up_spaces=_cleans_up_spaces(backend, config),
        )

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._named

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_unicode(text)
        if len(text) <= _SHORT_CHARACTERS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> PairTokens:
        _check_unicode(first)
        _check_unicode(second)
        [encoding] = self._backend.encode_batch([(first, second)])
        texts = encoding.sequence_ids
        if 1 not in texts:
            return PairTokens(list(encoding.ids), len(texts), len(texts))
        return PairTokens(list(encoding.ids), texts.index(1), len(texts) - texts[::-1].index(1))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = self.text_stream(skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def text_stream(
        self, skip_special_tokens: bool = True, shown_ids: Sequence[int] = ()
    ) -> TextStream:
        return TextStream(
            self._vocabulary, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.special_ids


class MarianTokenizer(LibraryTokenizer):
    """A Tokenizer whose backend has tokens beyond the vocabulary, which are unknown ones."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        special_tokens: FolderTokens,
        ids: Mapping[str, int],
    ) -> None:
        """ids: by token; the backend has them, and may have other texts for them."""
        super().__init__(backend, decoder, config, special_tokens)
        self._ids = ids
        self._unknown = ids[special_tokens.named["unk_token"]]
        self._vocabulary = Vocabulary(
            {token_id: token for token, token_id in ids.items()},
            self._vocabulary.special_ids,
            parse_decoder(decoder),
            cleans_up_spaces=self._vocabulary.cleans_up_spaces,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, which may begin with the code of a language: >>deu<<."""
        code, end, rest = text.partition("<<")
        before: list[int] = []
        if end and code.startswith(">>"):
            before, text = [self._ids.get(code + end, self._unknown)], rest
        encoded = super().encode(text, add_special_tokens)
        size = len(self._vocabulary)
        return before + [each if each < size else self._unknown for each in encoded]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: at character {error.start} there is the lone "
            f"surrogate U+{ord(text[error.start]):04X}",
            param="prompt",
        ) from error


def _cleans_up_spaces(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether to clean up spaces; a BPE needs a second flag, as in transformers 5."""
    if not config.get("clean_up_tokenization_spaces", False):
        return False
    even_for_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(backend.model).__name__ != "BPE" or bool(config.get(even_for_bpe, False))
