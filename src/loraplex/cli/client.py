"""`loraplex client`: the client programs of the original systems, with their own flags."""

import dataclasses
from typing import Any, Final

import typer

from loraplex.cli.client_flags import AnySpelling, command_of
from loraplex.compat.client.benchmark_options import BenchmarkOptions
from loraplex.compat.client.ensemble_test_options import EnsembleTestOptions
from loraplex.compat.client.queue_options import QueueOptions
from loraplex.compat.client.speculation_options import SpeculationOptions
from loraplex.compat.client.text_options import TextOptions
from loraplex.compat.client.token_options import TokenOptions
from loraplex.compat.client.vllm_options import VllmOptions

app = typer.Typer(
    help="The client programs of the original systems, with their flags and printed lines.",
    no_args_is_help=True,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One command."""

    command: str
    options: type[Any]
    module: str
    """Whose `run` it is."""
    does: str
    original: str
    """The file that it takes the place of."""

    @property
    def help(self) -> str:
        return f"{self.does}, as {self.original} does."


PROGRAMS: Final = (
    Program(
        "inflight-batcher-llm",
        TokenOptions,
        "loraplex.compat.client.token_client",
        "Send one prompt to `tensorrt_llm`",
        "inflight_batcher_llm_client.py",
    ),
    Program(
        "end-to-end-grpc",
        TextOptions,
        "loraplex.compat.client.text_client",
        "Send prompts to `ensemble`",
        "end_to_end_grpc_client.py",
    ),
    Program(
        "speculative-decoding",
        SpeculationOptions,
        "loraplex.compat.client.speculative_client",
        "Let one model guess and another decide",
        "e2e_grpc_speculative_decoding_client.py",
    ),
    Program(
        "end-to-end-test",
        EnsembleTestOptions,
        "loraplex.compat.client.ensemble_test",
        "Compare and measure the ensemble",
        "end_to_end_test.py",
    ),
    Program(
        "benchmark-core-model",
        BenchmarkOptions,
        "loraplex.compat.client.benchmark",
        "Measure `tensorrt_llm` alone",
        "benchmark_core_model.py",
    ),
    Program(
        "client-lora",
        VllmOptions,
        "loraplex.compat.client.vllm_client",
        "Send a file of prompts to `vllm_model`",
        "client_lora.py",
    ),
    Program(
        "test-max-queue-size",
        QueueOptions,
        "loraplex.compat.client.queue_test",
        "See a full queue refuse requests",
        "test_max_queue_size.py",
    ),
)

for _program in PROGRAMS:
    app.command(_program.command, cls=AnySpelling, help=_program.help)(
        command_of(_program.options, _program.module)
    )
