"""What a grammar's named parts matched, read from the text that was made by it."""

from typing import Final, NamedTuple

import msgspec
from llguidance import LLInterpreter, LLParserLimits, LLTokenizer

from loraplex.core.grammar import DEFAULT_LIMITS, GrammarLimits
from loraplex.serving.grammar.check import SpecialTokens


class Capture(NamedTuple):
    name: str
    value: bytes


class CaptureReader:
    """Follows one text. Used by one thread at a time; a grammar may cost it its whole limits.

    A grammar that names special tokens has captures up to the first of them: they are no text.
    """

    def __init__(self, grammar: str, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        """grammar: in llguidance's form, one that was found valid."""
        self._matcher = LLInterpreter(
            _BYTES,
            grammar,
            enable_backtrack=False,
            enable_ff_tokens=False,
            log_level=0,
            limits=LLParserLimits(verbose_errors=False, **msgspec.structs.asdict(limits)),
        )
        self._matcher.start_without_prompt()
        self._is_over = False
        self._steps()

    def push(self, text: str) -> list[Capture]:
        """What is known by this piece of the text. Nothing, once the text leaves the grammar."""
        found: list[Capture] = []
        for byte in text.encode():
            if self._is_over:
                break
            token_id = _TOKENS.id_of_byte[byte]
            if self._matcher.validate_tokens_raw([token_id]) != 1:
                self._is_over = True
                break
            self._matcher.commit_token(token_id)
            found += self._steps()
        return found

    def _steps(self) -> list[Capture]:
        mask, captured = self._matcher.compute_mask()
        report = msgspec.json.decode(captured, type=_Report)
        self._is_over = mask is None or report.stop
        return [
            Capture(entry.name, bytes.fromhex(entry.hex))
            for entry in report.progress
            if entry.object == "capture"
        ]


class _Entry(msgspec.Struct):
    object: str
    name: str = ""
    hex: str = ""


class _Report(msgspec.Struct):
    """Captures as llguidance reports them after each step."""

    progress: list[_Entry] = []
    stop: bool = False


_TOKENS: Final = SpecialTokens({}, 0)
_BYTES: Final = LLTokenizer(_TOKENS, slices=[])  # type: ignore[arg-type]
