"""Where a simulated stage's time went: computing, or waiting for what.

Owns: the sums and the list of waves. May not: decide. Every moment until the end of the latest wave
is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp.units import WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveTime:
    """When a stage computed a wave."""

    wave: WaveNumber
    from_s: float
    done_s: float


@dataclass(slots=True, kw_only=True)
class StageTimes:
    """One stage.

    Attributes:
        no_wave_s: no schedule was there. activation_s: the stage before was not done. sending_s:
            held by a blocking send. until_s: what is counted so far.
    """

    busy_s: float = 0.0
    no_wave_s: float = 0.0
    activation_s: float = 0.0
    sending_s: float = 0.0
    until_s: float = 0.0
    waves: list[WaveTime] = field(default_factory=list)

    def sent(self, now: float) -> None:
        """A blocking send is over."""
        self.sending_s += now - self.until_s
        self.until_s = now

    def computed(
        self, wave: WaveNumber, *, scheduled_s: float, from_s: float, done_s: float
    ) -> None:
        """A wave whose schedule came at `scheduled_s` was computed."""
        assert self.until_s <= from_s <= done_s, (self, from_s, done_s)
        known_s = min(max(scheduled_s, self.until_s), from_s)
        self.no_wave_s += known_s - self.until_s
        self.activation_s += from_s - known_s
        self.busy_s += done_s - from_s
        self.until_s = done_s
        self.waves.append(WaveTime(wave=wave, from_s=from_s, done_s=done_s))
