"""A request under /v2 as its handler sees it, and its body within a limit."""

from collections.abc import Mapping

from starlette.types import Receive, Scope

from loraplex.frontends.access import headers_of
from loraplex.frontends.kserve.http.body import length_of, too_large
from loraplex.frontends.streams import ClientDisconnectedError


class HttpRequest:
    """headers: by lower-case name. path_params: by the names in the route's pattern."""

    __slots__ = ("headers", "path_params", "receive")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers = headers_of(scope)
        self.path_params: Mapping[str, str] = scope["path_params"]
        self.receive = receive

    @property
    def model_and_version(self) -> tuple[str, str]:
        """Either is empty where the path does not name it."""
        return self.path_params.get("model", ""), self.path_params.get("version", "")

    async def body(self, max_bytes: int) -> bytearray:
        """All of it, as it came.

        Raises PayloadTooLargeError as soon as that is known, and ClientDisconnectedError.
        """
        declared = length_of(self.headers.get("content-length", "0"))
        if declared is not None and declared > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()  # it grows in place: joining chunks would copy all of them at once
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                return body
