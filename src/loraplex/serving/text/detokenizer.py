"""The text of one sequence, as its tokens come. It does not know stop strings or requests."""

from collections.abc import Sequence

from loraplex.text.tokenizer import Tokenizer

_NUM_CONTEXT_BYTES = 64
"""Text before the output that can matter to it: the start of a character (3 bytes), and the words
that the clean-up of spaces looks at."""

_SOME_TEXT = "a"
"""Settled at once, and no reason to clean up a space after it."""


class IncrementalDetokenizer:
    """Gives the generated part of decode(prompt + output), piece by piece.

    Precisely: the pieces add up to what decode(prompt + output) has after the text that the prompt
    alone had settled. So a space between prompt and output is there, and a character that begins
    in the prompt and ends in the output is in the output. A run of byte tokens that begins in the
    prompt begins anew with the output, without the prompt's whole characters. An empty output has
    no text. Every token
    costs the same, however long the sequence is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: Sequence[int] = (),
    ) -> None:
        """shown_ids: special tokens that are not skipped."""
        self._stream = tokenizer.text_stream(skip_special_tokens, shown_ids)
        self._is_empty = True
        self._is_finished = False
        self._stream.push(_tail(tokenizer, prompt_token_ids, skip_special_tokens))
        self._stream.settle()

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The complete text that these tokens add; with `final` all that was held back, too.

        Never half a character: its first bytes wait for the others. Bytes that can no longer
        become one are given as U+FFFD.
        """
        assert not self._is_finished, "push after the final one"
        self._is_empty &= not token_ids
        text = self._stream.push(token_ids)
        if final:
            self._is_finished = True
            held_back = self._stream.finish()
            # What an empty output holds back is the prompt's.
            text += "" if self._is_empty else held_back
        return text


def continuation(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Return the text of token ids that follow some unknown text."""
    before = tokenizer.encode(_SOME_TEXT, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=skip_special_tokens)
    return detokenizer.push(token_ids, final=True)


def _tail(
    tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool
) -> Sequence[int]:
    """The last tokens with at least _NUM_CONTEXT_BYTES of text, or all."""
    num_bytes = 0
    for index in range(len(token_ids) - 1, -1, -1):
        if skip_special_tokens and tokenizer.is_special(token_ids[index]):
            continue
        num_bytes += len(tokenizer.token_bytes(token_ids[index]))
        if num_bytes >= _NUM_CONTEXT_BYTES:
            return token_ids[index:]
    return token_ids
