"""The flags of end_to_end_grpc_client.py."""

import dataclasses

from loraplex.compat.client.connection_options import GrpcOptions
from loraplex.compat.client.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(GrpcOptions):
    expected_outputs: str | None = flag(
        "--expected-outputs", help="A JSON list of texts, for --check-outputs.", default=None
    )
    check_outputs: bool = flag(
        "--check-outputs", help="Fail if a text is not the expected one.", default=False
    )
    prompt: str = flag("-p", "--prompt", help="A text, or a JSON list of texts.")
    model_name: str = flag("--model-name", help="ensemble or tensorrt_llm_bls.", default="ensemble")
    streaming: bool = flag("-S", "--streaming", help="Stream the answer.", default=False)
    num_return_sequences: int | None = flag(
        "-n", "--num-return-sequences", help="Answers.", default=None
    )
    beam_width: int = flag("-b", "--beam-width", help="Beams.", default=1)
    temperature: float = flag("--temperature", help="Of the draws.", default=1.0)
    repetition_penalty: float | None = flag("--repetition-penalty", help="Factor.", default=None)
    presence_penalty: float | None = flag("--presence-penalty", help="Summand.", default=None)
    frequency_penalty: float | None = flag("--frequency-penalty", help="Summand.", default=None)
    output_len: int = flag("-o", "--output-len", help="New tokens at most.", default=100)
    request_id: str = flag("--request-id", help="The request's id.", default="")
    stop_words: tuple[str, ...] = flag("--stop-words", help="End the answer.", default=())
    bad_words: tuple[str, ...] = flag("--bad-words", help="Never come.", default=())
    embedding_bias_words: tuple[str, ...] = flag(
        "--embedding-bias-words", help="More or less likely words.", default=()
    )
    embedding_bias_weights: tuple[float, ...] = flag(
        "--embedding-bias-weights", help="One summand for each of them.", default=()
    )
    overwrite_output_text: bool = flag(
        "--overwrite-output-text", help="A streamed piece is the whole text so far.", default=False
    )
    return_log_probs: bool = flag("--return-log-probs", help="Ask for them.", default=False)
    return_context_logits: bool = flag(
        "--return-context-logits", help="Ask for them.", default=False
    )
    return_generation_logits: bool = flag(
        "--return-generation-logits", help="Ask for them.", default=False
    )
    return_perf_metrics: bool = flag("--return-perf-metrics", help="Ask for them.", default=False)
    batch_inputs: bool = flag(
        "--batch-inputs", help="All prompts in one request, not one after the other.", default=False
    )
    end_id: int | None = flag("--end-id", help="Ends the answer.", default=None)
    pad_id: int | None = flag("--pad-id", help="Pads beams.", default=None)
    lora_path: str = flag(
        "--lora-path", help="A converted adapter, sent; with --lora-task-id.", default=""
    )
    lora_task_id: int | None = flag("--lora-task-id", help="The adapter's id.", default=None)
    exclude_input_in_output: bool = flag(
        "--exclude-input-in-output", help="The answer has no prompt.", default=False
    )
    guided_decoding_guide_type: str | None = flag(
        "--guided-decoding-guide-type",
        help="json, json_schema, regex or ebnf_grammar.",
        default=None,
    )
    guided_decoding_guide: str | None = flag(
        "--guided-decoding-guide", help="The schema, regex or grammar.", default=None
    )
