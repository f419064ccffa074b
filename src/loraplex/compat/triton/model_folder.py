"""One model of a Triton model repository: `NAME/config.pbtxt` and its versions `NAME/1`, ..."""

import dataclasses
import os
import re
from pathlib import Path

from loraplex.compat.triton.notes import Notes
from loraplex.compat.triton.parameters import Parameters
from loraplex.compat.triton.pbtxt import ModelConfigProto, read_pbtxt, unfilled_fields
from loraplex.core.errors import ConfigError

CONFIG_FILE = "config.pbtxt"
_FIRST_VERSION = "1"
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    name: str
    path: Path
    config: ModelConfigProto
    parameters: Parameters
    unfilled: frozenset[str]
    """Names of top-level or nested fields whose value a template left open."""

    @property
    def pbtxt(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def version(self) -> str:
        """The newest one, as Triton's default policy has it."""
        versions = [entry.name for entry in self.path.iterdir() if _VERSION.fullmatch(entry.name)]
        return max(versions, key=int, default=_FIRST_VERSION)

    @property
    def version_path(self) -> Path:
        return self.path / self.version

    def line_of(self, field: str) -> str:
        """Where a field is written, for errors: `FILE, line N`, or the file alone."""
        return self._place(re.compile(rf"\b{re.escape(field)}\b\s*[:{{\[]"))

    def line_of_tensor(self, name: str) -> str:
        """The same for an input or output."""
        return self._place(re.compile(rf"""name\s*:\s*["']{re.escape(name)}["']"""))

    def _place(self, written: re.Pattern[str]) -> str:
        lines = self.pbtxt.read_text(encoding="utf-8").splitlines()
        line = next((i for i, text in enumerate(lines, start=1) if written.search(text)), None)
        return str(self.pbtxt) if line is None else f"{self.pbtxt}, line {line}"

    def find_folder(self, written: str) -> Path | None:
        """The folder that a path in the configuration means; None if there is none.

        As it is written, from the working directory; then below the model's own folder. Of an
        absolute path that is not here what follows the model's name is looked for there: a
        repository that is mounted elsewhere.
        """
        path = Path(written).expanduser()
        places = [path, self.path / path, self.version_path / path]
        if path.is_absolute() and self.name in path.parts:
            at = len(path.parts) - 1 - path.parts[::-1].index(self.name)
            places.append(self.path.joinpath(*path.parts[at + 1 :]))
        found = next((place for place in places if place.is_dir()), None)
        return None if found is None else Path(os.path.abspath(found))


def read_model_folders(
    repository: Path, notes: Notes, problems: dict[str, str]
) -> list[ModelFolder]:
    """All models of a repository, by name. Raises ConfigError if there is none.

    Files and hidden folders are no models; a folder without config.pbtxt is left out, and noted.
    problems: gets the reason why a folder cannot be read, by its name.
    """
    try:
        entries = sorted(repository.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read model repository {repository}: {error.strerror}") from error
    folders = []
    for entry in entries:
        if entry.name.startswith(".") or not os.path.isdir(entry):
            continue
        if os.path.isfile(entry / CONFIG_FILE):
            try:
                folders.append(read_model_folder(entry))
            except ConfigError as error:
                problems[entry.name] = error.message
        else:
            notes.warning(f"{entry} is left out: it has no {CONFIG_FILE}")
    if not folders and not problems:
        raise ConfigError(f"model repository {repository} has no folder with a {CONFIG_FILE}")
    return folders


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ConfigError."""
    pbtxt = path / CONFIG_FILE
    config = read_pbtxt(pbtxt)
    if config.name not in ("", path.name):
        raise ConfigError(
            f"{pbtxt}: unexpected directory name '{path.name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    return ModelFolder(
        name=path.name,
        path=path,
        config=config,
        parameters=Parameters(config, pbtxt),
        unfilled=unfilled_fields(pbtxt.read_text(encoding="utf-8")),
    )
