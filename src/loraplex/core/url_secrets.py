"""Removal of what may be secret in URLs from texts that people read: logs, errors, pages.

A query may be a signature that lets anybody read the object (presigned URLs), and the part before
the host may be a password. Libraries write both into their log lines and errors.
"""

import re
from typing import Final

HIDDEN: Final = "***"
_SEPARATOR: Final = "://"
_WORD: Final = re.compile(r"[^\s'\"<>]+")
_SECRET: Final = re.compile(r"(?i)(sig|token|key|credential|secret|passw)[\w.-]*=")
_ANY: Final = re.compile("=")


def without_url_secrets(text: str) -> str:
    """Return a text whose URLs have no query and no user.

    The query of a path goes, too, if a parameter has the name of a secret.
    """
    if "?" not in text and _SEPARATOR not in text:
        return text
    return _WORD.sub(lambda word: _shown(word[0], _SECRET), text)


def without_queries(text: str) -> str:
    """Return a text as `without_url_secrets` does, in which no path has a query either.

    Libraries log the path of a request alone.
    """
    if "?" not in text and _SEPARATOR not in text:
        return text
    return _WORD.sub(lambda word: _shown(word[0], _ANY), text)


def _shown(word: str, parameter: re.Pattern[str]) -> str:
    start, separator, rest = word.partition(_SEPARATOR)
    if not separator:
        path, _, query = word.partition("?")
        return f"{path}?{HIDDEN}" if "/" in path and parameter.search(query) else word
    if "?" in start:  # a URL in the query of a path
        return _shown(start, parameter) if parameter.search(start) else f"{start}{HIDDEN}"
    address, mark, _ = rest.partition("?")
    authority, slash, path = address.partition("/")
    _, at, host = authority.rpartition("@")
    user = f"{HIDDEN}@" if at else ""
    shown_path = _shown(path, parameter) if _SEPARATOR in path else path
    return f"{start}{separator}{user}{host}{slash}{shown_path}{mark}{HIDDEN if mark else ''}"
