"""Seeds: a few run clean, equal seeds are equal runs in any process, and the command says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wavepp.commands.sim import parse_seeds
from wavepp.errors import ConfigError
from wavepp.protocol.states import Event, Phase, all_edges
from wavepp.sim.campaign import COVERAGE_SEEDS, Campaign, run_seed
from wavepp.sim.draw import draw_world

TWICE = "from wavepp.sim.campaign import run_seed; print([run_seed(s).digest for s in (3, 8, 11)])"


@pytest.mark.parametrize("chunk", range(4))
def test_seeds_run_clean(chunk: int) -> None:
    for seed in range(10 * chunk, 10 * chunk + 10):
        assert run_seed(seed).violation is None


def test_a_seed_is_one_history_in_every_process() -> None:
    digests = set()
    for hash_seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", TWICE],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert digests == {f"{[run_seed(seed).digest for seed in (3, 8, 11)]}\n"}


def test_another_seed_is_another_history() -> None:
    assert run_seed(3).digest != run_seed(8).digest


def test_worlds_differ_in_everything_that_can_differ() -> None:
    worlds = [draw_world(seed)[0] for seed in range(200)]
    for name in ("block_size", "ring_depth", "wave_tokens_max", "max_num_seqs", "agreement",
                 "defer_shared_prefix", "enable_prefix_caching", "weak_keys"):  # fmt: skip
        assert len({getattr(world, name) for world in worlds}) > 1, name
    assert {len(world.stages) for world in worlds} == {1, 2, 3, 4, 5}
    kinds = {group.kind for world in worlds for stage in world.stages for group in stage.groups}
    assert kinds == {"attention", "recurrent", "sliding"}
    assert any(group.host_units for w in worlds for stage in w.stages for group in stage.groups)
    assert any(world.death_s is not None for world in worlds)


def test_every_line_of_a_trace_is_aligned() -> None:
    lines: list[str] = []
    run_seed(3, show=lines.append)
    assert len(lines) > 50
    for line in lines:
        assert float(line[:11]) >= 0
        assert line[13:21].split()[0] in ("driver", "stage")


def test_a_long_campaign_must_take_every_move() -> None:
    campaign = Campaign()
    campaign.seeds = COVERAGE_SEEDS
    campaign.edges.update(all_edges())
    assert not campaign.failed
    del campaign.edges[Phase.RETRYING, Event.RETRY]
    assert campaign.failed
    assert campaign.missing == ["retrying -retry->"]


@pytest.mark.parametrize(("text", "seeds"), [("7", (7, None)), ("0:200", (0, 200))])
def test_seeds_are_one_or_a_range(text: str, seeds: tuple[int, int | None]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "-1", "5:5", "9:3", "1:2:3"])
def test_bad_seeds_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(text)


def test_the_command_prints_events_and_sums_and_says_how_to_repeat() -> None:
    done = _command("7")
    assert done.returncode == 0, done.stderr
    assert "decide    1            Announce(" in done.stdout
    assert "violations  0" in done.stdout
    assert _command("0:3").stdout.count("\n") < 40
    assert _command("3:0").returncode == 2


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wavepp.cli", "sim", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
