"""The Ray cluster an engine runs in: joined when there is one, else started, and then also ended.

Owns: connecting and disconnecting, and the room for the stages. May not: end a cluster it has not
started. Inside a Ray job (or with RAY_ADDRESS set) the job's cluster is used.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from wavepp.actors.ray.semaphores import sweep_semaphores
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError

logger = logging.getLogger(__name__)

START_TRIES = 2  # a busy machine can be too slow for Ray's own start timeout
POLL_S = 0.1
SESSION_REMOVAL_S = 10.0
CPU_STEP = 0.01
CPUS_PER_STAGE_MIN = 0.01
CONNECT_S_MAX = 5.0
PORT_MAX = 65535


class Cluster:
    """A connection to Ray, made by `join_or_start`."""

    def __init__(self, *, connected_here: bool, raylet_pid: int | None) -> None:
        """`raylet_pid`: of the node that was started here, else None."""
        self._connected_here = connected_here
        self._raylet_pid = raylet_pid
        if raylet_pid is not None:  # a program may end without closing its engine
            atexit.register(self.leave)

    @property
    def is_own(self) -> bool:
        """It was started here, and ends with `leave`."""
        return self._raylet_pid is not None

    @classmethod
    def join_or_start(cls, env: Mapping[str, str], *, wait_s: float) -> Cluster:
        """Uses the Ray this process is connected to, or RAY_ADDRESS, or starts one on this machine.

        Args:
            env: environment of every worker of a cluster that is started here; workers of others
                need it as their runtime_env.
            wait_s: how long RAY_ADDRESS may take to answer.

        Raises:
            ConfigError: RAY_ADDRESS names a cluster that does not answer.
        """
        if ray.is_initialized():
            return cls(connected_here=False, raylet_pid=None)
        if address := os.environ.get("RAY_ADDRESS"):
            _wait_for_answer(address, wait_s)
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"RAY_ADDRESS {address!r}: {error}") from None
            return cls(connected_here=True, raylet_pid=None)
        return cls(connected_here=True, raylet_pid=_start_local(env))

    def leave(self) -> None:
        """Undoes what `join_or_start` did. Safe to call twice."""
        daemons = [] if self._raylet_pid is None else _daemons(self._raylet_pid)
        if self._connected_here and ray.is_initialized():
            ray.shutdown()
        self._connected_here = False
        raylet_pid, self._raylet_pid = self._raylet_pid, None
        if raylet_pid is not None:
            atexit.unregister(self.leave)
            psutil.wait_procs(daemons, timeout=SESSION_REMOVAL_S)
            _remove_sessions()
            sweep_semaphores(raylet_pid)


def cpus_per_stage(config: EngineConfig) -> float:
    """CPUs a stage asks of Ray: as configured, or its threads, or less when there are fewer."""
    if config.num_cpus_per_stage is not None:
        return config.num_cpus_per_stage
    free, whole = _free().get("CPU", 0.0), _whole().get("CPU", 0.0)
    wanted = float(threads_per_stage(config))
    share = (free if free >= 1 else whole) / config.pipeline_parallel_size
    return max(min(wanted, math.floor(share / CPU_STEP) * CPU_STEP), CPUS_PER_STAGE_MIN)


def threads_per_stage(config: EngineConfig) -> int:
    """CPU threads a stage computes with."""
    if config.threads_per_stage is not None:
        return config.threads_per_stage
    return max(1, len(os.sched_getaffinity(0)) // config.pipeline_parallel_size)


async def reserve(
    config: EngineConfig, num_cpus: float, *, may_grow: bool = True
) -> PlacementGroup:
    """Room for every stage, as a placement group; the driver needs none of its own.

    Args:
        may_grow: False: what the cluster has not got now it will never have, so it is not waited
            for.

    Raises:
        ConfigError: it did not come within `wait_for_resources_s`.
    """
    bundle = {"CPU": num_cpus}
    if config.device == "cuda":
        bundle["GPU"] = 1.0
    stages = config.pipeline_parallel_size
    group: PlacementGroup = placement_group([dict(bundle) for _ in range(stages)], strategy="PACK")
    is_there = may_grow or all(_whole().get(kind, 0.0) >= stages * n for kind, n in bundle.items())
    wait_s = config.wait_for_resources_s if is_there else 0.0
    deadline = time.monotonic() + wait_s
    try:
        while not await asyncio.to_thread(group.wait, POLL_S):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Ray had no room for {stages} stages of {_text(bundle)} each "
                    f"{_when(config, wait_s)}; the cluster has "
                    f"{_text(_whole())}, free are {_text(_free())}"
                )
    except BaseException:
        give_back(group)
        raise
    return group


def _wait_for_answer(address: str, wait_s: float) -> None:
    """Waits until somebody listens there: Ray itself would wait ten minutes, deaf to signals. Names
    that only Ray knows ("auto", a client's ray://) are left to it.

    Raises:
        ConfigError: nobody does, or it is no address.
    """
    if address in ("auto", "local") or "://" in address:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"RAY_ADDRESS {address!r}: write it as HOST:PORT, or auto")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S_MAX):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"RAY_ADDRESS {address!r} did not answer within wait_for_resources_s = "
                    f"{wait_s:g} s: {error.strerror or error}"
                ) from None
        time.sleep(POLL_S)


def give_back(group: PlacementGroup) -> None:
    """Ends a reservation; nothing happens when Ray is gone."""
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)


def _start_local(env: Mapping[str, str]) -> int:
    """Starts a node of our own, whose workers have `env`; returns its raylet's pid.

    Workers that Ray starts beforehand then serve as they are, which saves seconds.
    """
    # Ray's workers run at niceness 15; here they are the program itself, not somebody's background.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for tries_left in reversed(range(START_TRIES)):
        try:
            with _environment(env):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                _remove_sessions()
                raise ConfigError(f"Ray did not start on this machine: {error}") from error
            logger.warning("Ray did not start, trying once more: %s", error)
        except BaseException:  # a signal
            ray.shutdown()
            _remove_sessions()
            raise
        else:
            break
    node = ray._private.worker._global_node
    assert node is not None, "Ray is started"
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def _daemons(raylet_pid: int) -> list[psutil.Process]:
    """Ray's processes on the node of our own: until they end they may write to its session folder,
    and so bring it back."""
    node = ray._private.worker._global_node
    pids = {raylet_pid}
    if node is not None:
        pids.update(each.process.pid for kind in node.all_processes.values() for each in kind)
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process for a while: what it starts meanwhile inherits them."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _remove_sessions() -> None:
    """Removes the session folders of nodes this process started: their names end with its pid.

    A daemon that was too slow to end may bring a folder back: it is removed until it stays away.
    """
    parent = Path(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    deadline = time.monotonic() + SESSION_REMOVAL_S
    while folders := list(parent.glob(f"session_*_{os.getpid()}")):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            logger.warning("Ray's session folders could not be removed: %s", folders)
            return
        time.sleep(POLL_S)


def _when(config: EngineConfig, wait_s: float) -> str:
    if wait_s < config.wait_for_resources_s:
        return "and was started here for them alone"
    return f"within wait_for_resources_s = {wait_s:g} s"


def _whole() -> dict[str, float]:
    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]


def _free() -> dict[str, float]:
    return dict(ray.available_resources())  # type: ignore[no-untyped-call]


def _text(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU and {resources.get('GPU', 0.0):g} GPU"
