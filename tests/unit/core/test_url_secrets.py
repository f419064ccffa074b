"""No query and no user of a URL stands in a log line or an error, in those of libraries too."""

import json
import subprocess
import sys

import pytest

from loraplex.core.errors import AdapterLoadError, error_from_info
from loraplex.core.url_secrets import without_queries, without_url_secrets

SIGNED = "https://host:9000/bucket/zh.safetensors?X-Amz-Signature=secret&X-Amz-Date=1"
SHOWN = "https://host:9000/bucket/zh.safetensors?***"

CASES = [
    (SIGNED, SHOWN),
    (
        f'HTTP Request: GET {SIGNED} "HTTP/1.1 200 OK"',
        f'HTTP Request: GET {SHOWN} "HTTP/1.1 200 OK"',
    ),
    (f"a ('{SIGNED}'), b", f"a ('{SHOWN}'), b"),
    ("https://user:secret@host/x", "https://***@host/x"),
    ("http://us@er:sec@ret@host", "http://***@host"),
    ("s3://bucket/key?versionId=secret", "s3://bucket/key?***"),
    (f"--adapter=zh={SIGNED},task_id=1 next", f"--adapter=zh={SHOWN} next"),
    ("http://a/http://user:secret@b/x", "http://a/http://***@b/x"),
    ("with url: /bucket/zh?X-Amz-Signature=secret (Caused", "with url: /bucket/zh?*** (Caused"),
    ("/bucket/zh?sv=1&sig=secret", "/bucket/zh?***"),
    ("/a?AWSAccessKeyId=secret&Expires=1", "/a?***"),
    (f"proxy /to?url={SIGNED}", "proxy /to?***"),
    ("what is this? no URL: a/b?", "what is this? no URL: a/b?"),
    ("hf://owner/name@main/folder", "hf://owner/name@main/folder"),
    ("https://host/zh#sha256=abc", "https://host/zh#sha256=abc"),
    ("no secrets at all", "no secrets at all"),
]


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_texts(text: str, shown: str) -> None:
    assert without_queries(text) == shown
    assert without_queries(shown) == shown


@pytest.mark.parametrize("text", [text for text, _ in CASES if "secret=" not in text])
def test_errors(text: str) -> None:
    error = AdapterLoadError(f"it failed: {text}")
    for shown in (str(error), error.message, error.to_info().message):
        assert "=secret" not in shown
        assert "sec@ret" not in shown
        assert ":secret@" not in shown
    assert error_from_info(error.to_info()).message == error.message


def test_a_path_with_a_harmless_query_stays_in_an_error() -> None:
    text = "GET /v1/requests?limit=5 is no route"
    assert without_url_secrets(text) == text
    assert without_queries(text) == "GET /v1/requests?*** is no route"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["a" * 10**6, "/" * 10**6 + "?", "?" * 10**6, "://" * 300, "@" * 10**6]
)
def test_long_texts_take_no_long_time(text: str) -> None:
    assert without_queries(f"x://y {text}").startswith("x://y ")


PROGRAM = """
import logging, sys
from loraplex.core import log_lines

getattr(log_lines, sys.argv[1])("debug")
signed = sys.argv[2]
for name in ("httpx", "httpcore", "urllib3.connectionpool", "botocore.auth", "fsspec", "s3fs",
             "huggingface_hub.file_download", "loraplex.adapters.sources.http", "anything"):
    for level in (logging.DEBUG, logging.INFO, logging.ERROR):
        logging.getLogger(name).log(level, 'HTTP Request: %s "%s"', signed, 200)
        logging.getLogger(name).log(level, "Retrying: /bucket/zh?a=secret")
    logging.getLogger(name).log(logging.ERROR, "%d", "no number?")
    try:
        raise OSError(f"cannot open {signed}")
    except OSError:
        logging.getLogger(name).exception("failed at %s", signed)
"""


@pytest.mark.parametrize("function", ["log_to_standard_error", "log_to_parent"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_of_any_library(
    function: str, log_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_LOG_FORMAT", log_format)
    command = [sys.executable, "-c", PROGRAM, function, SIGNED]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = run.stderr.splitlines()
    own = [line for line in lines if "sys.argv" not in line]
    assert len(own) > 40
    assert not [line for line in own if "secret" in line]
    assert [line for line in own if "cannot open" in line and SHOWN in line]
    if log_format == "json" and function == "log_to_standard_error":
        assert all(json.loads(line) for line in lines if line.startswith("{"))
