"""The flags of end_to_end_test.py."""

import dataclasses

from loraplex.compat.client.flags import flag
from loraplex.core.support import Support


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnsembleTestOptions:
    verbose: bool = flag("-v", "--verbose", help="Print the texts.", default=False)
    url: str | None = flag(
        "-u", "--url", help="HOST:PORT; localhost:8000 or, of gRPC, :8001.", default=None
    )
    protocol: str = flag("-i", "--protocol", help="http or grpc.", default="http")
    concurrency: int = flag("-c", "--concurrency", help="HTTP requests at a time.", default=128)
    max_input_len: int | None = flag(
        "--max-input-len", help="Longer prompts are skipped; by default none.", default=None
    )
    dataset: str = flag("--dataset", help="A JSON file of prompts.")
    return_log_probs: bool = flag("--return-log-probs", help="Compare them.", default=False)
    return_context_logits: bool = flag("--return-context-logits", help="Compare.", default=False)
    return_generation_logits: bool = flag(
        "--return-generation-logits", help="Compare them.", default=False
    )
    test_bls: bool = flag("--test-bls", help="tensorrt_llm_bls, too.", default=False)
    test_llmapi: bool = flag(
        "--test-llmapi", help="not served.", default=False, support=Support.REFUSED
    )
    model_name: str = flag("--model-name", help="The ensemble.", default="ensemble")
    streaming: bool = flag("--streaming", help="Stream while measuring.", default=False)
    output_config: str = flag(
        "--output-config", help="of --test-llmapi.", default="", support=Support.NO_EFFECT
    )
    sampling_params: str = flag(
        "--sampling-params", help="of --test-llmapi.", default="", support=Support.NO_EFFECT
    )
