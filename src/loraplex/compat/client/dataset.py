"""Data sets of prompts: a JSON array of objects with the texts `input`, `instruction`, `output`."""

import dataclasses
from pathlib import Path

import msgspec

from loraplex.compat.client.flags import Say
from loraplex.core.errors import ConfigError

TOKENS_PER_WORD = 1.3
NO_OUTPUT_TOKENS = 100
"""Asked for where the data set has no output to take the length from."""


class _Row(msgspec.Struct):
    input: str
    instruction: str = ""
    output: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    num_output_tokens: int
    """What the data set's own output has, about."""


def read_dataset(
    path: str, max_input_len: int | None, say: Say, tokens_per_word: float = TOKENS_PER_WORD
) -> list[Sample]:
    """Prompts that are longer than max_input_len are skipped. Raises ConfigError."""
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_Row])
    except OSError as error:
        raise ConfigError(f"--dataset: cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--dataset: {path} is not a JSON array of objects with the texts input, instruction "
            f"and output: {error}"
        ) from error
    samples = []
    num_without = 0
    for row in rows:
        prompt = f"{row.input} {row.instruction}"
        # Divided, where multiplied were right: so the same prompts are skipped as ever.
        if max_input_len is not None and int(len(prompt.split()) / tokens_per_word) > max_input_len:
            continue
        num_words = len(row.output.split())
        num_without += num_words == 0
        num_tokens = int(num_words * tokens_per_word) if num_words else NO_OUTPUT_TOKENS
        samples.append(Sample(prompt, max(num_tokens, 1)))
    if not samples:
        raise ConfigError(f"--dataset: {path} has no prompt that is short enough")
    if num_without:
        say(f"[INFO] {num_without} prompts have no output: each gets {NO_OUTPUT_TOKENS} tokens.")
    return samples
