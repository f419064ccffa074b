"""Sampling options that the commands have in common."""

from typing import Annotated

import typer

MaxTokens = Annotated[int, typer.Option(help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1: off.")]
TopK = Annotated[int, typer.Option(help="Number of likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Minimum probability, relative to the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Repetition penalty; above 1: less repetition.")
]
