"""The ablation: its rows, its table beside the paper's figures, its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wavepp.bench.ablation import ROWS, AblationPlan, options_of, run
from wavepp.bench.ablation_table import CellKey, markdown, section_name, write_sections
from wavepp.bench.page import marks
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError


def config(**options: Any) -> EngineConfig:
    named: dict[str, Any] = {
        "device": "emulated",
        "cost_model": "h200-dense-8b",
        "transport": "local",
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
        "time_scale": 0.2,
        **options,
    }
    return EngineConfig(**named)


def plan(**changes: Any) -> AblationPlan:
    words: dict[str, Any] = {
        "rows": "tp",
        "workloads": "cold,reuse",
        "prompt_lens": "640,1280",
        "concurrency": "2,3",
        "requests": 4,
        "repeats": 1,
        "reuse_frac": 0.9,
        "num_prefixes": 2,
        "seed": 0,
        **changes,
    }
    return AblationPlan.parse(**words)


def row(name: str, cell: CellKey, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "row": name,
        "workload": cell.workload,
        "prompt_len": cell.prompt_len,
        "concurrency": cell.concurrency,
        "input_tok_s": rate,
        "input_tok_s_min": rate - 1,
        "input_tok_s_max": rate + 1,
        "p50_s": 1.5,
        "p95_s": 2.5,
        "good_hit_rate": None,
        "waves": {"count": 3, "tokens_mean": 100.0},
        "stage_busy": [0.5, 0.7],
        "gaps": {"no_wave": [0.2, 0.4], "activation": [0.0, 0.0]},
        "driver_cores": 0.6,
        "driver_bound": True,
        "foreign_cores": 0.0,
        **more,
    }


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    meta = {
        "wavepp": "1",
        "cores": 2,
        "date": "2030-01-02T03:04:05Z",
        "command": "wavepp bench ablation",
        "repeats": 3,
        "config": {"cost_model": "m", "time_scale": 0.5, "transport": "ray"},
    }
    return {"meta": meta, "rows": list(rows)}


def test_rows_are_run_in_their_order_whatever_the_words() -> None:
    found = plan(rows="balanced, naive,mpu")
    assert found.rows == ("naive", "mpu", "balanced")
    assert found.cells == (CellKey("cold", 640, 2), CellKey("reuse", 1280, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": "other"}, "row 'other' is not one of"),
        ({"concurrency": "1"}, "lists of one length"),
        ({"workloads": "cold,trace"}, "workload 'trace': an ablation runs"),
        ({"prompt_lens": "5,x"}, "prompt_len '5,x'"),
    ],
)
def test_plan_names_what_it_cannot_read(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**changes)
    assert said in str(caught.value)


def test_tensor_parallel_reference_is_one_stage_of_all_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ROWS, "tp", {})
    made = options_of("tp", config(max_num_seqs=6))
    assert (made.pipeline_parallel_size, made.tensor_parallel_size) == (1, 2)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (512, 12)


@pytest.mark.parametrize("name", ["naive", "wave", "lease"])
def test_rows_that_reserve_nothing_take_the_headroom_of_the_others_for_none(name: Any) -> None:
    given = config(lease_headroom_waves=0)
    assert options_of(name, given).lease_headroom_waves is None
    assert options_of("mpu", given).lease_headroom_waves == 0


def test_a_row_whose_switch_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "tp", {"admission": "by mail"})
    with pytest.raises(ConfigError, match="row 'tp' needs --admission by mail"):
        options_of("tp", config())


def test_only_emulated_devices_are_taken() -> None:
    with pytest.raises(ConfigError, match="is run on emulated devices"):
        run(
            EngineConfig(model="m"),
            plan(),
            json_file=None,
            results=None,
            plot_file=None,
            command="",
        )


def test_table_stands_beside_the_paper_and_flags_the_driver() -> None:
    cell = CellKey("cold", 131072, 16)
    other = row("wave", CellKey("reuse", 131072, 8), 7.0)
    first, second = report(row("escrow", cell, 30.0), row("naive", cell, 1.0)), report(other)
    text = markdown([first, second, report(row("naive", cell, 9000.0))], cell)
    assert "Emulated (escrow, naive): cost model `m`, time scale 0.5, transport ray, 2" in text
    assert text.count("wavepp bench ablation") == 2
    naive, escrow = (line for line in text.splitlines() if "admission" in line or "+ lea" in line)
    assert naive.endswith("static waves | 9,000 | 8,826 | 8,999..9,001 | 1.50 |  | 2.50 |")
    assert escrow == "| + leases and escrows | 30 |  | 29..31 | 1.50 | 69.69 | 2.50 |"
    assert "| naive | 60% | 30% | 0% | 0% | 0% | 3, 100 |  | 0.60 (over half: suspect) |" in text


def test_only_what_is_between_the_marks_is_written(tmp_path: Path) -> None:
    page, cell = tmp_path / "page.md", CellKey("cold", 10, 1)
    begin, end = marks(section_name(cell))
    page.write_text(f"before\n{begin}\nwas here\n{end}\nafter\n")
    write_sections([report(row("tp", cell, 5.0))], page)
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\nEmulated")
    assert text.endswith(f"{end}\nafter\n")
    assert "was here" not in text
    with pytest.raises(ConfigError, match="needs the lines <!-- ablation cold 11 1: begin"):
        write_sections([report(row("tp", CellKey("cold", 11, 1), 5.0))], page)


def test_rows_are_measured_and_written(tmp_path: Path) -> None:
    page, figure, out = tmp_path / "page.md", tmp_path / "waves.png", tmp_path / "out.json"
    cells = CellKey("cold", 640, 2), CellKey("reuse", 1280, 3)
    page.write_text("".join("\n".join(marks(section_name(cell))) for cell in cells))
    run(
        config(block_size=64),
        plan(rows="greedy"),
        json_file=out,
        results=page,
        plot_file=figure,
        command="wavepp bench ablation --rows greedy",
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["row"], row["workload"], row["concurrency"]) for row in rows] == [
        ("greedy", "cold", 2),
        ("greedy", "reuse", 3),
    ]
    assert [row["good_hit_rate"] for row in rows] == [None, 1.0]
    assert "wavepp bench ablation --rows greedy" in page.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_page_that_lacks_one_cells_marks_is_left_as_it_was(tmp_path: Path) -> None:
    page, known, other = tmp_path / "page.md", CellKey("cold", 10, 1), CellKey("cold", 20, 1)
    page.write_text("\n".join(marks(section_name(known))))
    before = page.read_text()
    with pytest.raises(ConfigError, match="needs the lines"):
        write_sections([report(row("tp", known, 5.0), row("tp", other, 5.0))], page)
    assert page.read_text() == before
