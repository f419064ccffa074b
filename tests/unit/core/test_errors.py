"""The error tree: what each front end's table, and the way between processes, rely on."""

import errno
import inspect

import msgspec
import pytest

from loraplex.core import errors
from loraplex.core.errors import (
    ConfigError,
    ErrorInfo,
    InternalError,
    LoraplexError,
    NotReadyError,
    RequestError,
    error_from_info,
    leaves,
    passing_error,
)
from loraplex.frontends.kserve import errors as kserve_errors
from loraplex.frontends.openai import errors as openai_errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, LoraplexError) and cls.__module__ == errors.__name__
]


def test_every_class_has_a_code_of_its_own():
    codes = [cls.__dict__.get("code") for cls in CLASSES]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    assert set(errors.ERROR_CLASSES) == set(codes)


def test_codes_are_stable():
    """Clients match them: a code that changes or goes is a breaking change."""
    assert {cls.code for cls in leaves()} == {
        "invalid_request",
        "invalid_parameter",
        "invalid_tensor",
        "prompt_too_long",
        "token_out_of_vocabulary",
        "payload_too_large",
        "body_timeout",
        "model_not_found",
        "adapter_not_found",
        "response_not_found",
        "upload_not_found",
        "adapter_exists",
        "invalid_adapter",
        "adapter_mismatch",
        "adapter_too_large",
        "unsupported_feature",
        "unauthenticated",
        "permission_denied",
        "queue_full",
        "rate_limited",
        "not_ready",
        "engine_restarted",
        "adapter_load_failed",
        "storage_full",
        "storage_unavailable",
        "deadline_exceeded",
        "row_failed",
        "step_failed",
        "request_crashed_engine",
        "unsupported_model",
    }


def test_leaves_are_what_nothing_derives_from():
    of_the_file = {leaf for leaf in leaves() if leaf.__module__ == errors.__name__}
    assert of_the_file == set(leaves())
    for leaf in leaves():
        assert all(kind.__module__ != errors.__name__ for kind in leaf.__subclasses__())
    assert RequestError not in leaves()
    assert set(leaves(RequestError)) == {c for c in leaves() if issubclass(c, RequestError)}
    assert leaves(ConfigError) == [errors.UnsupportedModelError]


def test_the_drawn_tree_is_the_tree():
    drawn = errors.__doc__ or ""
    assert all(cls.__name__ in drawn for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_crosses_a_process(cls):
    error = cls("what is wrong", param="top_p", retry_after_seconds=1.5)
    wire = msgspec.msgpack.encode(error.to_info())
    back = error_from_info(msgspec.msgpack.decode(wire, type=ErrorInfo))
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_seconds) == ("what is wrong", "top_p", 1.5)
    assert str(back) == "what is wrong"


def test_an_unknown_code_is_ours():
    back = error_from_info(ErrorInfo("from_the_future", "hm"))
    assert type(back) is InternalError
    assert back.message == "hm"
    assert back.param is back.retry_after_seconds is None


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


TOO_MANY = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    "error",
    [
        TOO_MANY,
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        caused_by(ConfigError("cannot look for adapters"), TOO_MANY),
        caused_by(InternalError("no process can be started"), caused_by(ValueError(), TOO_MANY)),
        caused_by(ConfigError("cannot read multi_lora"), PermissionError(13, "Permission denied")),
    ],
)
def test_a_fault_of_the_machine_that_may_pass_is_tried_again(error):
    passing = passing_error(error)
    assert type(passing) is NotReadyError
    assert passing.retry_after_seconds == 5
    assert type(kserve_errors.as_loraplex_error(error)) is NotReadyError
    assert type(openai_errors.as_loraplex_error(error, "id")) is NotReadyError


@pytest.mark.parametrize(
    "error", [None, ValueError(), InternalError("x"), ConfigError("x"), FileNotFoundError(2, "x")]
)
def test_other_errors_are_not(error):
    assert passing_error(error) is None
