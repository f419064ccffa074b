"""The flags of e2e_grpc_speculative_decoding_client.py."""

import dataclasses

from loraplex.compat.client.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """A draft model guesses, a target model decides; both may be on one server."""

    verbose: bool = flag("-v", "--verbose", help="Print the tokens of each round.", default=False)
    url_target: str = flag("--url-target", help="HOST:PORT of the target's gRPC.")
    url_draft: str | None = flag(
        "--url-draft", help="HOST:PORT of the draft's gRPC; by default the target's.", default=None
    )
    preprocessor_model_name: str = flag(
        "--preprocessor-model-name", help="The draft server's.", default="preprocessing"
    )
    postprocessor_model_name: str = flag(
        "--postprocessor-model-name", help="The target server's.", default="postprocessing"
    )
    draft_tensorrt_llm_model_name: str = flag(
        "--draft-tensorrt-llm-model-name", help="The model that guesses.", default="tensorrt_llm"
    )
    target_tensorrt_llm_model_name: str = flag(
        "--target-tensorrt-llm-model-name", help="The model that decides.", default="tensorrt_llm"
    )
    prompt: str = flag("-p", "--prompt", help="A text.")
    beam_width: int = flag("-b", "--beam-width", help="1: beams are not guessed.", default=1)
    temperature: float = flag("--temperature", help="Of the draws.", default=1.0)
    repetition_penalty: float | None = flag("--repetition-penalty", help="Factor.", default=None)
    presence_penalty: float | None = flag("--presence-penalty", help="Summand.", default=None)
    frequency_penalty: float | None = flag("--frequency-penalty", help="Summand.", default=None)
    output_len: int = flag("-o", "--output-len", help="New tokens at most.", default=100)
    num_draft_tokens: int = flag("--num-draft-tokens", help="Guesses of a round.", default=5)
    end_id: int | None = flag("--end-id", help="Ends the answer.", default=None)
    pad_id: int | None = flag("--pad-id", help="Pads.", default=None)
    request_id: str = flag("--request-id", help="The id of all requests.", default="1")
    stop_words: tuple[str, ...] = flag("--stop-words", help="End the answer.", default=())
    bad_words: tuple[str, ...] = flag("--bad-words", help="Never come.", default=())
    return_draft_model_draft_logits: bool = flag(
        "--return-draft-model-draft-logits", help="Ask for them.", default=False
    )
    return_target_model_accepted_token_logits: bool = flag(
        "--return-target-model-accepted-token-logits", help="Ask for them.", default=False
    )
