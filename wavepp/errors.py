"""The errors WavePP raises on purpose.

    WavePPError
    |-- ConfigError (ValueError)       no engine can be built from this configuration or checkpoint
    |-- RequestError (ValueError)      this request can't be served: change it (HTTP 4xx)
    |   `-- QueueFullError             not now: the queue limits are reached (HTTP 503)
    |-- EngineDeadError (RuntimeError) the pipeline stopped for good; every open request gets it
    `-- ProtocolError                  a contract between driver and stages was broken: a bug
        |-- LocalProtocolError        by this side
        `-- RemoteProtocolError       by the other side

You catch ConfigError, RequestError and EngineDeadError. A ProtocolError is reported, not handled:
that side stops. Outcomes that are expected (no capacity, a stale hint) are values, not errors.
"""

from __future__ import annotations


class WavePPError(Exception):
    """Root of all errors raised by WavePP on purpose."""


class ConfigError(WavePPError, ValueError):
    """A configuration or checkpoint that can't be used; the message names field and value."""


class RequestError(WavePPError, ValueError):
    """A request that can't be served as it is.

    Args:
        message: one sentence for the user, with the numbers that matter.
        code: a short machine-readable reason, such as "prompt_too_long".
        param: the request field at fault, as in OpenAI's error object.
    """

    def __init__(
        self, message: str, *, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (type(self), self.message, self.code, self.param))


class QueueFullError(RequestError):
    """The queue limits (`max_num_queued_reqs`, `max_num_queued_tokens`) are reached."""


class EngineDeadError(WavePPError, RuntimeError):
    """The pipeline stopped for good; the message says why."""


class ProtocolError(WavePPError):
    """A contract between driver and stages was broken. Always a bug."""


class LocalProtocolError(ProtocolError):
    """This side was asked to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the protocol."""


def _rebuild_request_error(
    kind: type[RequestError], message: str, code: str, param: str | None
) -> RequestError:
    return kind(message, code=code, param=param)
