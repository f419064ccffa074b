"""--check-output: the answer against the ids that are expected."""

from loraplex.compat.client.array_files import read_token_ids
from loraplex.compat.client.flags import Say
from loraplex.compat.client.token_answer import TokenAnswer
from loraplex.compat.client.token_options import TokenOptions

GPT2_ANSWER = (
    *(21221, 878, 3867, 284, 3576, 287, 262, 1903),
    *(6303, 82, 13, 679, 468, 1201, 3111, 287),
)
"""What GPT-2 answers, greedily."""


def check_output(options: TokenOptions, answer: TokenAnswer, say: Say) -> bool:
    """Prints PASS! or FAIL! with both sides. Raises ConfigError for a file that is no list."""
    expected = _expected(options, answer)
    actual = answer.sequences[0].token_ids
    passed = actual == expected
    if options.correctness_threshold < 1.0:
        equal = sum(a == e for a, e in zip(actual, expected, strict=False))
        ratio = equal / max(len(expected), 1)
        say(f"Output matches the expected ids in {ratio:.4f} of them")
        passed = ratio > options.correctness_threshold
    say(f"expected_output_ids =  {expected}")
    say(f"actual_output_ids =  {actual}")
    say("PASS!" if passed else "FAIL!")
    return passed


def _expected(options: TokenOptions, answer: TokenAnswer) -> list[int]:
    if options.output_tokens_csv:
        return read_token_ids(options.output_tokens_csv)
    sequence = answer.sequences[0]
    prompt = sequence.token_ids[: len(sequence.token_ids) - len(sequence.new_token_ids)]
    return [*prompt, *GPT2_ANSWER]
