"""docs/support-triton.md: what clients and operators of Triton, of its TensorRT-LLM backend and of
its vLLM backend know, and what is done with it here.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from loraplex.cli.convert import convert_lora, extract_lora
from loraplex.cli.triton_flags import FLAGS, OWN_FLAGS
from loraplex.cli.triton_tools import LAUNCH_FLAGS, fill_template
from loraplex.compat.client.programs import PROGRAMS
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.triton.engine_args import ENGINE_ARGS
from loraplex.compat.triton.parameters import TENSORRT_LLM_PARAMETERS
from loraplex.compat.triton.part_parameters import PART_PARAMETERS
from loraplex.compat.triton.roles import KINDS, Role
from loraplex.core.support import Feature, Section, Support
from loraplex.frontends.kserve.messages import REQUEST_PARAMETERS, TENSOR_PARAMETERS
from loraplex.frontends.kserve.models.kinds import FIELDS, IGNORED_INPUTS, ModelKind
from tools.commands import command_features
from tools.markdown import page
from tools.not_served import NOT_SERVED
from tools.protocol import (
    extension_features,
    header_features,
    label_features,
    metric_features,
    route_features,
    rpc_features,
    setting_features,
)
from tools.template_variables import TEMPLATE_VARIABLES

_ABOUT = """\
This page is written by `make tables` from the tables of the code; a test compares it.

**works**: it has its original meaning, or the meaning in the note. **accepted without effect**: it
changes nothing, and this is logged once. **refused**: an error that names it; a refused metric is
absent. A refused tensor, field or key is accepted if its value has no effect (empty, false, 0).
Names that no replaced system has are marked as loraplex's own."""

_COMMANDS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {
        "fill_template.py": fill_template,
        "hf_lora_convert.py": convert_lora,
        "extract_lora.py": extract_lora,
    }
)
"""Commands whose flags are their functions' parameters, by original."""
_BATCHING = "controls of sequence batching"


def sections() -> Iterator[Section]:
    for role, kind in KINDS.items():
        yield from _tensors(role, kind)
    yield Section("Parameters of a request", REQUEST_PARAMETERS)
    yield Section("Parameters of a tensor", TENSOR_PARAMETERS)
    yield Section(
        "Sampling parameters of the vLLM backend", tuple(row.feature for row in FIELDS.values())
    )
    yield Section(
        "Parameters of config.pbtxt: tensorrt_llm",
        tuple(row.feature for row in TENSORRT_LLM_PARAMETERS),
    )
    for role, rows in PART_PARAMETERS.items():
        if rows:
            title = f"Parameters of config.pbtxt: {role.value}"
            yield Section(title, tuple(row.feature for row in rows))
    yield Section(
        "Names of the templates",
        TEMPLATE_VARIABLES,
        "Variables that fill_template.py replaces in addition to the parameters.",
    )
    yield Section("Keys of model.json", tuple(row.feature for row in ENGINE_ARGS))
    yield Section("HTTP routes", route_features())
    yield Section("gRPC methods", rpc_features())
    yield Section("Headers", header_features())
    yield Section("Trace and log settings", setting_features())
    yield Section("Extensions", extension_features())
    yield Section(
        "Flags of tritonserver", (*OWN_FLAGS, *FLAGS), "As flags of `loraplex compat triton`."
    )
    yield Section("Flags of convert_checkpoint.py", tuple(row.feature for row in CHECKPOINT_FLAGS))
    yield Section(
        "Flags of trtllm-build and build.py",
        tuple(row.feature for row in BUILD_FLAGS),
        "A switch may stand alone, or with enable or disable; a plugin with a type or disable.",
    )
    yield Section("Flags of launch_triton_server.py", tuple(row.feature for row in LAUNCH_FLAGS))
    for original, command in _COMMANDS.items():
        yield Section(f"Flags of {original}", command_features(command))
    for program in PROGRAMS:
        yield Section(f"Flags of {program.original}", tuple(row.feature for row in program.flags))
    yield Section("Metrics", metric_features())
    yield Section("Labels of metrics", label_features())
    yield from NOT_SERVED


def triton_page() -> str:
    return page("Triton: what is supported", _ABOUT, sections())


def _tensors(role: Role, kind: ModelKind) -> Iterator[Section]:
    inputs = [row.feature for row in kind.inputs]
    if role is Role.TENSORRT_LLM:
        inputs += [Feature(name, Support.NO_EFFECT, _BATCHING) for name in sorted(IGNORED_INPUTS)]
    yield Section(f"Inputs of {role.value}", tuple(inputs))
    yield Section(f"Outputs of {role.value}", tuple(row.feature for row in kind.outputs))
