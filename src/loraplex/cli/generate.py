"""`loraplex generate`: one prompt over some adapters, without a server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import RequestTiming
from loraplex.core.sampling_params import SamplingParams


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH, repeatable: each answers beside the base model."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Fixes the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, repeatable.")] = None,
    n: Annotated[int, typer.Option(help="Answers shown.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Answers made; the best are shown.")] = None,
    beam_width: Annotated[int, typer.Option(help="Beam search; 1: none.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of beams.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less repetition.")] = 1.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No run of so many tokens comes twice; 0: it may.")
    ] = 0,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="A text that is not to come, repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file: the answer is JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches it.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these, repeatable.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Guessed ahead; 0: none.")] = 0,
    timing: Annotated[bool, typer.Option("--timing", help="Tell what each answer took.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    quantization: Annotated[
        str, typer.Option(help="Weights in none, int8, int4 or, on a GPU, fp8.")
    ] = "none",
) -> None:
    """Answer one prompt without a server: the base model and every adapter, in one batch."""
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

        with LLM(model, adapters, dtype=dtype, device=device, quantization=quantization) as llm:
            names = [None, *adapters]
            answers = llm.generate([text] * len(names), sampling, adapter=names)
        for name, answer in zip(names, answers, strict=True):
            if adapters:
                print(f"--- {name or 'base'}")
            for completion in answer.completions:
                print(completion.text)
            if timing:
                print(_told(answer.timing))


def _beam(width: int, length_penalty: float) -> BeamSearch | None:
    return BeamSearch(width=width, length_penalty=length_penalty) if width != 1 else None


def _grammar(schema: Path | None, regex: str | None, choice: list[str] | None) -> Grammar | None:
    """Raises ConfigError for more than one of them, or a schema that cannot be read."""
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


def _told(timing: RequestTiming) -> str:
    spans = {
        "queued": timing.queue_seconds,
        "first token": timing.first_token_seconds,
        "per token": timing.seconds_per_token,
        "total": timing.total_seconds,
    }
    told = [f"{name} {1000 * span:.1f} ms" for name, span in spans.items() if span is not None]
    drafts = f"drafts {timing.num_accepted_tokens} of {timing.num_draft_tokens} right"
    cached = f"cached {timing.num_cached_tokens} tokens"
    return f"({', '.join([*told, cached, *([drafts] if timing.num_draft_tokens else [])])})"
