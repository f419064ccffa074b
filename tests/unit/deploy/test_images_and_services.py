"""The Dockerfiles, the compose file and the unit of systemd, as far as no daemon is needed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from loraplex.app.access import OPEN_PATHS

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "deploy" / "compose"
UNIT = ROOT / "deploy" / "systemd" / "loraplex.service"
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile*"))


def compose() -> dict[str, dict[str, dict]]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_user_and_reports_its_health(path: Path):
    text = path.read_text()
    final = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER (?!0|root)", final, re.MULTILINE)
    assert 'ENTRYPOINT ["loraplex"]' in final
    assert "VOLUME /var/lib/loraplex" in final
    (probed,) = re.findall(r"http://127\.0\.0\.1:8000(/[\w/]+)", final)
    assert probed in OPEN_PATHS
    assert "LORAPLEX_NATIVE=1" in text
    assert "API_KEY" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_no_process_of_an_image_compiles_the_standard_library(path: Path):
    """The base image has no bytecode of it, and a container may write none."""
    final = path.read_text().rpartition("\nFROM ")[2]
    assert "PYTHONDONTWRITEBYTECODE=1" in final
    compiled = final.index("-m compileall -q -x '/tests?/' /usr/local/lib/python3.*")
    assert compiled < final.index("\nUSER ")


def test_the_context_of_an_image_has_what_the_sdist_has():
    kept = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    pyproject = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r"^sdist.exclude = (.+)$", pyproject, re.MULTILINE)
    assert kept == {*re.findall(r'"!/([^"]+)"', line), "constraints.txt"}


def test_compose_mounts_files_that_exist_and_publishes_on_loopback():
    services = compose()["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).is_file(), source
            else:
                assert source in compose()["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    build = services["loraplex"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


def test_variables_are_settings():
    texts = [(COMPOSE / "compose.yaml").read_text(), *(path.read_text() for path in DOCKERFILES)]
    names = {name for text in texts for name in re.findall(r"LORAPLEX_([A-Z_]+)", text)}
    own = {"NATIVE", "API_KEYS"}  # of the build, and of the file of keys
    settings = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    )
    assert {name.lower() for name in names - own} <= settings


def test_systemd_accepts_the_unit(tmp_path: Path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/loraplex/bin/loraplex", "/bin/true"))
    finished = subprocess.run([analyze, "verify", copy], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
