"""Forms of .github have the fields that GitHub needs; no page names an address that is not ours."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml"))
POLICIES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
FIELDS = {
    "markdown": {"value"},
    "textarea": {"label"},
    "input": {"label"},
    "dropdown": {"label", "options"},
}
"""Required attributes of each type of element."""


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_a_form_has_what_github_needs(file: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    elements = form["body"]
    assert [one for one in elements if not FIELDS[one["type"]] <= one["attributes"].keys()] == []
    named = [one["id"] for one in elements if one["type"] != "markdown"]
    assert len(named) == len(set(named)) > 0
    # All options are texts: YAML reads a bare Yes or No as something else.
    options = [option for one in elements for option in one["attributes"].get("options", [])]
    assert all(isinstance(option, str) for option in options)


@pytest.mark.parametrize("file", [*FORMS, *POLICIES], ids=lambda file: file.name)
def test_no_address_is_invented(file: Path) -> None:
    assert re.findall(r"https?://\S+|\S+@\S+\.\w+", file.read_text(encoding="utf-8")) == []


def test_the_paths_in_the_forms_exist() -> None:
    for file in [*FORMS, ROOT / ".github" / "pull_request_template.md"]:
        paths = re.findall(r"\b(?:docs|src)/[\w./-]*\w", file.read_text(encoding="utf-8"))
        assert [path for path in paths if not (ROOT / path).exists()] == []
