"""The flags of test_max_queue_size.py."""

import dataclasses

from loraplex.client.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueOptions:
    verbose: bool = flag("-v", "--verbose", help="Print every refusal.", default=False)
    url: str | None = flag(
        "-u", "--url", help="HOST:PORT; localhost:8000 or, of gRPC, :8001.", default=None
    )
    protocol: str = flag("-p", "-i", "--protocol", help="http or grpc.", default="http")
    concurrency: int = flag(
        "-c", "--concurrency", help="HTTP requests at a time.", default=128, is_ours=True
    )
    num_requests: int = flag("--num-requests", help="Equal requests to send.", default=30)
    input_len: int = flag("--input-len", help="Tokens of each prompt.", default=512, is_ours=True)
    request_output_len: int = flag("--request-output-len", help="New tokens.", default=16)
    model_name: str = flag("--model-name", help="The Triton model.", default="tensorrt_llm")
