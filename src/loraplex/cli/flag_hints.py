"""Hints for flags that `loraplex serve` does not have: the flag that was probably meant."""

import difflib
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from loraplex.compat.triton.engine_args import row_of
from loraplex.core.support import Support

_MODEL: Final = "give the model as the argument: `loraplex serve MODEL`"
_ALWAYS_FULL: Final = "with --device cuda all layers are on the GPU"
OF_OTHERS: Final = MappingProxyType(
    {
        "-m": _MODEL,
        "--model": _MODEL,
        "--model-path": _MODEL,
        "-hf": _MODEL,
        "--hf-repo": _MODEL,
        "-a": "use --name",
        "--alias": "use --name",
        "-c": "use --max-model-len",
        "--ctx-size": "use --max-model-len",
        "--num-ctx": "use --max-model-len",
        "--context-length": "use --max-model-len",
        "-ngl": _ALWAYS_FULL,
        "--gpu-layers": _ALWAYS_FULL,
        "--n-gpu-layers": _ALWAYS_FULL,
        "--lora": "use --adapter NAME=PATH",
        "--lora-scaled": "use --adapter NAME=PATH; the scale is that of the adapter's config",
        "--lora-paths": "use --adapter NAME=PATH",
        "-np": "use --max-num-seqs",
        "--parallel": "use --max-num-seqs",
        "--max-running-requests": "use --max-num-seqs",
        "-b": "use --max-num-batched-tokens",
        "--batch-size": "use --max-num-batched-tokens",
        "-ub": "use --max-prefill-chunk",
        "-t": "use --num-threads",
        "--threads": "use --num-threads",
        "-fa": "the fastest attention is chosen: see --attention-backend",
        "--flash-attn": "the fastest attention is chosen: see --attention-backend",
        "-ctk": "use --kv-dtype",
        "--cache-type-k": "use --kv-dtype",
        "--jinja": "chat templates are always read as Jinja: leave it out",
        "--chat-template-file": "use --chat-template",
        "--api-key-file": "use --api-keys-file",
        "--mem-fraction-static": "use --kv-cache-fraction",
        "--keep-alive": "a model stays in memory: leave it out",
        "--verbose": "use --log-level debug",
        "-v": "use --log-level debug",
        "--speculative-config": "use --num-draft-tokens: draft tokens are those of the prompt",
        "--disable-log-stats": "metrics are always there: leave it out",
    }
)
"""Flags of llama.cpp, Ollama and SGLang, and those of vLLM that are another setting here."""
_SIMILARITY: Final = 0.72
"""Least likeness of a name that is suggested, from 0 to 1: less likely ones mislead."""


def hint(flag: str, known: Iterable[str]) -> str:
    """Return a sentence about a flag that does not exist; known: all that do."""
    if flag in OF_OTHERS:
        return f"{_capital(OF_OTHERS[flag])}."
    if text := _of_vllm(flag):
        return text
    by_name = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = difflib.get_close_matches(flag.lstrip("-"), by_name, 3, _SIMILARITY)
    names = " or ".join(by_name[name] for name in close)
    return f"Did you mean {names}?" if names else "See `loraplex serve --help-all`."


def _of_vllm(flag: str) -> str:
    """Return what an engine argument of vLLM does here; empty: the flag is none."""
    try:
        row = row_of(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    except ValueError:
        return ""
    match row.support:
        case Support.NO_EFFECT:
            return f"vLLM's flag has no effect here ({row.reason}): leave it out."
        case Support.REFUSED:
            return f"vLLM's flag is not served ({row.reason}): leave it out."
    return f"As vLLM's flag: {row.reason or f'the setting {row.setting}'}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
