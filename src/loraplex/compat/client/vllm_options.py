"""The flags of the vLLM backend's samples/client_lora.py and client.py."""

import dataclasses

from loraplex.compat.client.connection_options import GrpcOptions
from loraplex.compat.client.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmOptions(GrpcOptions):
    model: str = flag("-m", "--model", help="The Triton model.", default="vllm_model")
    stream_timeout: float | None = flag(
        "-t", "--stream-timeout", help="Seconds that the stream may last.", default=None
    )
    offset: int = flag("--offset", help="Added to the ids of requests.", default=0)
    input_prompts: str = flag(
        "--input-prompts", help="A file with a prompt on each line.", default="prompts.txt"
    )
    results_file: str = flag(
        "--results-file", help="Where the answers are written.", default="results.txt"
    )
    iterations: int = flag("--iterations", help="How often each prompt is sent.", default=1)
    streaming_mode: bool = flag("-s", "--streaming-mode", help="Stream answers.", default=False)
    exclude_inputs_in_outputs: bool = flag(
        "--exclude-inputs-in-outputs", help="Answers have no prompts.", default=False
    )
    lora_name: str | None = flag(
        "-l", "--lora-name", help="An adapter of multi_lora.json.", default=None
    )
