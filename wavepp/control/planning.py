"""The planner of a running pipeline and its ring: what the planner is told, before and after each
wave.

Owns: the planner, the ring, the count of turns, the end of a hold. May not: know requests' states:
the driver hands in what is left to plan. Paper, section on maximum pipeline utilization.

    Demand --plan--> spans --the driver fills in the schedule--> launch --> ... --> complete
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from wavepp.control.options import DriverOptions
from wavepp.planner.budget import waves_wanted, work_wanted
from wavepp.planner.demand import Demand, newest_chunks
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.packing import Cut, Piece
from wavepp.planner.planner import Plan, Planner
from wavepp.planner.ring import Ring
from wavepp.protocol.messages import SpanPlan, WaveSchedule
from wavepp.units import WaveNumber


class WavePlanning:
    """One pipeline's waves, from demand to completion.

    Raises:
        ConfigError: M or b_min do not fit the block size (not asked of `greedy`), or not one set of
            coefficients a stage.
    """

    def __init__(self, options: DriverOptions, *, block_size: int, num_stages: int) -> None:
        self._wave_tokens_min = options.wave_tokens_min or options.wave_tokens_max
        self._waves_wanted = waves_wanted(
            ring_depth=options.ring_depth,
            pipeline_fill=options.pipeline_fill,
            num_stages=num_stages,
        )
        self.planner: Planner = make_planner(
            options.planner,
            PlannerOptions(
                wave_tokens_max=options.wave_tokens_max,
                wave_tokens_min=self._wave_tokens_min,
                block_size=block_size,
                num_stages=num_stages,
                ring_depth=options.ring_depth,
                pipeline_fill=options.pipeline_fill,
                progress_deadline_s=options.progress_deadline_s,
                stage_costs=options.stage_costs,
            ),
        )
        self.ring: Ring[WaveSchedule] = Ring(options.ring_depth)
        self.turn = 0
        self.wait_until: float | None = None

    def next_turn(self) -> None:
        """A request arrived, or a wave came back."""
        self.turn += 1

    def demand(
        self,
        pieces: Iterable[Piece],
        is_live: Callable[[SpanPlan], bool],
        *,
        in_admission: int,
        behind: int,
    ) -> Demand:
        """What the planner decides from.

        Args:
            pieces: what admitted requests have not planned yet, first come first served.
            is_live: the span's attempt is still admitted.
            in_admission: requests that may join a wave soon. behind: those that wait behind them.
        """
        in_flight = ([span for span in wave.spans if is_live(span)] for wave in self.ring)
        return Demand(
            pieces=tuple(pieces),
            chunks=newest_chunks(in_flight),
            ring_waves=len(self.ring),
            turn=self.turn,
            in_admission=in_admission,
            behind=behind,
        )

    def work_wanted(self, demand: Demand) -> int:
        """Tokens that admitted work lacks for as many waves as should be available."""
        return work_wanted(
            demand.lengths(), waves=self._waves_wanted, wave_tokens_min=self._wave_tokens_min
        )

    def plan(self, demand: Demand, *, now: float) -> Plan:
        """The next wave, while the ring has room; without spans: nothing runs now, and
        `wait_until` says when to ask again, if work waits."""
        plan = self.planner.plan(demand, now=now)
        self.wait_until = plan.wait_until
        return plan

    def launch(self, schedule: WaveSchedule, cuts: Sequence[Cut], *, now: float) -> None:
        """The planned wave goes out with these of its spans."""
        self.planner.launched(schedule.wave, cuts, now=now)
        self.ring.launch(schedule.wave, schedule)

    def complete(
        self, wave: WaveNumber, stage_seconds: Sequence[float], *, failed: bool
    ) -> WaveSchedule:
        """The oldest wave came back.

        Raises:
            RemoteProtocolError: it is not the oldest one.
        """
        schedule = self.ring.complete(wave)
        self.next_turn()
        if stage_seconds and not failed:
            self.planner.timed(wave, stage_seconds)
        return schedule
