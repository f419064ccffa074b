"""The client programs: their commands and their flags, free of heavy imports."""

import dataclasses
import functools
from typing import Any, Final

from loraplex.compat.flags import REQUIRED, FlagKind, FlagRow, here, ignored, refused

_TEXT, _WHOLE, _NUMBER = FlagKind.TEXT, FlagKind.WHOLE, FlagKind.NUMBER
_BARE, _TEXTS, _WHOLES = FlagKind.BARE, FlagKind.TEXTS, FlagKind.WHOLES

DTYPES: Final = ("float16", "float32", "bfloat16")
COMPRESSIONS: Final = ("none", "deflate", "gzip")
PROTOCOLS: Final = ("http", "grpc")


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One command of `loraplex compat client`."""

    command: str
    flags: tuple[FlagRow, ...]
    module: str
    """The module of this package that has the function `run`."""
    about: str
    original: str
    """The replaced file."""

    @property
    def help(self) -> str:
        return f"{self.about}, as {self.original} does."


_DEFAULTS: Final = {_TEXT: "", _BARE: False, _TEXTS: (), _WHOLES: (), FlagKind.NUMBERS: ()}


def _row(
    kind: FlagKind, names: str, help: str, default: Any = ..., tensor: str = "", **more: Any
) -> FlagRow:
    """Return the row of a flag with the names `NAME ALIAS ...`; `...` is the kind's default."""
    name, *aliases = names.split()
    default = _DEFAULTS.get(kind) if default is ... else default
    return here(name, kind, help, *aliases, default=default, tensor=tensor, **more)


def _unused(names: str, help: str, kind: FlagKind = _TEXT) -> FlagRow:
    name, *aliases = names.split()
    return ignored(name, kind, help, *aliases, default=_DEFAULTS.get(kind))


_text, _whole, _number, _switch, _texts = (
    functools.partial(_row, kind) for kind in (_TEXT, _WHOLE, _NUMBER, _BARE, _TEXTS)
)

_GRPC = (
    _switch("verbose v", "Print more."),
    _text("url u", "HOST:PORT of the gRPC endpoint.", "localhost:8001"),
)
_OWN_TLS = (
    _switch("ssl", "Use TLS.", is_ours=True),
    _text("root-certificates", "PEM file; else the system's.", None, is_ours=True),
)
_TLS = (
    _switch("ssl s", "Use TLS."),
    _text("root-certificates r", "PEM file; else the system's.", None),
    _text("private-key p", "PEM file of the client's key.", None),
    _text("certificate-chain x", "PEM file that belongs to the key.", None),
    _text("grpc-compression-algorithm C", "none, deflate or gzip.", None, choices=COMPRESSIONS),
    _number("stream-timeout t", "Longest duration of a stream in seconds."),
)
_LOAD = (
    _switch("verbose v", "Print every request."),
    _text("url u", "HOST:PORT; localhost:8000 (HTTP) or localhost:8001 (gRPC).", None),
    _text("protocol i", "http or grpc.", "http", choices=PROTOCOLS),
)
_CONCURRENCY = _whole("concurrency c", "Concurrent HTTP requests.", 128)
_MAX_INPUT_LEN = _whole("max-input-len", "Longer prompts are skipped; by default none.")
_SAMPLING = (
    _whole("beam-width b", "Beams.", 1, "int32"),
    _number("temperature", "Sampling temperature.", 1.0, "float32"),
    _number("repetition-penalty", "Factor for repeated tokens.", None, "float32"),
    _number("presence-penalty", "Penalty for tokens that are present.", None, "float32"),
    _number("frequency-penalty", "Penalty for each occurrence.", None, "float32"),
)
_LOGITS = (
    _switch("return-log-probs", "Request log probabilities.", False, "bool"),
    _switch("return-context-logits", "Request the prompt's logits.", False, "bool"),
    _switch("return-generation-logits", "Request the output's logits.", False, "bool"),
)
_PERF = _switch("return-perf-metrics", "Request timings and cache counts.", False, "bool")
_STREAMING = _switch("streaming S", "Stream the output.")
_SEQUENCES = _whole(
    "num-return-sequences n", "Number of outputs (with beam width 1).", None, "int32"
)
_ADAPTER = (
    _text("lora-path", "Folder with model.lora_weights.npy and model.lora_config.npy to send."),
    _whole("lora-task-id", "Task id of the adapter.", None, "uint64"),
)
_REQUEST_ID = _text("request-id", "Id of the request.")
_TOKENIZER_TYPE = _unused("tokenizer-type", "the folder's files determine it.")
_LLMAPI = refused("test-llmapi", _BARE, "the llmapi model is not served.", default=False)
_REQUEST = (
    _text("text", "Prompt.", "Born in north-east France, Soyer trained as a"),
    _text("input-tokens-csv", "File whose first row is the prompt's token ids (no tokenizer)."),
    _text("draft-tokens-csv", "File of draft token ids, with --input-tokens-csv."),
    _whole("end-id", "End token id, with --input-tokens-csv; -1: none.", -1),
    _whole("pad-id", "Padding token id, with --input-tokens-csv.", 50256),
    *_SAMPLING,
    _whole("request-output-len", "Maximum number of new tokens.", 16, "int32"),
    _text("tokenizer-dir", "Model folder; by default the server tokenizes."),
    _TOKENIZER_TYPE,
    _text("prompt-embedding-table-path", "A .npy file for prompt tuning."),
    _unused("prompt-task-id", "a table is sent whole.", _WHOLE),
    _text("dtype", "Type of the table.", "float16", choices=DTYPES),
    *_ADAPTER,
    _switch("exclude-input-in-output", "Leave the prompt out of the output.", False, "bool"),
    *_LOGITS,
    _whole("top-k", "Sample from the top k; 0: all.", 1, "int32 runtime_top_k"),
    _number("top-p", "Nucleus probability.", 0.0, "float32 runtime_top_p"),
    _text("model-name", "Triton model.", "tensorrt_llm"),
)
TOKEN_FLAGS: Final = (
    *_GRPC,
    *_TLS,
    *_REQUEST,
    _text("output-tokens-csv", "File of the ids that --check-output expects."),
    _STREAMING,
    _switch("check-output c", "Compare the output, and fail if it differs."),
    _number("correctness-threshold", "Below 1: share of equal ids to exceed.", 1.0),
    _SEQUENCES,
    _whole("stop-after-ms", "Stop the request after this time; 0: never.", 0),
    _switch("stop-via-request-cancel", "Cancel the call instead."),
    _REQUEST_ID,
    _whole(
        "prompt-table-extra-id",
        "Id of the table's rows in the KV cache.",
        None,
        "uint64 prompt_table_extra_ids",
    ),
    _unused("vocab-size", "the table itself determines its number of rows.", kind=_WHOLE),
    _PERF,
    _texts("requested-outputs", "Names of outputs; by default all."),
    _row(_WHOLES, "lookahead-config", "Window, n-gram and verification set."),
)
_WORDS = (
    _texts("stop-words", "Words that end the output.", (), "object"),
    _texts("bad-words", "Words that never occur.", (), "object"),
)
TEXT_FLAGS: Final = (
    *_GRPC,
    *_OWN_TLS,
    _text("expected-outputs", "JSON list of texts for --check-outputs.", None),
    _switch("check-outputs", "Fail if a text is not the expected one."),
    _text("prompt p", "A text, or a JSON list of texts.", REQUIRED),
    _text("model-name", "ensemble or tensorrt_llm_bls.", "ensemble"),
    dataclasses.replace(_STREAMING, tensor="bool stream"),
    _SEQUENCES,
    *_SAMPLING,
    _whole("output-len o", "Maximum of new tokens.", 100, "int32 max_tokens"),
    _REQUEST_ID,
    *_WORDS,
    _texts("embedding-bias-words", "Words to make more or less likely.", (), "object"),
    _row(FlagKind.NUMBERS, "embedding-bias-weights", "One bias for each of them.", (), "float32"),
    _switch("overwrite-output-text", "Each streamed piece is the whole text so far."),
    *_LOGITS,
    _PERF,
    _switch("batch-inputs", "Send all prompts in one request."),
    _whole("end-id", "Token id that ends the output.", None, "int32"),
    _whole("pad-id", "Token id that pads beams.", None, "int32"),
    *_ADAPTER,
    _switch("exclude-input-in-output", "Leave the prompt out of the output.", False, "bool"),
    _text(
        "guided-decoding-guide-type", "json, json_schema, regex or ebnf_grammar.", None, "object"
    ),
    _text("guided-decoding-guide", "Schema, regex or grammar.", None, "object"),
)
SPECULATION_FLAGS: Final = (
    _switch("verbose v", "Print the tokens of each round."),
    _text("url-target", "HOST:PORT of the target's gRPC endpoint.", REQUIRED),
    _text("url-draft", "HOST:PORT of the draft's gRPC endpoint [the target's].", None),
    _text("preprocessor-model-name", "Preprocessor of the draft server.", "preprocessing"),
    _text("postprocessor-model-name", "Postprocessor of the target server.", "postprocessing"),
    _text("draft-tensorrt-llm-model-name", "Draft model.", "tensorrt_llm"),
    _text("target-tensorrt-llm-model-name", "Target model.", "tensorrt_llm"),
    _text("prompt p", "Prompt.", REQUIRED),
    *_SAMPLING,
    _whole("output-len o", "Maximum number of new tokens.", 100),
    _whole("num-draft-tokens", "Draft tokens of a round.", 5),
    _whole("end-id", "Token id that ends the output."),
    _whole("pad-id", "Token id that pads."),
    _text("request-id", "Id of all requests.", "1"),
    _texts("stop-words", "Words that end the output."),
    _texts("bad-words", "Words that never occur."),
    _switch("return-draft-model-draft-logits", "Request the draft model's logits."),
    _switch("return-target-model-accepted-token-logits", "Request the target model's logits."),
)
ENSEMBLE_TEST_FLAGS: Final = (
    *_LOAD,
    _CONCURRENCY,
    _MAX_INPUT_LEN,
    _text("dataset", "JSON file of prompts.", REQUIRED),
    *_LOGITS,
    _switch("test-bls", "Test tensorrt_llm_bls, too."),
    _LLMAPI,
    _text("model-name", "Ensemble model.", "ensemble"),
    _switch("streaming", "Stream while measuring."),
    _unused("output-config", "of --test-llmapi."),
    _unused("sampling-params", "of --test-llmapi."),
)
BENCHMARK_FLAGS: Final = (
    _text(
        "workload",
        "dataset, token-norm-dist or token-from-histogram.",
        "dataset",
        is_positional=True,
    ),
    *_LOAD,
    _switch("decoupled", "Stream the outputs (gRPC only)."),
    _number("stream-timeout t", "Longest duration of a stream in seconds."),
    _texts("tensorrt-llm-model-name", "Triton model [tensorrt_llm]; several take turns."),
    _CONCURRENCY,
    _MAX_INPUT_LEN,
    _number("request-rate", "Requests per second; -1: all at once.", -1.0),
    _text(
        "time-delay-dist",
        "Delays between requests: constant or exponential_dist.",
        "exponential_dist",
        choices=("constant", "exponential_dist"),
    ),
    _row(
        FlagKind.NUMBERS,
        "time-bet-reqs",
        "Seconds before each request, in turn, as identity_test.py of 0.5.0 has them.",
    ),
    _switch("dump-perfetto-trace", "Write prfetto_dump.json."),
    _text("op-stats-csv", "File for the figures.", None),
    _switch("exclude-input-in-output", "Leave the prompts out of the outputs.", False, "bool"),
    _whole("num-requests", "Requests to send.", 30000),
    _text("check-perf-json", "JSON file of latencies in ms, to compare with.", None),
    _text("check-perf-key", "Key of the latency in that file.", None),
    _number("check-perf-atol", "Allowed extra ms.", 50.0),
    _number("check-perf-rtol", "Allowed extra fraction.", 0.05),
    _LLMAPI,
    _text("dataset", "JSON file of prompts (for dataset).", None),
    _text("tokenizer-dir", "Model folder (for dataset).", None),
    _TOKENIZER_TYPE,
    _number("op-tokens-per-word", "Output tokens per word (for dataset).", 1.3),
    _whole("input-mean", "Mean prompt length (for token-norm-dist)."),
    _whole("input-stdev", "Its standard deviation."),
    _whole("output-mean", "Mean output length (for token-norm-dist)."),
    _whole("output-stdev", "Its standard deviation."),
    _text("histogram-key", "Key of the histogram (for token-from-histogram).", None),
    _whole("vocab-size", "Random token ids are below this.", 1000, is_ours=True),
    _whole("seed", "Seed of lengths, ids and delays.", 0, is_ours=True),
)
VLLM_FLAGS: Final = (
    *_GRPC,
    *_OWN_TLS,
    _text("model m", "Triton model.", "vllm_model"),
    _number("stream-timeout t", "Longest duration of the stream in seconds."),
    _whole("offset", "Added to the ids of requests.", 0),
    _text("input-prompts", "File with a prompt on each line.", "prompts.txt"),
    _text("results-file", "File to write the outputs to.", "results.txt"),
    _whole("iterations", "How often each prompt is sent.", 1),
    _switch("streaming-mode s", "Stream the outputs."),
    _switch("exclude-inputs-in-outputs", "Leave the prompts out of the outputs."),
    _text("lora-name l", "Adapter of multi_lora.json.", None),
)
QUEUE_FLAGS: Final = (
    *_REQUEST,
    _switch("verbose v", "Print every refusal."),
    *_LOAD[1:2],
    _text("protocol p i", "http or grpc.", "http", choices=PROTOCOLS),
    dataclasses.replace(_CONCURRENCY, is_ours=True),
    _whole("num-requests", "Equal requests to send.", 30),
    _whole(
        "input-len",
        "Tokens of each prompt, without a tokenizer or a file of token ids.",
        512,
        is_ours=True,
    ),
    _unused("ssl s", "the original never uses TLS.", kind=_BARE),
    _unused("request-id", "each request has one of its own."),
    _unused("output-tokens-csv", "outputs are not compared."),
    _unused("requested-outputs", "outputs are not read.", kind=_TEXTS),
)
PROGRAMS: Final = (
    Program(
        *("inflight-batcher-llm", TOKEN_FLAGS, "token_client"),
        *("Send one prompt to `tensorrt_llm`", "inflight_batcher_llm_client.py"),
    ),
    Program(
        *("end-to-end-grpc", TEXT_FLAGS, "text_client"),
        *("Send prompts to `ensemble`", "end_to_end_grpc_client.py"),
    ),
    Program(
        *("speculative-decoding", SPECULATION_FLAGS, "speculative_client"),
        *("Decode with a draft and a target model", "e2e_grpc_speculative_decoding_client.py"),
    ),
    Program(
        *("end-to-end-test", ENSEMBLE_TEST_FLAGS, "ensemble_test"),
        *("Compare and measure the ensemble", "end_to_end_test.py"),
    ),
    Program(
        *("benchmark-core-model", BENCHMARK_FLAGS, "benchmark"),
        *("Measure `tensorrt_llm` alone", "benchmark_core_model.py"),
    ),
    Program(
        *("client-lora", VLLM_FLAGS, "vllm_client"),
        *("Send a file of prompts to `vllm_model`", "client_lora.py"),
    ),
    Program(
        *("test-max-queue-size", QUEUE_FLAGS, "queue_test"),
        *("Check that a full queue refuses requests", "test_max_queue_size.py"),
    ),
)
