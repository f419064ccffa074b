"""What the text of a source means."""

import pytest

from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.core.errors import InvalidAdapterError
from support.naming import naming

SUM = "ab" * 32


@pytest.mark.parametrize(
    ("text", "kind", "location", "suffix"),
    [
        ("/adapters/zh", SourceKind.LOCAL, "/adapters/zh", ""),
        ("v1.2", SourceKind.LOCAL, "v1.2", ""),
        ("./a/b", SourceKind.LOCAL, "./a/b", ""),
        ("~/a", SourceKind.LOCAL, "~/a", ""),
        ("a/b/c", SourceKind.LOCAL, "a/b/c", ""),
        ("/odd#name", SourceKind.LOCAL, "/odd#name", ""),
        ("file:///a%20b/zh.safetensors", SourceKind.LOCAL, "/a b/zh.safetensors", ".safetensors"),
        ("owner/na.me-1", SourceKind.HUB, "owner/na.me-1", ""),
        ("hf://owner/name", SourceKind.HUB, "owner/name", ""),
        (
            "https://h/zh.safetensors?x=1",
            SourceKind.HTTP,
            "https://h/zh.safetensors?x=1",
            ".safetensors",
        ),
        ("HTTP://h:8/zh/", SourceKind.HTTP, "http://h:8/zh/", ""),
        ("s3://bucket/team/zh/", SourceKind.OBJECT, "s3://bucket/team/zh", ""),
        ("https://h/zh.gguf?x=1", SourceKind.HTTP, "https://h/zh.gguf?x=1", ".gguf"),
        (
            "gs://bucket/zh.safetensors",
            SourceKind.OBJECT,
            "gs://bucket/zh.safetensors",
            ".safetensors",
        ),
    ],
)
def test_kinds(text, kind, location, suffix):
    reference = parse(text)
    assert (reference.kind, reference.location) == (kind, location)
    assert reference.file_suffix == suffix
    assert reference.sha256 is None


def test_hub_revisions_and_folders():
    reference = parse(f"hf://owner/name@v1.2/deep/zh#sha256={SUM.upper()}")
    assert (reference.revision, reference.folder, reference.sha256) == ("v1.2", "deep/zh", SUM)
    assert str(reference) == "hf://owner/name@v1.2/deep/zh"
    assert parse("hf://owner/name/zh.safetensors").file_suffix == ".safetensors"
    assert parse("hf://owner/name-GGUF/zh.gguf").file_suffix == ".gguf"
    assert not parse("hf://owner/name.gguf").file_suffix
    assert parse("hf://owner/name").revision == "main"


def test_a_relative_path_that_begins_here_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("adapters/zh").kind is SourceKind.HUB
    (tmp_path / "adapters").mkdir()
    assert parse("adapters/zh").kind is SourceKind.LOCAL


def test_a_signature_is_not_shown():
    assert str(parse("https://h/zh.safetensors?sig=secret")) == "https://h/zh.safetensors"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HTTPS://h/zh.safetensors?sig=secret", "https://h/zh.safetensors"),
        ("/a/what?.safetensors", "/a/what?.safetensors"),
        ("owner/name", "owner/name"),
        ("hf://owner/name@v1", "hf://owner/name@v1"),
        ("", ""),
    ],
)
def test_what_anybody_may_see(text, shown):
    assert shown_source(text) == shown


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ftp://h/zh", ("ftp://",)),
        ("javascript://h", ("file://", "hf://", "https://")),
        ("https://", ("https://",)),
        ("https:///zh", ("names",)),
        ("https://user:pw@h/zh", ("https://h/zh",)),
        ("https://h:99999/zh", ("https://h:99999/zh",)),
        ("https://[::1/zh", ("https://[::1/zh",)),
        ("https://h/a b", ("https://h/a b",)),
        ("https://h/a\r\nHost: x", ("https://h/a\\r\\nHost: x",)),
        ("https://h/zh#md5=1", ("sha256", "https://h/zh#md5=1")),
        ("https://h/zh#sha256=12", ("sha256", "https://h/zh#sha256=12")),
        ("hf://owner", ("hf://OWNER/NAME", "hf://owner")),
        ("hf://owner/name/../../x", ("hf://owner/name/../../x",)),
        ("hf://../name", ("hf://OWNER/NAME", "hf://../name")),
        ("s3://bucket", ("BUCKET/FOLDER", "s3://bucket")),
        ("s3:///key", ("BUCKET/FOLDER", "s3:///key")),
        ("s3://bucket/../other", ("s3://bucket/../other",)),
        ("s3://bucket/a::http://h/b", ("BUCKET/FOLDER",)),
        ("x" * 8193, (8193, 8192)),
        ("https://h/zh.zip", ("https://h/zh.zip", ".safetensors", ".gguf")),
        ("https://h/zh.tar.gz?x=1", ("https://h/zh.tar.gz", ".safetensors", ".gguf")),
        ("/a/zh.TAR", ("/a/zh.TAR", ".safetensors", ".gguf")),
    ],
)
def test_bad_ones(text, named):
    with pytest.raises(InvalidAdapterError, match=naming(*named)) as caught:
        parse(text)
    assert "pw" not in caught.value.message
