"""The admission benchmark: through the command, on small prompts, and its parts on real caches."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from wavepp.bench.admission import Plan, goals, measure, run, table
from wavepp.bench.admission_load import Lives, Load, attention_cache, fill, fork, part_of
from wavepp.bench.admission_rounds import Admissions
from wavepp.bench.admission_stage import SECTIONS, Discovery
from wavepp.bench.stopwatch import Stopwatch, collector_off, timed
from wavepp.cache.types import Prompt
from wavepp.console import open_console
from wavepp.errors import ConfigError

WAVEPP = [sys.executable, "-m", "wavepp.cli", "bench", "admission"]
SMALL = {
    "prompt_len": 2048,
    "concurrency": 3,
    "block_size": 16,
    "stages": 2,
    "runs": 10,
    "repeats": 2,
    "seed": 7,
}
TIMES = {f"{clock}_{what}_us" for clock in ("wall", "cpu") for what in ("p50", "p99", "max", "min")}
KEYS = {"workload", "measure", "prompt_len", "concurrency", "block_size"}
LOAD = Load(prompt_len=1000, concurrency=3, block_size=16, runs=10, stages=2, seed=1)


def test_command_writes_rows_of_both_lengths(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = [
        word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    done = subprocess.run(
        [*WAVEPP, *map(str, flags), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "admission: 2,048 tokens in blocks of 16, 3 at once, 2 stages" in done.stdout
    assert "Garbage collection is off while anything is timed" in " ".join(done.stdout.split())
    report = json.loads(out.read_text())
    assert report["meta"]["tool"] == "wavepp bench admission"
    assert report["meta"]["shorter_prompt_len"] == 512
    by_length = {
        length: {row["measure"]: row for row in report["rows"] if row["prompt_len"] == length}
        for length in (2048, 512)
    }
    assert by_length[2048].keys() == by_length[512].keys() >= goals(10).keys()
    for name, row in by_length[512].items():
        assert set(row) == KEYS | ({"count"} if "count" in row else TIMES | {"samples", "repeats"})
        assert "goal" not in row, name
    for name, row in by_length[2048].items():
        if "count" in row:
            continue
        assert row["cpu_ratio"] == pytest.approx(
            row["cpu_p50_us"] / by_length[512][name]["cpu_p50_us"]
        )
        assert ("goal" in row) == (name in goals(10))
        assert 0 < row["wall_min_us"] <= row["wall_p50_us"] <= row["wall_max_us"]
        assert row["repeats"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_len": 511}, "prompt_len 511: at least 512 with block_size 16"),
        ({"runs": 32}, "runs 32: at most 31, since a prompt of 512 tokens has 32 blocks"),
    ],
)
def test_plan_that_can_not_be_measured_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(Plan(**{**SMALL, **changes}), None)


def test_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder .*/no does not exist"):
        run(Plan(**SMALL), tmp_path / "no" / "out.json")


def test_table_shows_the_longer_prompts_and_no_single_holds() -> None:
    report = measure(Plan(**{**SMALL, "repeats": 1}))
    shown = table(report["rows"], Plan(**SMALL))
    measures = list(shown.columns[0].cells)
    assert len(measures) == len(set(measures))
    assert "longest hold: 10 runs" in measures
    assert not any(name.startswith(("claim:", "publish:", "free:")) for name in measures)
    assert set(goals(10)) <= set(measures)
    open_console().print(shown)


def test_every_section_leaves_its_cache_idle_and_sound() -> None:
    for make in SECTIONS:
        watch = Stopwatch()
        section = make(LOAD, watch)
        for _ in range(3):
            section.repeat()
            watch.next_repeat()
        cache = section._cache  # type: ignore[attr-defined]
        cache.check()
        assert cache.held() == ()
        assert cache.leftovers() is None
        assert all(len(runs) == 3 for runs in watch.repeats.values())


def test_lives_are_timed_hold_by_hold() -> None:
    cache, watch = attention_cache(LOAD, units=200), Stopwatch()
    prompt = LOAD.prompts("one", 1)[0]
    Lives(cache, LOAD, "cold", watch).live(prompt)
    Lives(cache, LOAD, "again", watch).live(prompt)
    holds = ("claim", "materialize", "publish", "free")
    for case in ("cold", "again"):
        longest = watch.repeats[f"longest hold: {case}"][0].wall_us
        each = [watch.repeats[f"{hold}: {case}"][0].wall_us for hold in holds]
        assert longest == [max(max(values) for values in each)]
    assert cache.hint(prompt).reuse.attention == prompt.tail


def test_forked_prompt_is_as_many_runs_as_was_asked() -> None:
    cache = attention_cache(LOAD, units=500)
    prompt = LOAD.prompts("one", 1)[0]
    fill(cache, LOAD, [prompt])
    fork(cache, LOAD, prompt, 0)
    path = cache._parts.tree.walk(prompt, len(prompt.keys)).node
    runs = 0
    while path is not None and path.parent is not None:
        runs, path = runs + 1, path.parent
    assert runs == LOAD.runs
    cache.check()


def test_part_of_a_prompt_shares_so_many_blocks() -> None:
    whole = LOAD.prompts("one", 1)[0]
    part = part_of(LOAD, whole, 0, 20)
    assert part.keys[:20] == whole.keys[:20]
    assert part.keys[20] != whole.keys[20]
    assert part.num_tokens == whole.num_tokens


def test_bursts_are_admitted_in_two_rounds_each_and_at_the_right_endpoints() -> None:
    watch = Stopwatch()
    pipeline = Admissions(LOAD, watch)
    endpoints: dict[str, set[int]] = {}
    measure_burst = pipeline._measure

    def spy(case: str, prompts: list[Prompt]) -> list[str]:
        names = measure_burst(case, prompts)
        for record in pipeline._driver.leader.admitted:
            endpoints.setdefault(case, set()).add(record.run.endpoint)
        return names

    pipeline._measure = spy  # type: ignore[method-assign]
    pipeline.repeat()
    assert endpoints == {"whole held": {992}, "90% held": {896}, "cold": {0}}
    for case in endpoints:
        assert watch.numbers[f"admission, {case}: rounds, at most"] == [2]
        assert len(watch.repeats[f"admission, {case}: in all"][0].cpu_us) == 1
    for stage in pipeline._stages:
        stage.check()
    assert watch.repeats["one hold, in rounds"]
    assert watch.repeats["one hold, in waves"]


def test_discovery_is_keys_and_the_probe_with_them() -> None:
    watch = Stopwatch()
    Discovery(LOAD, watch).repeat()
    parts = [
        watch.repeats[name][0].wall_us
        for name in ("keys", "probe: whole prompt held, after hashing", "hint discovery")
    ]
    assert [keys + probe for keys, probe, _ in zip(*parts, strict=True)] == parts[2]
    assert len(parts[2]) == LOAD.concurrency


def test_summary_is_the_median_over_repeats() -> None:
    watch = Stopwatch()
    for values in ([1.0, 2.0, 9.0], [4.0, 5.0, 6.0], [0.5, 3.0, 100.0]):
        for value in values:
            watch.note("x", value, value / 2)
        watch.next_repeat()
    row = watch.summary("x")
    assert (row["samples"], row["repeats"]) == (3, 3)
    assert (row["wall_p50_us"], row["wall_p99_us"], row["wall_max_us"]) == (3.0, 9.0, 9.0)
    assert (row["wall_min_us"], row["cpu_p50_us"]) == (0.5, 1.5)


def test_collector_is_off_only_meanwhile() -> None:
    assert gc.isenabled()
    with collector_off():
        assert not gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_off():
        timed(lambda: 1 // 0)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert timed(lambda: 5)[0] == 5
