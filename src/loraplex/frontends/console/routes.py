"""Routes of the console's files, and the headers that keep the page to itself."""

import functools
import gzip
import hashlib
import importlib.resources
import re
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.frontends.middleware import RecordedRoute

HOME = "/console/"
_LEADING_HOME = ("/", "/console")
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""Media types by suffix; files with another one are not served."""
_COMMENTS = re.compile(rb"^[ \t]*(?://[^\n]*|/\*(?:(?!\*/).)*\*/)[ \t]*$", re.MULTILINE | re.DOTALL)
"""Comments of scripts and styles that have lines of their own."""
_IMPORTS = re.compile(rb'^@import url\("([\w/-]+\.css)"\);$', re.MULTILINE)
_STYLES = "style.css"
"""Imports the styles of all screens, which are sent in it."""
_OTHERS = "vendor/"
"""Folder of the files of others, whose comments are their licences."""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content security policy: no inline script or style, no HTML from strings, no other origin."""
HEADERS = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
        # The page is as new as the server: browsers compare each time, mostly for a 304.
        "cache-control": "no-cache",
        "vary": "accept-encoding",
    }
)


def console_routes() -> list[RecordedRoute]:
    """Return the routes of all files; none needs a key, as none has data."""
    return [
        *(
            RecordedRoute(path, _to_home, methods=["GET"], include_in_schema=False)
            for path in _LEADING_HOME
        ),
        *(
            RecordedRoute(path, _PageFile(name).serve, methods=["GET"], include_in_schema=False)
            for path, name in files().items()
        ),
    ]


@functools.cache
def files() -> dict[str, str]:
    """Return the name of each file by the path that it is served under."""
    names = [
        name
        for name in _names(_static())
        if name.rpartition(".")[2] in _TYPES and (name == _STYLES or not name.endswith(".css"))
    ]
    return {HOME: "index.html"} | {HOME + name: name for name in names if name != "index.html"}


async def _to_home(request: Request) -> Response:
    del request
    return RedirectResponse(HOME, 303, HEADERS)


def _static() -> Traversable:
    return importlib.resources.files("loraplex.frontends.console") / "static"


def _names(folder: Traversable, prefix: str = "") -> Iterator[str]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _names(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name


def served_content(name: str) -> bytes:
    """Return a file as it is sent.

    An eighth of our scripts is comments. They become empty lines, so that a line has the number in
    a browser that it has in the file. Styles are one file: seven small ones are a third larger.
    """
    content = _static().joinpath(*name.split("/")).read_bytes()
    if name.startswith(_OTHERS) or not name.endswith((".js", ".css")):
        return content
    if name == _STYLES:
        content = _IMPORTS.sub(lambda found: served_content(found[1].decode()), content)
    return _COMMENTS.sub(lambda comment: b"\n" * comment[0].count(b"\n"), content)


class _PageFile:
    """One file, which is read at its first request."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def serve(self, request: Request) -> Response:
        content, packed, tag = self._content
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            content, headers = packed, {**headers, "content-encoding": "gzip"}
        return Response(content, headers=headers, media_type=_TYPES[self._name.rpartition(".")[2]])

    @functools.cached_property
    def _content(self) -> tuple[bytes, bytes, str]:
        """The file, the same packed by gzip, and its entity tag."""
        content = served_content(self._name)
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return content, gzip.compress(content, mtime=0), tag
