"""Decoding of token ids: the bytes of one token, and the text of several.

Whole and incremental decoding are the same code (`TextStream`), so they cannot differ. The rules
are those of the `decoder` section of a tokenizer.json; this module knows nothing of encoding,
files or requests.

A decoder of the `tokenizers` library is a list of steps over token strings. The ones that language
models use act on a token by itself, or only on the start of the text, so a token becomes a fixed
piece of bytes and text is the pieces' sum, read as UTF-8. An exception is a run of byte tokens
(`<0xE4>`): if it is not valid UTF-8 as a whole, each of its bytes becomes U+FFFD, those of whole
characters too. So a run is held back until it ends. A run of more than MAX_RUN_BYTES is read in
parts of that length, lest a language without tokens of its own is not streamed at all.
"""

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loraplex.core.errors import UnsupportedModelError

PieceStep = Callable[[str, bool], str]
"""(token, whether it is the text's first token) -> token."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_RUN_BYTES = 64
"""Byte tokens that are held back at most."""

_WORDPIECE_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)

# What transformers does to the whole text when clean_up_tokenization_spaces is set.
_TEXT_CLEAN_UP = tuple(pair for pair in _WORDPIECE_CLEAN_UP if pair[0] != " do not")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: bytes that print stand for themselves,
    the others, in order, for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    """A token with a character that stands for no byte is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


@dataclasses.dataclass(frozen=True)
class TokenDecoding:
    """The decoder of a tokenizer."""

    steps: tuple[PieceStep, ...] = ()
    to_bytes: Callable[[str], bytes] = str.encode
    has_byte_tokens: bool = False
    """Invalid UTF-8 becomes one U+FFFD per byte of a run of byte tokens; else one per maximal part
    of a character."""
    strip: tuple[str, int] = ("", 0)
    """(character, how many of it at most) taken from the start of the text."""

    def piece(self, token: str, *, is_first: bool) -> bytes:
        for step in self.steps:
            token = step(token, is_first)
        return self.to_bytes(token)

    def is_byte(self, token: str) -> bool:
        """Whether the token is one byte, which need not be a character."""
        return self.has_byte_tokens and _BYTE_TOKEN.fullmatch(token) is not None


def parse_decoder(section: Mapping[str, Any] | None) -> TokenDecoding:
    """Read the `decoder` section of a tokenizer.json.

    Raises UnsupportedModelError for a decoder whose output at one token depends on later ones.
    """
    if section is None:
        return TokenDecoding(steps=(_join_words,))
    decoding = TokenDecoding()
    is_fused = False
    for part in _flatten(section):
        kind = part.get("type")
        # Strip is for the start of the whole text, every other step for single tokens.
        if kind != "Fuse" and is_fused != (kind == "Strip"):
            raise _not_served(part)
        decoding = _with_part(decoding, part)
        is_fused = is_fused or kind in ("Fuse", "ByteLevel")
    return decoding


def _flatten(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if section.get("type") != "Sequence":
        return [section]
    return [part for child in section["decoders"] for part in _flatten(child)]


def _with_part(decoding: TokenDecoding, part: Mapping[str, Any]) -> TokenDecoding:
    match part:
        case {"type": "ByteLevel"}:
            return dataclasses.replace(decoding, to_bytes=_byte_level_bytes)
        case {"type": "ByteFallback"}:
            return dataclasses.replace(
                decoding, to_bytes=_byte_fallback_bytes, has_byte_tokens=True
            )
        case {"type": "Fuse"}:
            return decoding
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return dataclasses.replace(decoding, strip=(char, start))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            step = _replace(old, new)
        case {"type": "Metaspace", "replacement": str(char)}:
            step = _metaspace(char, drops_in_first=part.get("prepend_scheme") != "never")
        case {"type": "WordPiece", "prefix": str(prefix)}:
            step = _word_piece(prefix, cleans_up=bool(part.get("cleanup", True)))
        case _:
            raise _not_served(part)
    return dataclasses.replace(decoding, steps=(*decoding.steps, step))


def _not_served(part: Mapping[str, Any]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the tokenizer's decoder {part.get('type')!r} ({dict(part)}) is not served where it is; "
        "supported: ByteLevel, ByteFallback, Metaspace, Replace of a string and WordPiece, then "
        "Fuse, then Strip at the start, and Sequences of them"
    )


def _join_words(token: str, is_first: bool) -> str:
    return token if is_first else " " + token


def _replace(old: str, new: str) -> PieceStep:
    return lambda token, _is_first: token.replace(old, new)


def _metaspace(char: str, *, drops_in_first: bool) -> PieceStep:
    return lambda token, is_first: token.replace(char, "" if is_first and drops_in_first else " ")


def _word_piece(prefix: str, *, cleans_up: bool) -> PieceStep:
    def step(token: str, is_first: bool) -> str:
        if not is_first:
            token = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for old, new in _WORDPIECE_CLEAN_UP if cleans_up else ():
            token = token.replace(old, new)
        return token

    return step


class Vocabulary:
    """What every token id stands for. Immutable, so threads may share it."""

    def __init__(
        self,
        tokens: Mapping[int, str],
        special_ids: Iterable[int],
        decoding: TokenDecoding,
        *,
        cleans_up_spaces: bool = False,
    ) -> None:
        """`tokens` may have holes: an id without a token stands for nothing."""
        self.decoding = decoding
        self.special_ids = frozenset(special_ids)
        self.cleans_up_spaces = cleans_up_spaces
        self._tokens = [tokens.get(token_id) for token_id in range(max(tokens, default=-1) + 1)]
        self._pieces = [
            b"" if token is None else decoding.piece(token, is_first=False)
            for token in self._tokens
        ]

        self.byte_ids = frozenset(
            token_id for token_id, token in tokens.items() if decoding.is_byte(token)
        )

    def __len__(self) -> int:
        """One more than the largest id."""
        return len(self._tokens)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token that is not the text's first; empty for an id without a token."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def first_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        return b"" if token is None else self.decoding.piece(token, is_first=True)


class TextStream:
    """Text from tokens, as they come. However they are split, the pieces add up to one text.

    Only what later tokens cannot change is given: an incomplete UTF-8 character waits, and so does
    a run of byte tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        shown_ids: Iterable[int] = (),
    ) -> None:
        """shown_ids: special tokens that are not skipped."""
        decoding = vocabulary.decoding
        self._vocabulary = vocabulary
        skipped_ids = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._skipped_ids = skipped_ids.difference(shown_ids)
        self._is_first = True
        self._strip_char, self._num_to_strip = decoding.strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        """Byte tokens of the present run that are held back."""
        clean_up = _TEXT_CLEAN_UP if vocabulary.cleans_up_spaces else ()
        self._replacers = [StreamReplacer(old, new) for old, new in clean_up]

    def push(self, token_ids: Sequence[int]) -> str:
        text = "".join(map(self._text, token_ids))
        if self._num_to_strip or self._replacers:
            return self._finished_text(text, final=False)
        return text

    def finish(self) -> str:
        """What was still held back. The stream is over."""
        return self._finished_text(self._end_run() + self._utf8.decode(b"", True), final=True)

    def settle(self) -> None:
        """Let the whole characters of a run that is held back belong to the text so far."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(bytes(self._run))
        self._run = bytearray(utf8.getstate()[0])

    def _text(self, token_id: int) -> str:
        """Return what is certain now that this token has come."""
        vocabulary = self._vocabulary
        if token_id in self._skipped_ids:
            return ""
        piece = vocabulary.piece(token_id)
        is_inside = not (self._is_first or self._run or self._utf8.buffer)
        if piece and is_inside and piece.isascii() and token_id not in vocabulary.byte_ids:
            return piece.decode("ascii")  # most tokens: the decoder below takes longer
        if vocabulary.token(token_id) is None:
            return ""
        is_first, self._is_first = self._is_first, False
        if is_first:
            piece = vocabulary.first_piece(token_id)
        if token_id not in vocabulary.byte_ids:
            return self._end_run() + self._utf8.decode(piece)
        self._run += piece
        return self._end_run() if len(self._run) > MAX_RUN_BYTES else ""

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError as error:
            if len(run) > MAX_RUN_BYTES and error.reason == "unexpected end of data":
                # The character may end in the next part.
                self._run += run[error.start :]
                return run[: error.start].decode()
            return "\ufffd" * len(run)

    def _finished_text(self, text: str, *, final: bool) -> str:
        text = self._strip(text)
        for replacer in self._replacers:
            text = replacer.push(text, final=final)
        return text

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(self._strip_char):
                self._num_to_strip = 0
                break
            text = text[len(self._strip_char) :]
            self._num_to_strip -= 1
        return text


class StreamReplacer:
    """str.replace on a text that comes in pieces; holds back what may begin a match."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str, *, final: bool) -> str:
        *done, rest = (self._held + text).split(self._old)
        num_held = 0 if final else self._num_held(rest)
        self._held = rest[len(rest) - num_held :]
        return self._new.join([*done, rest[: len(rest) - num_held]])

    def _num_held(self, text: str) -> int:
        """Length of the longest end of text that begins `old`."""
        lengths = range(min(len(self._old) - 1, len(text)), 0, -1)
        return next((n for n in lengths if text.endswith(self._old[:n])), 0)
