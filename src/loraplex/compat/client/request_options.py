"""The flags of a request to `tensorrt_llm`, which several programs have."""

import dataclasses

from loraplex.compat.client.flags import flag
from loraplex.core.support import Support


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    text: str = flag(
        "--text", help="The prompt.", default="Born in north-east France, Soyer trained as a"
    )
    input_tokens_csv: str = flag(
        "--input-tokens-csv",
        help="A file whose first row is the prompt's token ids; no tokenizer is needed then.",
        default="",
    )
    draft_tokens_csv: str = flag(
        "--draft-tokens-csv", help="Draft token ids, with --input-tokens-csv.", default=""
    )
    end_id: int = flag("--end-id", help="With --input-tokens-csv; -1: none.", default=-1)
    pad_id: int = flag("--pad-id", help="With --input-tokens-csv.", default=50256)
    beam_width: int = flag("-b", "--beam-width", help="Beams.", default=1)
    temperature: float = flag("--temperature", help="Of the draws.", default=1.0)
    repetition_penalty: float | None = flag("--repetition-penalty", help="Factor.", default=None)
    presence_penalty: float | None = flag("--presence-penalty", help="Summand.", default=None)
    frequency_penalty: float | None = flag("--frequency-penalty", help="Summand.", default=None)
    request_output_len: int = flag("--request-output-len", help="New tokens at most.", default=16)
    tokenizer_dir: str = flag(
        "--tokenizer-dir", help="A model folder; by default the server tokenizes.", default=""
    )
    tokenizer_type: str = flag(
        "--tokenizer-type",
        help="the folder's files say it.",
        default="auto",
        support=Support.NO_EFFECT,
    )
    prompt_embedding_table_path: str = flag(
        "--prompt-embedding-table-path", help="A .npy file, for prompt tuning.", default=""
    )
    prompt_task_id: int = flag(
        "--prompt-task-id", help="a table is sent whole.", default=0, support=Support.NO_EFFECT
    )
    dtype: str = flag(
        "--dtype", help="Of the table: float16, float32 or bfloat16.", default="float16"
    )
    lora_path: str = flag(
        "--lora-path",
        help="A folder with model.lora_weights.npy and model.lora_config.npy, which are sent.",
        default="",
    )
    lora_task_id: int | None = flag("--lora-task-id", help="The adapter's id.", default=None)
    exclude_input_in_output: bool = flag(
        "--exclude-input-in-output", help="The answer has no prompt.", default=False
    )
    return_log_probs: bool = flag("--return-log-probs", help="Ask for them.", default=False)
    return_context_logits: bool = flag(
        "--return-context-logits", help="Ask for them.", default=False
    )
    return_generation_logits: bool = flag(
        "--return-generation-logits", help="Ask for them.", default=False
    )
    top_k: int = flag("--top-k", help="Draw from so many; 0: from all.", default=1)
    top_p: float = flag("--top-p", help="Draw from this much probability.", default=0.0)
    model_name: str = flag("--model-name", help="The Triton model.", default="tensorrt_llm")
