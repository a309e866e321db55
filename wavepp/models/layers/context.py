"""What the layers of a stage share during one wave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wavepp.kernels.wave import Wave
from wavepp.kernels.workspace import Workspace
from wavepp.models.layers.rope import CosSin
from wavepp.models.mixer_specs import RopeSpec


@dataclass(frozen=True, slots=True)
class WaveContext:
    """The wave, its rotary tables, and scratch memory."""

    wave: Wave
    ropes: Mapping[RopeSpec, CosSin]
    workspace: Workspace
