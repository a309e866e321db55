"""A server as a program starts and ends it: the cluster, Serve with its proxy, the application.

Owns: what it started. In a cluster that was there before only the application is taken away again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import urllib.request
from typing import Self

from wavepp.actors.ray.cluster import Cluster

# isort: split
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.serve.deployment import NAME, build_application
from wavepp.serve.lost import PROXY_ENV
from wavepp.serve.options import ServeOptions

UP_S_MAX = 60.0
DRAIN_SPARE_S = 15.0
"""For what Serve does around the requests themselves."""
POLL_S = 0.1
ERROR_MARK = "ConfigError: "


class RunningServer:
    """A server that answers; made by `start`."""

    def __init__(self, cluster: Cluster, url: str, *, drain_s: float) -> None:
        """`drain_s`: how long requests in flight may go on when it is stopped."""
        self.url = url
        self._cluster = cluster
        self._drain_s = drain_s

    @classmethod
    def start(cls, config: EngineConfig, options: ServeOptions, *, host: str, port: int) -> Self:
        """Starts everything; returns when the server answers.

        Raises:
            ConfigError: the engine can't be built, the port is taken, or nothing answers.
        """
        check_port(host, port)
        server = cls(
            Cluster.join_or_start(PROXY_ENV, wait_s=config.wait_for_resources_s),
            f"http://{_reachable(host)}:{port}",
            drain_s=options.shutdown_timeout_s,
        )
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
            deploy(build_application(config, options), name=NAME, route="/")
            _wait_until_up(server.url)
        except BaseException:
            server.stop()
            raise
        return server

    def stop(self) -> None:
        """Lets requests in flight finish, and takes away what was started. Safe to call twice."""
        signal.alarm(0)  # on SIGTERM Ray's library sets one: three seconds, then it aborts
        with contextlib.suppress(RayServeException):  # Serve itself did not come up
            self._take_away()
        if self._cluster.is_own:
            serve.shutdown()  # type: ignore[no-untyped-call]
        self._cluster.leave()

    def _take_away(self) -> None:
        """The application goes first, while the proxy lives: Serve takes no new requests for it and
        lets its replicas finish theirs. Serve's own shutdown would end the proxy at once."""
        serve.delete(NAME, _blocking=False)
        deadline = time.monotonic() + self._drain_s + DRAIN_SPARE_S
        while NAME in serve.status().applications and time.monotonic() < deadline:
            time.sleep(POLL_S)


def check_port(host: str, port: int) -> None:
    """Sees that the port is free.

    Raises:
        ConfigError: it isn't, or the host is none of this machine's.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"{host}:{port} can't be listened on: {error.strerror}") from None


def deploy(application: Application, *, name: str, route: str) -> None:
    """Starts an application on the running Serve; returns when its replicas are up.

    Raises:
        ConfigError: an engine can't be built, and why.
    """
    try:
        serve.run(application, name=name, route_prefix=route)
    except RuntimeError as error:
        raise ConfigError(_reason(str(error), name)) from None


def _reason(text: str, name: str) -> str:
    """The engine's own words out of a replica's traceback, which Serve tells as text."""
    status = serve.status().applications.get(name)
    if status is not None:
        told = [deployment.message for deployment in status.deployments.values()]
        text = "\n".join([text, status.message, *told])
    lines = [line for line in text.splitlines() if ERROR_MARK in line]
    return lines[-1].split(ERROR_MARK, 1)[1] if lines else text.strip().splitlines()[-1]


def _wait_until_up(url: str) -> None:
    """The proxy comes up by itself, some time after the application."""
    deadline = time.monotonic() + UP_S_MAX
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/health", timeout=10 * POLL_S) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(POLL_S)
    raise ConfigError(f"{url} does not answer within {UP_S_MAX:g} s")


def _reachable(host: str) -> str:
    """Where to ask a server that listens on all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
