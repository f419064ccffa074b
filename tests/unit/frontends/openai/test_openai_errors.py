import logging

import msgspec
import pytest

from loraplex.core import errors
from loraplex.frontends.openai.errors import (
    WIRE_ERRORS,
    as_loraplex_error,
    error_body,
    error_response,
    wire_error,
)

STATUSES = {400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503, 504, 507}


@pytest.mark.parametrize("leaf", errors.leaves())
def test_every_leaf_has_a_row(leaf):
    assert leaf in WIRE_ERRORS
    assert WIRE_ERRORS[leaf].status in STATUSES


@pytest.mark.parametrize("leaf", errors.leaves(errors.RequestError))
def test_what_the_client_can_fix_is_a_4xx(leaf):
    assert 400 <= WIRE_ERRORS[leaf].status < 500


@pytest.mark.parametrize("leaf", errors.leaves(errors.CapacityError))
def test_what_may_be_tried_again_is_one_of_the_statuses_that_clients_retry(leaf):
    assert WIRE_ERRORS[leaf].status in (429, 503, 504, 507)


@pytest.mark.parametrize("leaf", errors.leaves(errors.InternalError))
def test_what_is_ours_is_500(leaf):
    assert WIRE_ERRORS[leaf].status == 500


def test_an_error_known_only_by_its_branch_takes_the_row_of_the_branch():
    assert wire_error(errors.InternalError("x")).status == 500
    assert wire_error(errors.CapacityError("x")).status == 503
    assert wire_error(errors.RequestError("x")).status == 400


def test_body_has_openais_four_fields():
    response = error_response(errors.InvalidParameterError("n is bad", param="n"))
    assert response.status_code == 400
    assert msgspec.json.decode(response.body) == {
        "error": {
            "message": "n is bad",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_parameter",
        }
    }


def test_openais_own_code_wins():
    assert error_body(errors.PromptTooLongError("x")).error.code == "context_length_exceeded"


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.2, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_rounded_up(seconds, header):
    response = error_response(errors.QueueFullError("full", retry_after_seconds=seconds))
    assert response.headers["retry-after"] == header


def test_no_retry_after_without_a_time():
    assert "retry-after" not in error_response(errors.QueueFullError("full")).headers


def test_a_bug_reports_only_where_to_look(caplog):
    with caplog.at_level(logging.ERROR):
        error = as_loraplex_error(ValueError("secret path"), "req-1")
    assert isinstance(error, errors.InternalError)
    assert "req-1" in error.message
    assert "secret" not in error.message
    assert "secret path" in caplog.text


def test_an_error_of_ours_is_kept():
    error = errors.QueueFullError("full")
    assert as_loraplex_error(error, "req-1") is error
