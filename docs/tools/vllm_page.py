"""docs/support-vllm.md: the flags of `vllm serve`, and what `loraplex serve` does with them."""

from collections.abc import Iterator
from typing import Final

from loraplex.cli.vllm_flags import FLAGS, OWN_FLAGS
from loraplex.core.support import Section
from tools.markdown import page

_ABOUT: Final = """\
This page is written by `make tables` from the tables of the code; a test compares it.

**works**: it has its original meaning, or the meaning in the note. **accepted without effect**: it
changes nothing, and this is logged once. **refused**: an error that names it.

The flags are those of `loraplex serve`, with `-` or `_` in their names. A flag and our own flag for
the same setting are an error if both are given. `--gpu-memory-utilization` is a share of the memory
that weights leave, not of all memory: `--memory` limits all. `--config` is a TOML file of our
settings. Every other engine argument of vLLM is
an error that reports what it would do here; their table is with
[Triton's vLLM backend](support-triton.md). Requests are described in
[OpenAI fields](fields-openai.md)."""


def sections() -> Iterator[Section]:
    yield Section("Flags of the same name", OWN_FLAGS)
    yield Section("Further flags", FLAGS)


def vllm_page() -> str:
    return page("vLLM, flag by flag", _ABOUT, sections())
