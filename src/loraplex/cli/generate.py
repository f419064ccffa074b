"""`loraplex generate`: one prompt with some adapters, without a server."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from loraplex.cli.chat_sources import local_pieces, read_together
from loraplex.cli.options import (
    BASE,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    errors_to_exit_code,
    local_adapters,
    with_demo,
)
from loraplex.cli.settings_flags import with_settings
from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import RequestTiming
from loraplex.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from loraplex.app.llm import LLM
    from loraplex.app.llm_arguments import Chat
    from loraplex.app.llm_outputs import Prompt

_N = Annotated[int, typer.Option(help="Number of completions shown.")]
_BestOf = Annotated[
    int | None, typer.Option(help="Number of completions made; the best are shown.")
]
_BeamWidth = Annotated[int, typer.Option(help="Width of the beam search; 1: none.")]
_LengthPenalty = Annotated[float, typer.Option(help="Length penalty of beams.")]
_NoRepeat = Annotated[
    int, typer.Option(help="Length of token sequences that may not repeat; 0: none.")
]
_BadWord = Annotated[list[str] | None, typer.Option(help="Text that may not occur; repeatable.")]
_JsonSchema = Annotated[Path | None, typer.Option(help="File with the JSON schema of the output.")]
_Regex = Annotated[str | None, typer.Option(help="Regular expression that the output matches.")]
_Choice = Annotated[list[str] | None, typer.Option(help="One of the possible outputs; repeatable.")]
_NumDraftTokens = Annotated[
    int, typer.Option(help="Maximum number of draft tokens (prompt lookup); 0: none.")
]
_Adapter = Annotated[
    list[str] | None,
    typer.Option(help="Adapter as NAME=PATH, in addition to the base model; repeatable."),
]
_Chat = Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")]
_Timing = Annotated[
    bool, typer.Option("--timing", help="Print the time that each completion took.")
]


@with_settings("dtype", "device", "quantization")
def generate(
    model: Annotated[str, typer.Argument(help="Hugging Face folder, hub id, or demo.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    adapter: _Adapter = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    n: _N = 1,
    best_of: _BestOf = None,
    beam_width: _BeamWidth = 1,
    length_penalty: _LengthPenalty = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    no_repeat_ngram_size: _NoRepeat = 0,
    bad_word: _BadWord = None,
    json_schema: _JsonSchema = None,
    regex: _Regex = None,
    choice: _Choice = None,
    num_draft_tokens: _NumDraftTokens = 0,
    chat: _Chat = False,
    timing: _Timing = False,
    **settings: Any,
) -> None:
    """Complete one prompt without a server: with the base model and every adapter, in one batch."""
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    with errors_to_exit_code():
        beam = BeamSearch(width=beam_width, length_penalty=length_penalty)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            n=n,
            best_of=best_of,
            beam=None if beam_width == 1 else beam,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            bad_words=tuple(bad_word or ()),
            grammar=_grammar(json_schema, regex, choice),
            num_draft_tokens=num_draft_tokens,
        )
        sampling.validate()
        folder, adapters = with_demo(model, local_adapters(adapter or []))
        # torch takes seconds to import: a wrong flag must not wait for it.
        from loraplex.app.llm import LLM  # noqa: PLC0415

        given = {name: value for name, value in settings.items() if value is not None}
        prompted: Prompt | Chat = [{"role": "user", "content": text}] if chat else text
        with LLM(folder, adapters, **given) as llm:
            _print_outputs(llm, prompted, [None, *adapters], sampling, has_timing=timing)


def _print_outputs(
    llm: "LLM",
    prompt: "Prompt | Chat",
    names: list[str | None],
    sampling: SamplingParams,
    *,
    has_timing: bool,
) -> None:
    """Print outputs while they are generated, if there is one for each name and a terminal."""
    is_single = sampling.n == 1 and sampling.best_of is None and sampling.beam is None
    if is_single and not has_timing and sys.stdout.isatty():
        _stream(llm, prompt, names, sampling)
    else:
        _complete(llm, prompt, names, sampling, has_timing=has_timing)


def _stream(
    llm: "LLM", prompt: "Prompt | Chat", names: list[str | None], sampling: SamplingParams
) -> None:
    """Print one output after another, each as it is generated."""
    streams = [local_pieces(llm, prompt, name, sampling) for name in names]
    with read_together(streams) as outputs:
        for name, pieces in zip(names, outputs, strict=True):
            _print_name(name, names)
            for piece in pieces:
                print(piece.text, end="", flush=True)
            print()


def _complete(
    llm: "LLM",
    prompt: "Prompt | Chat",
    names: list[str | None],
    sampling: SamplingParams,
    *,
    has_timing: bool,
) -> None:
    """Print the outputs once all of them have ended."""
    count = len(names)
    if isinstance(prompt, str):
        outputs = llm.generate([prompt] * count, sampling, adapter=names)
    else:
        outputs = llm.chat([cast("Chat", prompt)] * count, sampling, adapter=names)
    for name, output in zip(names, outputs, strict=True):
        _print_name(name, names)
        for index, completion in enumerate(output.completions):
            if len(output.completions) > 1:
                print(f"--- output {index + 1}")
            print(completion.text)
        if has_timing:
            print(_timing(output.timing))


def _print_name(name: str | None, names: list[str | None]) -> None:
    if len(names) > 1:
        print(f"--- {name or BASE}")


def _grammar(schema: Path | None, regex: str | None, choice: list[str] | None) -> Grammar | None:
    """Return the grammar of one of these options. Raises ConfigError for more than one of them,
    or a schema that cannot be read."""
    if sum(given is not None for given in (schema, regex, choice)) > 1:
        raise ConfigError("give one of --json-schema, --regex and --choice")
    if regex is not None:
        return Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        return Grammar(GrammarKind.CHOICE, json.dumps(choice))
    if schema is None:
        return None
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(json.loads(schema.read_bytes())))
    except OSError as error:
        raise ConfigError(f"--json-schema: cannot read {schema}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--json-schema: {schema} is not JSON: {error}") from None


def _timing(timing: RequestTiming) -> str:
    spans = {
        "queued": timing.queue_seconds,
        "first token": timing.first_token_seconds,
        "per token": timing.seconds_per_token,
        "total": timing.total_seconds,
    }
    parts = [f"{name} {1000 * span:.1f} ms" for name, span in spans.items() if span is not None]
    parts.append(f"cached {timing.num_cached_tokens} tokens")
    if timing.num_draft_tokens:
        accepted = f"{timing.num_accepted_tokens} of {timing.num_draft_tokens}"
        parts.append(f"accepted {accepted} draft tokens")
    return f"({', '.join(parts)})"
