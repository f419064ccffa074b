"""Hints for flags that a command does not have: the flag that was probably meant."""

import difflib
from collections.abc import Sequence, Set
from types import MappingProxyType
from typing import Any, Final, cast

import typer

from loraplex.compat.triton.engine_args import row_of
from loraplex.core.support import Support

UsageError: Final = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Typer exports only subclasses of the error for a wrong command line."""
_MODEL: Final = "give the model as the argument"
_ALWAYS_FULL: Final = "with --device cuda all layers are on the GPU"
OF_OTHERS: Final = MappingProxyType(
    {
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
OF_MODELS: Final = frozenset({"-m", "--model", "--model-path", "-hf", "--hf-repo"})
"""Other systems' flags for the model, which is an argument here."""
_TAKEN_BY_SERVE: Final = frozenset({"--max-num-seqs", "--help-all"})
"""Flags of the command that takes flags of vLLM, `loraplex serve`."""
_HELP: Final = frozenset({"--help", "--help-all"})
_SIMILARITY: Final = 0.72
"""Least likeness of a name that is suggested, from 0 to 1: less likely ones mislead."""


def with_hint(error: Exception, words: Sequence[str]) -> Exception:
    """Return an error about a flag that does not exist with a hint; other errors as they are.

    words: the command line, for flags of which the parser names only the first letter.
    """
    if not hasattr(error, "possibilities"):
        return error
    context = cast("Any", error).ctx
    flag = _whole_flag(str(getattr(error, "option_name", "")), words)
    return UsageError(f"No such option: {flag}. {_hint(flag, context)}", context)


def flags_of(context: Any) -> set[str]:
    """Return all flags of a context's command."""
    parameters = context.command.get_params(context)
    return {
        flag
        for p in parameters
        if p.param_type_name == "option"
        for flag in (*p.opts, *p.secondary_opts)
    }


def _hint(flag: str, context: Any) -> str:
    known = flags_of(context)
    path = context.command_path
    if text := _of_others(flag, known):
        return f"{_capital(text)}."
    if flag in OF_MODELS and any(p.name == "model" for p in context.command.params):
        return f"{_capital(_MODEL)}: `{path} MODEL`."
    if known >= _TAKEN_BY_SERVE and (text := _of_vllm(flag)):
        return text
    by_name = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = difflib.get_close_matches(flag.lstrip("-"), by_name, 3, _SIMILARITY)
    if close:
        return f"Did you mean {' or '.join(by_name[name] for name in close)}?"
    return f"See `{path} {max(known & _HELP, key=len)}`."


def _of_others(flag: str, known: Set[str]) -> str:
    """Return what replaces a flag of another server; empty: the command has no such flag."""
    text = OF_OTHERS.get(flag, "")
    return text if named_flags(text) <= known else ""


def named_flags(text: str) -> set[str]:
    """Return the flags that a text names."""
    return {word.rstrip(":;,") for word in text.split() if word.startswith("-")}


def _whole_flag(flag: str, words: Sequence[str]) -> str:
    """Return the word of a flag of which the parser names only the first letter."""
    names = [word.partition("=")[0] for word in words]
    if flag in names:
        return flag
    return next((n for n in names if n.startswith(flag) and not n.startswith("--")), flag)


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
