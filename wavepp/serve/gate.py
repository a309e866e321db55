"""What stands before every endpoint: the API key, and the size of bodies.

Owns no state. Plain ASGI, so that streamed answers pass through untouched.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from wavepp.serve.problems import TOO_LARGE, UNAUTHORIZED, ApiError, problem_response

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
"""Asked by load balancers and collectors, who have no key."""


class KeyGate:
    """Lets only those in who have the key.

    Args:
        api_key: None: everybody has.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI asks."""
        if scope["type"] == "http" and self._key is not None and not self._may_pass(scope):
            error = ApiError(
                UNAUTHORIZED, "the API key is missing or wrong", code="invalid_api_key"
            )
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        assert self._key is not None
        if scope["path"] in OPEN_PATHS:
            return True
        kind, _, given = Request(scope).headers.get("authorization", "").partition(" ")
        same = secrets.compare_digest(given.strip().encode(), self._key.encode())
        return kind.lower() == "bearer" and same


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body, read no further than is allowed.

    Raises:
        ApiError: it is larger (status 413).
    """
    told = request.headers.get("content-length", "")
    pieces: list[bytes] = []
    size = int(told) if told.isascii() and told.isdecimal() else 0
    if size <= bytes_max:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > bytes_max:
                break
            pieces.append(piece)
    if size > bytes_max:
        raise ApiError(
            TOO_LARGE, f"the body is larger than {bytes_max} bytes", code="body_too_large"
        )
    return b"".join(pieces)
