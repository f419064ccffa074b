"""docs/support-triton.md has a row for every name that Triton's users know, and no other."""

import ast
import re
from pathlib import Path

import pytest

import loraplex
from loraplex.cli.triton import FLAGS, as_settings
from loraplex.compat.client.programs import PROGRAMS
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.triton.roles import KINDS, PART_PARAMETERS, TENSORRT_LLM_PARAMETERS
from loraplex.compat.triton.setting_rows import ENGINE_ARGS, PARALLEL
from loraplex.core.config import ModelConfig
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import FIELDS, LORA_NAME
from tools.triton_page import sections

SRC = Path(loraplex.__file__).parent

DATA = Path(__file__).parent / "data"
ROUTE = re.compile(r"^(GET|POST|PUT|DELETE) /")


def read_names(file: str) -> dict[str, set[str]]:
    """Names by title. `[title]` stands above its names; a route is a line of its own."""
    names: dict[str, set[str]] = {}
    title = ""
    for line in (DATA / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            title = line.strip("[]")
            names.setdefault(title, set())
        elif line and not line.startswith("#"):
            names[title] |= {line} if ROUTE.match(line) else set(line.split())
    return names


KNOWN = read_names("triton_names.txt")
OTHERS = read_names("other_versions.txt")
ROWS = {section.title: section.rows for section in sections()}


def test_every_table_has_a_list_and_every_list_a_table():
    assert ROWS.keys() == KNOWN.keys()
    assert OTHERS.keys() <= KNOWN.keys()


def formatted(names):
    """Programs take `_` and `-` in flags as the same."""
    return {name.replace("_", "-") if name.startswith("--") else name for name in names}


@pytest.mark.parametrize("title", KNOWN)
def test_every_name_has_one_row(title):
    names = [name for row in ROWS[title] for name in row.names]
    assert sorted(formatted(KNOWN[title]) - formatted(names)) == []
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("title", KNOWN)
def test_what_no_replaced_system_has_is_marked(title):
    known = formatted(KNOWN[title] | OTHERS.get(title, set()))
    unknown = [row.name for row in ROWS[title] if not known & formatted(row.names)]
    assert unknown == [row.name for row in ROWS[title] if row.is_ours]


@pytest.mark.parametrize("title", OTHERS)
def test_the_names_of_other_versions_have_rows_too(title):
    names = {name for row in ROWS[title] for name in row.names}
    assert sorted(formatted(OTHERS[title]) - formatted(names)) == []
    assert sorted(KNOWN[title] & OTHERS[title]) == []


# ---------------------------------------------------------------- what works is read somewhere


def read_words(*files):
    """Attributes, keyword arguments and texts of the code that acts."""
    words = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return words


def is_read(name, words):
    """Whole, or put together of a beginning and an end, as in f"return_{name}"."""
    ends = (at for at, letter in enumerate(name, start=1) if letter == "_")
    return name in words or any(name[:at] in words and name[at:] in words for at in ends)


def acting(folder, *tables):
    return [file for file in (SRC / folder).glob("*.py") if file.name not in tables]


def working(rows):
    return [row for row in rows if row.support is Support.WORKS]


def program_files(module, found):
    """The file of a client program and those that it imports, but for the tables of flags."""
    file = SRC.parent / f"{module.replace('.', '/')}.py"
    if (
        not module.startswith("loraplex.compat.client.")
        or module.endswith(".programs")
        or file in found
    ):
        return found
    found.append(file)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            program_files(node.module, found)
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.original)
def test_every_flag_of_a_client_that_works_is_read(program):
    words = read_words(*program_files(f"loraplex.compat.client.{program.module}", []))
    # A flag with a tensor is read by flag_tensors.
    works = [row.key for row in working(program.flags) if not row.tensor]
    assert [name for name in works if name not in words] == []


@pytest.mark.parametrize("rows", [BUILD_FLAGS, CHECKPOINT_FLAGS], ids=["build", "checkpoint"])
def test_every_flag_of_a_build_that_works_is_read(rows):
    words = read_words(*acting("compat/convert", "flag_tables.py"), SRC / "cli" / "compat.py")
    assert [row.name for row in working(rows) if row.name not in words] == []


def test_every_flag_of_tritonserver_that_works_is_read():
    words = read_words(SRC / "cli" / "triton.py")
    tls = dict.fromkeys(("grpc_use_ssl", "grpc_server_cert", "grpc_server_key"), "1")
    for row in working(FLAGS):
        name = row.name[2:].replace("-", "_")
        without = {flag: value for flag, value in tls.items() if name in tls}
        changed = {**without, name: "0" if name == "grpc_use_ssl" else "1.pem"}
        changed = changed if without else {name: "1"}
        assert name in words or as_settings(without) != as_settings(changed), name


@pytest.mark.parametrize(
    "rows",
    [TENSORRT_LLM_PARAMETERS, *PART_PARAMETERS.values(), ENGINE_ARGS],
    ids=["tensorrt_llm", *(role.value for role in PART_PARAMETERS), "model.json"],
)
def test_every_key_of_a_repository_that_works_is_read(rows):
    words = read_words(
        *acting("compat/triton", "setting_rows.py", "roles.py", "five_models.py"),
    )
    words |= set(PARALLEL)
    settings = set(ModelConfig.__struct_fields__)
    for row in working(rows):
        assert row.setting in settings if row.setting else row.key in words, row.key


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_tensor_that_works_is_read(kind):
    words = read_words(*acting("frontends/kserve/models", "kinds.py"))
    words |= read_words(*acting("frontends/kserve"))
    assert [row.field for row in working(kind.inputs) if not is_read(row.field, words)] == []


def test_every_sampling_parameter_that_works_is_read():
    words = read_words(SRC / "frontends" / "kserve" / "models" / "vllm.py")
    fields = set(SamplingParams.__struct_fields__) | {LORA_NAME}
    names = [row.name for row in working(FIELDS.values())]
    assert [name for name in names if name not in words | fields] == []
