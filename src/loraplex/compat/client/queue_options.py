"""The flags of test_max_queue_size.py."""

import dataclasses

from loraplex.compat.client.flags import flag
from loraplex.compat.client.request_options import RequestOptions
from loraplex.core.support import Support


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueOptions(RequestOptions):
    verbose: bool = flag("-v", "--verbose", help="Print every refusal.", default=False)
    url: str | None = flag(
        "-u", "--url", help="HOST:PORT; localhost:8000 or, of gRPC, :8001.", default=None
    )
    protocol: str = flag("-p", "-i", "--protocol", help="http or grpc.", default="http")
    concurrency: int = flag(
        "-c", "--concurrency", help="HTTP requests at a time.", default=128, is_ours=True
    )
    num_requests: int = flag("--num-requests", help="Equal requests to send.", default=30)
    input_len: int = flag(
        "--input-len",
        help="Tokens of each prompt, without --tokenizer-dir and --input-tokens-csv.",
        default=512,
        is_ours=True,
    )
    ssl: bool = flag(
        "-s",
        "--ssl",
        help="the original never speaks TLS.",
        default=False,
        support=Support.NO_EFFECT,
    )
    request_id: str = flag(
        "--request-id",
        help="each request has one of its own.",
        default="",
        support=Support.NO_EFFECT,
    )
    output_tokens_csv: str = flag(
        "--output-tokens-csv",
        help="answers are not compared.",
        default="",
        support=Support.NO_EFFECT,
    )
    requested_outputs: tuple[str, ...] = flag(
        "--requested-outputs",
        help="answers are not looked at.",
        default=(),
        support=Support.NO_EFFECT,
    )
