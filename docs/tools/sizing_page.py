"""docs/sizing.md with what `loraplex plan` prints for the commands on the page."""

import contextlib
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.demo import ADAPTER_PATHS, BASE_PATH

_PAGE: Final = Path(__file__).parents[1] / "sizing.md"
_COMMAND: Final = re.compile(r"^\$ (loraplex plan (?:[^\\\n]|\\\n)+)\n[^`]*", re.MULTILINE)
_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
}
_MODELS: Final[dict[str, dict[str, Any]]] = {
    "Llama-3.1-8B-Instruct": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B-Instruct": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""Fields of the models' config.json: a plan reads no weights."""


def sizing_page() -> str:
    """Return the page with the output of each command below it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, fields in _MODELS.items():
            Path(name).mkdir()
            Path(name, "config.json").write_text(json.dumps(_LLAMA | fields), encoding="utf-8")
        Path("capitals").symlink_to(BASE_PATH)
        Path("adapters").mkdir()
        for name, path in ADAPTER_PATHS.items():
            shutil.copytree(path, Path("adapters", name))
        return _COMMAND.sub(_with_output, _PAGE.read_text(encoding="utf-8"))


def _with_output(match: re.Match[str]) -> str:
    words = shlex.split(match[1].replace("\\\n", " "))
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    if result.exit_code != 0:
        raise ValueError(f"{match[1]} ended with status {result.exit_code}: {result.output}")
    return f"$ {match[1]}\n{result.stdout}"
