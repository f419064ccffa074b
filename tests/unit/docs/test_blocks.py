"""Every block of the documentation runs, is data, or has a reason why it does not run."""

import tomllib
from pathlib import Path

import pytest
import yaml

from support.documentation import (
    REASONS,
    ROOT,
    RUN,
    SHOWN,
    TUTORIAL_REASONS,
    TUTORIALS,
    Block,
    blocks,
    console_commands,
    is_printed,
    pages,
    parse,
    sandbox,
)

ALL = [block for page in pages() for block in blocks(page)]
READERS = {"toml": tomllib.loads, "yaml": yaml.safe_load}


def test_blocks_are_found() -> None:
    assert {"README.md", "docs/library.md"} <= {block.page for block in ALL}


def test_every_block_names_a_known_language() -> None:
    assert [str(block) for block in ALL if block.language not in RUN | SHOWN] == []


def test_what_does_not_run_has_a_known_reason() -> None:
    unknown = [(str(x), x.reason) for x in ALL if x.reason and x.reason not in REASONS]
    assert unknown == []
    assert [str(block) for block in ALL if block.reason and block.language not in RUN] == []


def test_every_command_of_a_tutorial_runs() -> None:
    left_out = [block for block in ALL if block.page.startswith(TUTORIALS) and block.reason]
    assert [str(x) for x in left_out if x.reason not in TUTORIAL_REASONS] == []


def test_no_block_is_written_by_indentation_alone() -> None:
    """Such a block has no language, so it is unknown whether it runs."""
    found = []
    for page in pages():
        fenced = False
        lines = page.read_text(encoding="utf-8").splitlines()
        before = ""
        for number, line in enumerate(lines, start=1):
            fenced ^= line.lstrip().startswith("```")
            in_list = before.lstrip().startswith(("- ", "* ", "1. ", "+ "))
            if line.startswith("    ") and not fenced and not in_list and "```" not in line:
                after_blank = number > 1 and not lines[number - 2].strip()
                if after_blank and page.name != "ARCHITECTURE.md":
                    found.append(f"{page.relative_to(ROOT)}:{number}")
            elif line.strip() and not line.startswith("  "):
                before = line
    assert found == []


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in READERS], ids=lambda block: str(block)
)
def test_data_can_be_read(block) -> None:
    READERS[block.language](block.source)


def test_commands_and_what_they_print() -> None:
    source = "$ first \\\n    --flag\n$ second\none\ntwo\n"
    assert list(console_commands(source)) == [
        ("first \\\n    --flag", ""),
        ("second", "one\ntwo\n"),
    ]


@pytest.mark.parametrize(
    ("expected", "is_equal"),
    [("a\nb", True), ("a ...\nb", False), ("...b", True), ("a", False), ("...", True)],
)
def test_dots_stand_for_any_text(expected: str, is_equal: bool) -> None:
    assert is_printed(expected, "a  \nb\n") is is_equal


def test_a_reason_is_read_from_the_line_above() -> None:
    page = (
        "```sh\none\n```\n\n<!-- not run: needs a GPU -->\n```sh\ntwo\n```\n\n```sh\nthree\n```\n"
    )
    assert [block.reason for block in parse("page.md", page)] == [None, "needs a GPU", None]


def test_a_block_in_a_list_loses_its_indentation() -> None:
    [block] = parse("page.md", "- first:\n\n  ```sh\n  if true; then\n    ls\n  fi\n  ```\n")
    assert block.source == "if true; then\n  ls\nfi\n"


def run_in_sandbox(folder: Path, *sources: tuple[str, str], page: str = "page.md") -> None:
    with sandbox(folder, shared=None) as opened:
        for language, source in sources:
            opened.run(Block(page, 7, language, source, None))


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("sh", "ls MODEL/config.json zh/adapter_config.json path/to/triton_model_repo\n"),
        ("console", "$ echo one; echo two\none\n...\n$ basename /srv/models\nmodels\n"),
        ("python", "assert __import__('pathlib').Path('charent').is_dir()\n"),
    ],
)
def test_a_block_that_ends_well(tmp_path: Path, language: str, source: str) -> None:
    run_in_sandbox(tmp_path, (language, source))


def test_the_blocks_of_a_page_run_in_one_session(tmp_path: Path) -> None:
    """Variables, exported or not, functions and the current folder stay, as in a terminal."""
    run_in_sandbox(
        tmp_path,
        ("sh", "export KEY=secret\nshown=yes\nmkdir -p work\ncd work\n"),
        ("console", "$ echo $KEY $shown; basename $PWD\nsecret yes\nwork\n"),
        ("python", "import os\nassert os.environ['KEY'] == 'secret'\n"),
    )


def test_a_page_starts_its_next_server_after_ctrl_c() -> None:
    page = "```sh\none\n```\nStop it with Ctrl-C.\n```sh\ntwo\n```\n```sh\nthree\n```\n"
    assert [block.follows_ctrl_c for block in parse("page.md", page)] == [False, True, False]


@pytest.mark.parametrize(
    ("language", "source", "message"),
    [
        ("sh", "true | false | true\n", "page.md:7 ended with status 1"),
        ("sh", "echo $missing\n", "unbound variable"),
        ("python", "assert False\n", "AssertionError"),
        ("console", "$ echo one\ntwo\n", "prints\none"),
        ("sh", "curl -s http://127.0.0.1:1/ &\nwait\n", "page.md:7 ended with status 1"),
    ],
)
def test_a_block_that_fails(tmp_path: Path, language: str, source: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_in_sandbox(tmp_path, (language, source))


def test_absolute_paths_of_a_page_stay_in_the_folder(tmp_path: Path) -> None:
    run_in_sandbox(tmp_path, ("sh", "mkdir -p /opt/made-by-a-page/ s3://bucket/x\n"))
    assert (tmp_path / "opt" / "made-by-a-page").is_dir()
    assert (tmp_path / "s3:").is_dir()
