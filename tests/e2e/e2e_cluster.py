"""A Ray cluster of two nodes on one machine, with its dashboard.

The cluster has ports, a folder and a token of its own, and is ended by its own processes:
`ray stop` would end every Ray on the machine.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2e_commands import BIN, clean_environment, wait_until

START_S = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """How to reach a cluster, and the processes that hold its nodes up, the head first."""

    address: str
    env: dict[str, str]
    folder: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_node(self, *flags: str) -> None:
        """Starts one node of one CPU; it is up some time later."""
        (agent,) = free_ports(1)
        command = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", "--num-cpus=1"]
        command += [f"--dashboard-agent-listen-port={agent}", *flags]
        with Path(self.folder, "start.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        self.processes.append(process)

    def state_of(self, kind: str) -> list[dict[str, Any]]:
        """What the cluster's dashboard lists: actors, placement_groups, nodes."""
        headers = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        params = {"detail": "true"}
        answer = httpx.get(f"{self.address}/api/v0/{kind}", headers=headers, params=params)
        rows: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]["result"]
        return rows

    def alive(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Those that live, of classes whose name holds `name`."""
        rows = self.state_of(kind)
        living = [row for row in rows if row["state"] in ("ALIVE", "CREATED", "PENDING")]
        return [row for row in living if name in str(row.get("class_name"))]

    def is_up(self, nodes: int) -> bool:
        """All nodes are there."""
        with contextlib.suppress(httpx.HTTPError, TypeError):
            return len(self.alive("nodes")) == nodes
        return False

    def stop(self) -> None:
        """What Ctrl-C does to `ray start --block`."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


def start_cluster(folder: str) -> RunningCluster | None:
    """Starts two nodes; None if they are not up in time."""
    env = clean_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    port, dashboard, client = free_ports(3)
    cluster = RunningCluster(address=f"http://127.0.0.1:{dashboard}", env=env, folder=folder)
    head = ["--head", f"--temp-dir={folder}", f"--port={port}", "--dashboard-host=127.0.0.1"]
    head += ["--include-dashboard=true", f"--dashboard-port={dashboard}"]
    cluster.start_node(*head, f"--ray-client-server-port={client}")
    (holds_up,) = cluster.processes

    def is_settled(nodes: int) -> bool:
        return holds_up.poll() is not None or cluster.is_up(nodes)

    if wait_until(lambda: is_settled(1), seconds=START_S) and holds_up.poll() is None:
        cluster.start_node(f"--address=127.0.0.1:{port}")
        if wait_until(lambda: is_settled(2), seconds=START_S) and holds_up.poll() is None:
            return cluster
    cluster.stop()
    return None
