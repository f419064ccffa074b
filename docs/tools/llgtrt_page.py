"""docs/support-llgtrt.md: what clients and operators of llgtrt know, and what is done with it."""

from collections.abc import Iterator
from typing import Final

from loraplex.cli.llgtrt import FLAGS, llgtrt
from loraplex.compat import llgtrt as llgtrt_files
from loraplex.core.support import Feature, Section
from tools import llgtrt_differences as differences
from tools.markdown import command_features, page

_ABOUT: Final = """\
This page is written by `make tables` from the tables of the code; a test compares it. The fields of
a request are in [OpenAI fields](fields-openai.md).

**works**: it has its original meaning, or the meaning in the note. **accepted without effect**: it
changes nothing, and this is logged once. **refused**: an error that names it."""

_ROUTES: Final = (
    Feature("/v1/completions", note="see the fields of the OpenAI routes", form="POST"),
    Feature("/v1/chat/completions", note="likewise", form="POST"),
    Feature(
        "/v1/run",
        note="the Guidance protocol, as events; `lora_model` and the fields of a completion, too",
        form="POST",
        other_names=("/guidance",),
    ),
    Feature("/v1/health/live", note="`Check complete`", form="GET"),
    Feature("/v1/health/ready", note="503 with the reason while it starts or drains", form="GET"),
    Feature("/v1/health/model", note="generates two tokens", form="GET"),
)


def sections() -> Iterator[Section]:
    flags = (*command_features(llgtrt), *FLAGS)
    yield Section("Flags", flags, "In addition, every setting has its flag.")
    for section in llgtrt_files.sections():
        yield Section(f"{section.title} in llgtrt.json5", section.rows, section.about)
    yield Section("Routes", _ROUTES, "They are there in `loraplex serve` as well.")
    for section in differences.sections():
        about = "`--llgtrt-compat` restores the behaviour of llgtrt."
        yield Section(section.title, section.rows, about)


def llgtrt_page() -> str:
    return page("llgtrt, name by name", _ABOUT, sections())
