"""The release workflow publishes only what was checked and run, without a secret."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLISH = "pypa/gh-action-pypi-publish"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load(TEXT)["jobs"]


def used(job: dict[str, Any]) -> list[str]:
    """Return the actions that a job uses, without their versions."""
    return [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]


def test_only_one_job_may_publish_and_it_runs_after_all_others(jobs: dict[str, Any]) -> None:
    publishing = {name for name, job in jobs.items() if PUBLISH in used(job)}
    assert publishing == {"publish"}
    assert set(jobs["publish"]["needs"]) == jobs.keys() - publishing
    assert "github.ref_type == 'tag'" in jobs["publish"]["if"]


def test_no_secret_is_used_and_rights_are_least(jobs: dict[str, Any]) -> None:
    assert not re.search(r"\bsecrets\b|password|api[-_]token", TEXT)
    assert yaml.safe_load(TEXT)["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == {"publish": {"id-token": "write"}}


def test_what_is_published_is_what_was_built(jobs: dict[str, Any]) -> None:
    artifacts = {
        step["with"]["name"]
        for job in jobs.values()
        for step in job["steps"]
        if "artifact" in step.get("uses", "")
    }
    assert artifacts == {"dist"}
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_commands_are_those_of_the_makefile_and_the_package(jobs: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = re.findall(r"run: make ([\w-]+)", TEXT)
    assert verbs == ["test-wheel"]
    assert all(re.search(rf"^{verb}:", makefile, re.MULTILINE) for verb in verbs)
    wheel = re.search(r"^wheel:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert wheel is not None
    assert "twine check --strict" in wheel[1]
    assert "check-wheel-contents" in wheel[1]
    (torch,) = (text for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert f'"{torch}" --index-url' in TEXT


def test_every_supported_python_is_tried(jobs: dict[str, Any]) -> None:
    classified = {
        found[1]
        for text in PROJECT["classifiers"]
        if (found := re.search(r"Python :: (3\.\d+)$", text))
    }
    assert set(jobs["smoke"]["strategy"]["matrix"]["python"]) == classified
