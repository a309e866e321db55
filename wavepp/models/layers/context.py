"""What the layers of a stage share during one wave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from wavepp.kernels.wave import Wave
from wavepp.kernels.workspace import Workspace
from wavepp.models.layers.rope import CosSin
from wavepp.models.mixer_specs import RopeSpec


@dataclass(frozen=True, slots=True)
class WaveContext:
    """The wave, its rotary tables, and scratch memory.

    `carried`: what layers hand on beside hidden states, by the name of its carry; they change it.
    """

    wave: Wave
    ropes: Mapping[RopeSpec, CosSin]
    workspace: Workspace
    carried: dict[str, Tensor]
