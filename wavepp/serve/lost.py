"""What Serve's proxy tells a client whose replica's process died: an error object like any other.

Serve itself would say "Internal Server Error" as plain text, or end a stream in its middle. Owns no
state. Runs in the proxy, before Serve's own application, where the proxy has PROXY_ENV.
"""

from __future__ import annotations

import logging

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wavepp.errors import EngineDeadError
from wavepp.serve.problems import problem_of, problem_response
from wavepp.serve.wire import DONE, event

logger = logging.getLogger(__name__)

EVENTS = b"text/event-stream"
PROXY_ENV = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "wavepp.serve.lost:proxy_middlewares"}
"""What Serve's proxy reads when it starts."""


def proxy_middlewares() -> list[Middleware]:
    """What Serve's proxy puts before its own application."""
    return [Middleware(LostReplicas)]


class LostReplicas:
    """Finishes answers that Serve leaves unfinished."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI asks."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if answer.is_finished:
                raise
            logger.exception("an answer was not finished")
        if not answer.is_finished:
            await answer.finish(scope, receive)


class _Answer:
    """What has been sent of one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_begun = False
        self._is_stream = False
        self.is_finished = False

    async def send(self, message: Message) -> None:
        """As ASGI's send."""
        if message["type"] == "http.response.start":
            self._is_begun = True
            headers = {name.lower(): value for name, value in message["headers"]}
            self._is_stream = headers.get(b"content-type", b"").startswith(EVENTS)
        elif message["type"] == "http.response.body":
            self.is_finished = not message.get("more_body", False)
        await self._send(message)

    async def finish(self, scope: Scope, receive: Receive) -> None:
        """Says that the rest will not come. What was begun and is no stream can only be cut off."""
        error = EngineDeadError("the replica that had this request died; send it again")
        if not self._is_begun:
            await problem_response(error)(scope, receive, self._send)
        elif self._is_stream:
            end = event(problem_of(error)[1]) + DONE
            await self._send({"type": "http.response.body", "body": end})
