"""The server on Ray Serve: one replica is one service, with one engine.

Owns: the deployment's settings, and what Serve asks of a replica. A replica's engine starts its
driver and stages as actors of the same cluster; they belong to the replica and end with it. Nothing
queues in front of the replica: how much may wait is the engine's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from wavepp.actors.ray.launch import worker_env  # first: it sets what Ray reads when imported

# isort: split
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from wavepp.config import EngineConfig
from wavepp.engine import Engine, check_folder
from wavepp.errors import EngineDeadError
from wavepp.serve.app import build_app
from wavepp.serve.exporter import RayExporter
from wavepp.serve.options import ServeOptions, read_arguments
from wavepp.serve.replicas import PipelineReplica, ReplicaSet
from wavepp.serve.routing import PrefixRouter
from wavepp.serve.service import Service

NAME = "wavepp"
CALLS_MAX = 100_000
HEALTH_EVERY_S = 1.0  # Serve replaces a replica after three bad answers
HEALTH_TIMEOUT_S = 30.0


@serve.deployment(name=NAME)
@serve.ingress()
class Server:
    """One replica.

    Args:
        config: of the engine; a plain dict, so that a change of it is a change of the deployment.
        options: of the server.
        pipelines: where requests go; None: a pipeline of its own.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        options: Mapping[str, Any],
        pipelines: DeploymentHandle[Any] | None = None,
    ) -> None:
        self._options = ServeOptions(**options)
        backend = None if pipelines is None else ReplicaSet(pipelines)
        self._service = Service(Engine(EngineConfig(**config), backend=backend))
        self._exporting: asyncio.Task[None] | None = None
        await self._service.start()
        self._exporting = asyncio.create_task(RayExporter().run(self._service))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The replica's application; Serve asks once, after the engine is up."""
        return build_app(self._service, self._options)

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here.

        Raises:
            EngineDeadError: the engine can't serve.
        """
        problem = self._service.health.problem
        if problem is not None:
            raise EngineDeadError(problem)

    async def __del__(self) -> None:
        """Serve calls and awaits this when the replica's requests are drained."""
        if self._exporting is not None:
            self._exporting.cancel()
            await asyncio.gather(self._exporting, return_exceptions=True)
        await self._service.close()


def build_application(config: EngineConfig, options: ServeOptions) -> Application:
    """The application of a checked configuration: a server with a pipeline in it, or before
    several."""
    common: dict[str, Any] = {
        "max_ongoing_requests": CALLS_MAX,
        "max_queued_requests": -1,
        "graceful_shutdown_timeout_s": options.shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_EVERY_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": worker_env(1)}},
        "logging_config": {"enable_access_log": False},
    }
    server: Any = Server  # which the decorators have made a deployment of
    server = server.options(**common)
    told = (config.model_dump(), options.model_dump())
    if options.num_replicas == 1:
        application: Application = server.bind(*told)
        return application
    router_class: Any = f"{PrefixRouter.__module__}:{PrefixRouter.__qualname__}"
    router = RequestRouterConfig(
        request_router_class=router_class,
        request_router_kwargs={"block_size": config.block_size},
    )
    pipelines: Any = PipelineReplica
    pipelines = pipelines.options(
        num_replicas=options.num_replicas, request_router_config=router, **common
    )
    application = server.bind(*told, pipelines.bind(told[0]))
    return application


def app_builder(args: Mapping[str, Any]) -> Application:
    """What `serve run wavepp.serve:app_builder name=value ...` and `serve deploy` call.

    Raises:
        ConfigError: an argument is unknown or wrong, or the checkpoint is not there.
    """
    config, options = read_arguments(args)
    check_folder(config)
    return build_application(config, options)
