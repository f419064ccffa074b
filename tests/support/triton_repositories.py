"""Model repositories for Triton as their users write them, and what was read of them."""

import dataclasses
from pathlib import Path

from loraplex.compat.triton.repository import Repository, read_repositories
from loraplex.testing.running_server import PORT_FLAGS

FIVE = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")


@dataclasses.dataclass(frozen=True)
class Written:
    """A repository with the five models, of which only two values are filled in."""

    path: Path
    engine: Path

    def fill(self, model: str, **values: str) -> None:
        self.replace(model, **{f"${{{name}}}": value for name, value in values.items()})

    def replace(self, model: str, **texts: str) -> None:
        pbtxt = self.path / model / "config.pbtxt"
        text = pbtxt.read_text()
        for old, new in texts.items():
            assert old in text, f"{old} is not in {pbtxt}"
            text = text.replace(old, new)
        pbtxt.write_text(text)

    def line(self, model: str, fragment: str) -> int:
        lines = (self.path / model / "config.pbtxt").read_text().splitlines()
        return next(i for i, line in enumerate(lines, start=1) if fragment in line)

    def read(self, *wanted: str) -> Repository:
        return read_repositories([self.path], wanted or None)


def merged(repository: Repository, model: str) -> dict[str, object]:
    """The settings of one model, as the layers win."""
    settings: dict[str, object] = {}
    for layer in repository.layers:
        settings |= layer.values["models"].get(model, {})
    return settings


def source_of(repository: Repository, model: str, setting: str) -> str:
    layers = [r for r in repository.layers if setting in r.values["models"].get(model, {})]
    return layers[-1].source


def local_flags(state_dir: Path) -> list[str]:
    """Return the flags of a drop-in server on a CPU, on loopback ports that the system chooses."""
    return [*PORT_FLAGS, "--host", "127.0.0.1", "--device", "cpu", "--state-dir", str(state_dir)]
