"""Errors in the words of a client: they name the fields that it sent, not our parameters."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from loraplex.core.errors import LoraplexError

ErrorT = TypeVar("ErrorT", bound=LoraplexError)
Reworded = Callable[[LoraplexError], LoraplexError]
"""Function from an error to the same in the words of a client."""


def as_it_is(error: LoraplexError) -> LoraplexError:
    return error


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the client called them. names: our name, the client's."""
    try:
        yield
    except LoraplexError as error:
        raise as_sent(error, names) from None


def as_sent(error: ErrorT, names: Mapping[str, str]) -> ErrorT:
    """Return the error with the client's names as its parameter and in its message.

    In the message a name of one plain word stays: it may be no name there.
    """
    words = [name for name in names if not name.isalpha()]
    message = error.message
    if words:
        words.sort(key=len, reverse=True)
        pattern = rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)"
        message = re.sub(pattern, lambda found: names[found.group()], message)
    param = error.param if error.param is None else names.get(error.param, error.param)
    if (message, param) == (error.message, error.param):
        return error
    renamed = copy.copy(error)
    renamed.args = (message,)
    renamed.message, renamed.param = message, param
    return renamed
