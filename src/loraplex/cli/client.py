"""`loraplex client`: the client programs of the original systems, with their own flags."""

from typing import Any, Final

import typer

from loraplex.cli.client_flags import AnySpelling, command_of
from loraplex.client.benchmark_options import BenchmarkOptions
from loraplex.client.ensemble_test_options import EnsembleTestOptions
from loraplex.client.queue_options import QueueOptions
from loraplex.client.text_options import TextOptions
from loraplex.client.token_options import TokenOptions
from loraplex.client.vllm_options import VllmOptions

app = typer.Typer(
    help="The client programs of the original systems, with their flags and printed lines.",
    no_args_is_help=True,
)

_PROGRAMS: Final[tuple[tuple[str, type[Any], str, str], ...]] = (
    (
        "inflight-batcher-llm",
        TokenOptions,
        "loraplex.client.token_client",
        "Send one prompt to `tensorrt_llm`, as inflight_batcher_llm_client.py does.",
    ),
    (
        "end-to-end-grpc",
        TextOptions,
        "loraplex.client.text_client",
        "Send prompts to `ensemble`, as end_to_end_grpc_client.py does.",
    ),
    (
        "end-to-end-test",
        EnsembleTestOptions,
        "loraplex.client.ensemble_test",
        "Compare and measure the ensemble, as end_to_end_test.py does.",
    ),
    (
        "benchmark-core-model",
        BenchmarkOptions,
        "loraplex.client.benchmark",
        "Measure `tensorrt_llm` alone, as benchmark_core_model.py does.",
    ),
    (
        "client-lora",
        VllmOptions,
        "loraplex.client.vllm_client",
        "Send a file of prompts to `vllm_model`, as client_lora.py does.",
    ),
    (
        "test-max-queue-size",
        QueueOptions,
        "loraplex.client.queue_test",
        "See a full queue refuse requests, as test_max_queue_size.py does.",
    ),
)
"""(command, its flags, the module whose `run` it is, help)."""

for _name, _options, _module, _help in _PROGRAMS:
    app.command(_name, cls=AnySpelling, help=_help)(command_of(_options, _module))
