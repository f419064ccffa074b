import pathlib
import re

import grpc
import pytest

from loraplex.core import errors
from loraplex.frontends.kserve.errors import STATUS, as_loraplex_error, message_of, status_of

DOCS = pathlib.Path(__file__).parents[4] / "docs" / "errors-kserve.md"


def test_the_table_is_total():
    assert set(STATUS) == set(errors.leaves())


def test_the_table_is_documented():
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\w+) \|$", DOCS.read_text(), flags=re.MULTILINE)
    documented = {code: (int(http), name) for code, http, name in rows}
    assert documented == {leaf.code: tuple(status) for leaf, status in STATUS.items()}


@pytest.mark.parametrize("leaf", STATUS, ids=lambda leaf: leaf.code)
def test_every_status_exists(leaf):
    status = STATUS[leaf]
    assert 400 <= status.http <= 599
    assert grpc.StatusCode[status.grpc] is not grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("error", "http"),
    [
        (errors.RequestError("x"), 400),
        (errors.CapacityError("x"), 503),
        (errors.InternalError("x"), 500),
        (errors.ConfigError("x"), 500),
    ],
)
def test_a_branch_has_a_status_too(error, http):
    assert status_of(error).http == http


def test_a_full_queue_says_what_clients_look_for():
    message = message_of(errors.QueueFullError("8 requests wait"))
    # Triton's text.
    assert "Exceeds maximum queue size" in message
    # Triton's text.
    assert "Maximum queue size of" in message
    assert message.endswith("8 requests wait")


def test_a_defect_is_logged_and_hidden(caplog):
    error = as_loraplex_error(KeyError("secret"))
    assert isinstance(error, errors.InternalError)
    assert "secret" not in error.message
    assert "secret" in caplog.text
    known = errors.InvalidTensorError("x")
    assert as_loraplex_error(known) is known
