"""`loraplex generate`: one prompt over some adapters, without a server."""

from typing import Annotated

import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.core.errors import ConfigError
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
    dtype: Annotated[str, typer.Option(help="auto, float32, float16, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    quantization: Annotated[str, typer.Option(help="Weights in none, int8 or int4.")] = "none",
) -> None:
    """Answer one prompt with the base model and with every adapter given, in one batch."""
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    with errors_to_exit_code():
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
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
            print(answer.text)
