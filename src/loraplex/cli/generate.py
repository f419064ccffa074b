"""`loraplex generate`: one prompt with some adapters, without a server."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.cli.settings_flags import with_settings
from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import RequestTiming
from loraplex.core.sampling_params import SamplingParams


@with_settings("dtype", "device", "quantization")
def generate(
    model: Annotated[str, typer.Argument(help="Hugging Face folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Adapter as NAME=PATH, in addition to the base model; repeatable."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    n: Annotated[int, typer.Option(help="Number of completions shown.")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Number of completions made; the best are shown.")
    ] = None,
    beam_width: Annotated[int, typer.Option(help="Width of the beam search; 1: none.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Length penalty of beams.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Minimum probability, relative to the likeliest token.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Repetition penalty; above 1: less repetition.")
    ] = 1.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="Length of token sequences that may not repeat; 0: none.")
    ] = 0,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Text that may not occur; repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema of the output.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the output matches.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="One of the possible outputs; repeatable.")
    ] = None,
    num_draft_tokens: Annotated[
        int, typer.Option(help="Maximum number of draft tokens (prompt lookup); 0: none.")
    ] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message.")
    ] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Print the time that each completion took.")
    ] = False,
    **settings: Any,
) -> None:
    """Complete one prompt without a server: with the base model and every adapter, in one batch."""
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    with errors_to_exit_code():
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            n=n,
            best_of=best_of,
            beam=_beam(beam_width, length_penalty),
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            bad_words=tuple(bad_word or ()),
            grammar=_grammar(json_schema, regex, choice),
            num_draft_tokens=num_draft_tokens,
        )
        sampling.validate()
        adapters = {name: table["path"] for name, table in parse_adapters(adapter or []).items()}
        if "base" in adapters:
            raise ConfigError("--adapter base=...: 'base' names the base model here")
        # torch takes seconds to import: a wrong flag must not wait for it.
        from loraplex.app.llm import LLM  # noqa: PLC0415

        given = {name: value for name, value in settings.items() if value is not None}
        with LLM(model, adapters, **given) as llm:
            names = [None, *adapters]
            if chat:
                message = [{"role": "user", "content": text}]
                outputs = llm.chat([message] * len(names), sampling, adapter=names)
            else:
                outputs = llm.generate([text] * len(names), sampling, adapter=names)
        for name, output in zip(names, outputs, strict=True):
            if adapters:
                print(f"--- {name or 'base'}")
            for index, completion in enumerate(output.completions):
                if len(output.completions) > 1:
                    print(f"--- output {index + 1}")
                print(completion.text)
            if timing:
                print(_timing(output.timing))


def _beam(width: int, length_penalty: float) -> BeamSearch | None:
    return BeamSearch(width=width, length_penalty=length_penalty) if width != 1 else None


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
