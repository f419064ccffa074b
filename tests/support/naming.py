"""What an error must name, whatever its other words are."""

import contextlib
import re
from collections.abc import Iterator

import pytest

from loraplex.core.errors import LoraplexError


def naming(*values: object) -> str:
    """Return a pattern for the messages that have each of the values, whole and in any order."""
    whole = (rf"(?=.*(?<![\w.]){re.escape(str(value))}(?!\w|\.\d))" for value in values)
    return "(?s)^" + "".join(whole)


@contextlib.contextmanager
def refused(
    error: type[LoraplexError], *values: object, param: str | None = None
) -> Iterator[pytest.ExceptionInfo[LoraplexError]]:
    """Expect an error with the code of a class, about a parameter, that names each of the values.

    param: None: the error is about no parameter.
    """
    with pytest.raises(error, match=naming(*values)) as caught:
        yield caught
    assert (caught.value.code, caught.value.param) == (error.code, param)
