"""What goes wrong with an HTTP request, as OpenAI's error objects.

Owns: the one exception handlers raise, and how every error becomes a response. Nothing a client
sends ends in a 422 or a 5xx but a full queue, a failed computation and a dead engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from wavepp.batch.responses import BAD_REQUEST, BUSY, FAILED, error_body, status_of
from wavepp.errors import EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

UNAUTHORIZED, TOO_LARGE = 401, 413
RETRY_AFTER_S = 1


class ApiError(Exception):
    """A refusal with a status of its own."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, code=code, param=param)


def problem_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and error object of whatever a handler raised."""
    match error:
        case ApiError():
            return error.status, error.body
        case RequestError():
            body = error_body(error.message, code=error.code, param=error.param)
            return status_of(error), body
        case EngineDeadError():
            return BUSY, error_body(str(error), code="engine_dead")
        case HTTPException():
            return error.status_code, error_body(str(error.detail), code="http_error")
        case RequestValidationError():
            return BAD_REQUEST, error_body(str(error), code="invalid_request")
        case _:
            logger.error("a request failed", exc_info=error)
            return FAILED, error_body(f"{type(error).__name__}: {error}", code="internal")


def headers_of(error: Exception) -> Mapping[str, str]:
    """What a client is told beside the error."""
    if isinstance(error, QueueFullError):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, ApiError) and error.status == UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    return getattr(error, "headers", None) or {}


def problem_response(error: Exception) -> Response:
    """The response to a request that failed with this error."""
    status, body = problem_of(error)
    return JSONResponse(body, status_code=status, headers=dict(headers_of(error)))


def handle_problems(app: FastAPI) -> None:
    """Makes every error of the app's handlers an error object."""

    async def respond(request: Request, error: Exception) -> Response:
        del request
        return problem_response(error)

    kinds = (ApiError, RequestError, EngineDeadError, HTTPException, RequestValidationError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, respond)
