"""The files that start clusters: Ray's own schema, and that they fit this version and its flags."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.main import get_command

from wavepp.cli import app

ROOT = Path(__file__).parents[2]
RAY = importlib.metadata.version("ray")


def read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / name).read_text())
    assert isinstance(content, dict)
    return content


def check_command(line: str) -> dict[str, Any]:
    """Parses a `wavepp ...` command; an unknown flag or a bad value raises."""
    name, *arguments = shlex.split(line)[1:]
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    return dict(command.make_context(name, arguments).params)


def test_cluster_yaml_is_valid_by_rays_own_schema() -> None:
    config = read("cluster.yaml")
    validate_config(prepare_config(config))
    types = config["available_node_types"]
    assert types["head"]["resources"]["CPU"] == 0
    assert types["gpu_worker"]["resources"]["GPU"] > 0


def test_rays_schema_refuses_what_it_does_not_know() -> None:
    config = {**read("cluster.yaml"), "stages": 8}
    with pytest.raises(Exception, match="stages"):
        validate_config(prepare_config(config))


def test_images_are_of_the_ray_that_is_pinned() -> None:
    for name in ("cluster.yaml", "examples/kuberay.yaml"):
        images = re.findall(r"rayproject/ray:([0-9.]+)-", (ROOT / name).read_text())
        assert set(images) == {RAY}, name
    assert read("examples/kuberay.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == RAY


def test_kuberay_job_has_a_gpu_for_every_stage_of_its_command() -> None:
    spec = read("examples/kuberay.yaml")["spec"]
    options = check_command(spec["entrypoint"])
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group["replicas"]
    assert options["device"] == "cuda"
    assert gpus >= options["pipeline_parallel_size"]
