"""The flags of inflight_batcher_llm_client.py."""

import dataclasses

from loraplex.compat.client.connection_options import TlsOptions
from loraplex.compat.client.flags import flag
from loraplex.compat.client.request_options import RequestOptions
from loraplex.core.support import Support


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenOptions(RequestOptions, TlsOptions):
    output_tokens_csv: str = flag(
        "--output-tokens-csv", help="The ids that --check-output expects.", default=""
    )
    streaming: bool = flag("-S", "--streaming", help="Stream the answer.", default=False)
    check_output: bool = flag(
        "-c", "--check-output", help="Compare the answer, and fail if it differs.", default=False
    )
    correctness_threshold: float = flag(
        "--correctness-threshold", help="Below 1: the share of equal ids to exceed.", default=1.0
    )
    num_return_sequences: int | None = flag(
        "-n", "--num-return-sequences", help="Answers, with beam width 1.", default=None
    )
    stop_after_ms: int = flag(
        "--stop-after-ms", help="Stop the request after so long; 0: do not.", default=0
    )
    stop_via_request_cancel: bool = flag(
        "--stop-via-request-cancel", help="Cancel the call instead.", default=False
    )
    request_id: str = flag("--request-id", help="The request's id.", default="")
    prompt_table_extra_id: int | None = flag(
        "--prompt-table-extra-id", help="Of the table's rows in the KV cache.", default=None
    )
    vocab_size: int | None = flag(
        "--vocab-size",
        help="the table itself says how many rows it has.",
        default=None,
        support=Support.NO_EFFECT,
    )
    return_perf_metrics: bool = flag("--return-perf-metrics", help="Ask for them.", default=False)
    requested_outputs: tuple[str, ...] = flag(
        "--requested-outputs", help="Names of outputs; by default all that there are.", default=()
    )
    lookahead_config: tuple[int, ...] = flag(
        "--lookahead-config", help="Window, n-gram and verification set.", default=()
    )
