"""One real server for this folder's tests, and the same endpoints without Serve for the rest."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
# As `wavepp serve` sets it, before this session's Ray is started.
os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "wavepp.serve.lost:proxy_middlewares"

ENGINE: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_cpus_per_stage": 0.5,
    "threads_per_stage": 1,
    "served_model_name": "tiny",
}
MODEL_LEN = 512  # so that no random request takes long


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def serve_address(ray_session: Any) -> Iterator[str]:
    """Where this session's Ray Serve listens."""
    from ray import serve

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="session")
def server(serve_address: str, tiny_llama: Path) -> str:
    """The address of a server on Ray Serve with two stages on Ray."""
    from ray import serve

    from wavepp.serve import app_builder

    arguments = {"model": str(tiny_llama), "max_model_len": MODEL_LEN, **ENGINE}
    serve.run(app_builder(arguments), name="wavepp")
    return serve_address


Endpoints = Callable[..., Any]


@pytest.fixture
def endpoints(tiny_llama: Path) -> Endpoints:
    """`async with endpoints(**options) as client`: the application over an engine right here."""
    from wavepp.config import EngineConfig
    from wavepp.engine import Engine
    from wavepp.serve.app import build_app
    from wavepp.serve.options import ServeOptions
    from wavepp.serve.service import Service

    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
        given = {name: options.pop(name) for name in ServeOptions.model_fields if name in options}
        fields = {**ENGINE, "model": tiny_llama, "transport": "local", **options}
        service = Service(Engine(EngineConfig(**fields)))
        await service.start()
        transport = httpx.ASGITransport(build_app(service, ServeOptions(**given)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            client.service = service  # type: ignore[attr-defined]
            yield client
        await service.close()

    return start
