"""The console's files: libraries as they were published, texts in every language."""

import hashlib
import importlib.resources
import json
import re
from pathlib import Path

import pytest

STATIC = Path(str(importlib.resources.files("loraplex.frontends.console"))) / "static"
LOCK = Path(__file__).parents[4] / "console" / "package-lock.json"
LANGUAGES = ("en", "zh", "ja")
OWN = sorted(p for p in STATIC.rglob("*") if p.suffix in {".js", ".css", ".html"})
SECTION = re.compile(r"^  (\w+): \{$(.*?)^  \},$", re.MULTILINE | re.DOTALL)
WORD = re.compile(r'^    (\w+):\s+"((?:[^"\\]|\\.)*)",$', re.MULTILINE)
USED = re.compile(r"\bt\(\s*[\"'`](\w+)\.(\w+)[\"'`]")


def texts(language):
    source = (STATIC / "texts" / f"{language}.js").read_text()
    return {
        f"{section}.{word}": text
        for section, body in SECTION.findall(source)
        for word, text in WORD.findall(body)
    }


def test_libraries_are_those_that_were_vendored():
    vendor = STATIC / "vendor"
    sums = dict(
        reversed(line.split("  ")) for line in (vendor / "SHA256SUMS").read_text().splitlines()
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert found == sums


def test_the_lock_has_hashes_and_names_no_registry():
    packages = json.loads(LOCK.read_text())["packages"]
    libraries = {name: package for name, package in packages.items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in libraries.values())
    assert "resolved" not in LOCK.read_text()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_the_same_words(language):
    source = (STATIC / "texts" / f"{language}.js").read_text()
    found = texts(language)
    assert found.keys() == texts("en").keys()
    assert len(found) == len(re.findall(r"^    \w+:", source, re.MULTILINE)), "a line of other form"
    for name, text in found.items():
        values = re.findall(r"\{\w+\}", text)
        assert sorted(values) == sorted(re.findall(r"\{\w+\}", texts("en")[name])), name


def test_every_text_that_is_used_exists():
    known = texts("en")
    for path in OWN:
        for section, word in USED.findall(path.read_text()):
            assert f"{section}.{word}" in known, path.name


def test_every_text_is_used():
    sources = "\n".join(p.read_text() for p in OWN if p.parent.name != "texts")
    for name in texts("en"):
        section, word = name.split(".")
        is_named = re.search(rf"[\"'`]{section}\.{word}[\"'`]", sources)
        is_composed = re.search(rf"`{section}\.\$\{{|`\$\{{\w+\}}\.{word}`", sources)
        assert is_named or is_composed, name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_keep_the_rules_of_the_policy(path):
    if path.parent.name == "vendor":
        return
    source = path.read_text()
    for refused in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "new Function",
        'style="',
    ):
        assert refused not in source
    assert not re.search(r"https?://(?!www\.w3\.org)", source), "an address of another server"
