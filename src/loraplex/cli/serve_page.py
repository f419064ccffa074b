"""The command line of `loraplex serve`: its words, its --help and its errors."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer

from loraplex.cli.flag_hints import flags_of
from loraplex.cli.help_page import FlagPage
from loraplex.cli.vllm_flags import repeated

_COMMON: Final = frozenset(
    {
        *("model", "name", "config", "adapter", "adapter_dir", "help_all", "help"),
        *("host", "http_port", "port", "api_key", "api_keys_file", "allow_no_keys"),
        *("device", "dtype", "quantization", "tensor_parallel_size"),
        *("max_model_len", "max_num_seqs", "max_lora_rank", "memory_bytes"),
        *("chat_template", "tool_call_parser", "reasoning_parser"),
        *("log_level", "log_requests", "state_dir"),
    }
)
"""Parameters that --help shows; --help-all has all."""
_ALL: Final = "loraplex.all_flags"


class ServePage(FlagPage):
    """A command that takes flags as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(repeated(list(_hyphened(args, flags_of(ctx))))))

    def shown_parameters(self, ctx: Any) -> list[Any]:
        parameters = super().shown_parameters(ctx)
        if ctx.meta.get(_ALL):
            return parameters
        return [parameter for parameter in parameters if parameter.name in _COMMON]


def print_all_flags(context: typer.Context, is_given: bool) -> None:
    """Print --help with every flag, and end."""
    if is_given:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _hyphened(args: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yield the words, with `-` for `_` in the names of flags, as vLLM reads them."""
    for word in args:
        name, equals, value = word.partition("=")
        hyphened = name.replace("_", "-")
        is_flag = name.startswith("--") and hyphened in known
        yield f"{hyphened}{equals}{value}" if is_flag else word
