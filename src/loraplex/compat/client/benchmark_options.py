"""The flags of benchmark_core_model.py (identity_test.py before December 2023), on either side of
its workload.
"""

import dataclasses

from loraplex.compat.client.flags import argument, flag
from loraplex.core.support import Support


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    workload: str = argument(help="dataset, token-norm-dist or token-from-histogram.")
    verbose: bool = flag("-v", "--verbose", help="Print every request.", default=False)
    url: str | None = flag(
        "-u", "--url", help="HOST:PORT; localhost:8000 or, of gRPC, :8001.", default=None
    )
    protocol: str = flag("-i", "--protocol", help="http or grpc.", default="http")
    decoupled: bool = flag("--decoupled", help="Stream the answers; gRPC only.", default=False)
    stream_timeout: float | None = flag(
        "-t", "--stream-timeout", help="Seconds that a stream may last.", default=None
    )
    tensorrt_llm_model_name: tuple[str, ...] = flag(
        "--tensorrt-llm-model-name",
        help="The Triton model [tensorrt_llm]; several take turns.",
        default=(),
    )
    concurrency: int = flag("-c", "--concurrency", help="HTTP requests at a time.", default=128)
    max_input_len: int | None = flag(
        "--max-input-len", help="Longer prompts are skipped; by default none.", default=None
    )
    request_rate: float = flag(
        "--request-rate", help="Requests per second; -1: all at once.", default=-1.0
    )
    time_delay_dist: str = flag(
        "--time-delay-dist",
        help="Between requests: constant or exponential_dist.",
        default="exponential_dist",
    )
    dump_perfetto_trace: bool = flag(
        "--dump-perfetto-trace", help="Write prfetto_dump.json.", default=False
    )
    op_stats_csv: str | None = flag("--op-stats-csv", help="A file for the figures.", default=None)
    exclude_input_in_output: bool = flag(
        "--exclude-input-in-output", help="Answers have no prompts.", default=False
    )
    num_requests: int = flag("--num-requests", help="Requests to send.", default=30000)
    check_perf_json: str | None = flag(
        "--check-perf-json", help="A JSON file of latencies in ms, to compare with.", default=None
    )
    check_perf_key: str | None = flag("--check-perf-key", help="Which of them.", default=None)
    check_perf_atol: float = flag(
        "--check-perf-atol", help="So many ms slower is well.", default=50.0
    )
    check_perf_rtol: float = flag("--check-perf-rtol", help="And by so great a part.", default=0.05)
    test_llmapi: bool = flag(
        "--test-llmapi", help="not served.", default=False, support=Support.REFUSED
    )
    dataset: str | None = flag("--dataset", help="Of dataset: a JSON file.", default=None)
    tokenizer_dir: str | None = flag(
        "--tokenizer-dir", help="Of dataset: a model folder.", default=None
    )
    tokenizer_type: str = flag(
        "--tokenizer-type",
        help="the folder's files say it.",
        default="auto",
        support=Support.NO_EFFECT,
    )
    op_tokens_per_word: float = flag(
        "--op-tokens-per-word", help="Of dataset: of its outputs.", default=1.3
    )
    input_mean: int | None = flag("--input-mean", help="Of token-norm-dist.", default=None)
    input_stdev: int | None = flag("--input-stdev", help="Of token-norm-dist.", default=None)
    output_mean: int | None = flag("--output-mean", help="Of token-norm-dist.", default=None)
    output_stdev: int | None = flag("--output-stdev", help="Of token-norm-dist.", default=None)
    histogram_key: str | None = flag(
        "--histogram-key", help="Of token-from-histogram: example.", default=None
    )
    vocab_size: int = flag(
        "--vocab-size", help="Random token ids are below this.", default=1000, is_ours=True
    )
    seed: int = flag("--seed", help="Of lengths, ids and delays.", default=0, is_ours=True)
