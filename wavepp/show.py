"""How results and snapshots look in a notebook (HTML) and in a terminal (rich).

Owns: which facts are shown, and how they are written. Everything is text first (`Sheet`), so both
look the same. Rich is imported only when somebody draws with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from wavepp.requests import EngineStats, PrefillResult, StageStats

VALUES_MAX = 12
TEXT_CHARS_MAX = 200
ROWS_MAX = 100

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A titled table of texts. `head` (): the first column names what the second holds."""

    title: str
    rows: Sequence[Row]
    head: Row = ()

    def html(self) -> str:
        """As a notebook shows it."""
        lines = [f"<table><caption>{escape(self.title)}</caption>"]
        if self.head:
            cells = "".join(f"<th>{escape(name)}</th>" for name in self.head)
            lines.append(f"<thead><tr>{cells}</tr></thead>")
        lines.append("<tbody>")
        for first, *rest in self.rows:
            cells = "".join(f"<td>{escape(text)}</td>" for text in rest)
            lines.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
        return "\n".join([*lines, "</tbody></table>"])

    def table(self) -> Table:
        """As a terminal shows it."""
        from rich import box
        from rich.table import Table
        from rich.text import Text  # what comes from outside is no markup

        table = Table(title=self.title, title_justify="left", box=box.SIMPLE)
        table.show_header = bool(self.head)
        for name in self.head or ("",) * max((len(row) for row in self.rows), default=0):
            table.add_column(name)
        for row in self.rows:
            table.add_row(*(Text(text) for text in row))
        return table


def result_sheet(result: PrefillResult) -> Sheet:
    """One result, fact by fact."""
    times = result.timings
    rows = [
        ("finish reason", result.finish_reason),
        ("prompt tokens", f"{result.num_prompt_tokens:,}"),
        ("of them reused", _of(result.num_cached_tokens, result.num_prompt_tokens)),
        ("tokens", _values([str(token) for token in result.token_ids])),
    ]
    if result.error is not None:
        rows.append(("error", _cut(result.error)))
    if result.text is not None:
        rows.append(("text", _cut(result.text)))
    if result.stop_reason is not None:
        rows.append(("stopped by", _cut(str(result.stop_reason))))
    if result.logprobs is not None:
        rows.append(
            ("log probabilities", _values([f"{p.chosen.logprob:.3f}" for p in result.logprobs]))
        )
    if result.prompt_logprobs is not None:
        known = [p.chosen.logprob for p in result.prompt_logprobs if p is not None]
        rows.append(("prompt log probabilities", f"{len(known):,}, sum {math.fsum(known):,.3f}"))
    marks = {
        "admitted after": times.admitted_s,
        "first wave after": times.first_wave_s,
        "first token after": times.first_token_s,
        "done after": times.done_s,
    }
    rows += [
        (name, seconds(at_s - times.queued_s)) for name, at_s in marks.items() if at_s is not None
    ]
    return Sheet(title=f"request {result.request_id}", rows=rows)


def results_sheet(results: Sequence[PrefillResult]) -> Sheet:
    """Several results, one a line."""
    rows: list[Row] = []
    for result in results[:ROWS_MAX]:
        done_s, times = result.timings.done_s, result.timings
        answer = result.text if result.text is not None else _values([*map(str, result.token_ids)])
        rows.append(
            (
                result.request_id,
                result.finish_reason,
                f"{result.num_prompt_tokens:,}",
                _of(result.num_cached_tokens, result.num_prompt_tokens),
                "" if done_s is None else seconds(done_s - times.queued_s),
                _cut(result.error if result.error is not None else answer),
            )
        )
    left = f", the first {ROWS_MAX}" if len(results) > ROWS_MAX else ""
    return Sheet(
        title=f"{len(results):,} result{'' if len(results) == 1 else 's'}{left}",
        head=("request", "finish reason", "prompt tokens", "reused", "done after", "answer"),
        rows=rows,
    )


def engine_sheet(stats: EngineStats) -> Sheet:
    """A snapshot's facts about the whole engine."""
    rows = [
        (
            "requests",
            f"{stats.requests_running:,} running, {stats.requests_waiting:,} waiting, "
            f"{stats.requests_finished:,} finished",
        ),
        ("prompt tokens", f"{stats.prompt_tokens:,}"),
        ("reused on every stage", _of(stats.prefix_hits, stats.prefix_queries)),
        ("computed tokens", f"{stats.computed_tokens:,}"),
        ("waves", f"{stats.waves:,}, {stats.ring_occupancy} of {stats.ring_depth} in flight"),
        ("rounds", f"{stats.rounds:,}"),
        ("leases", f"{stats.leases:,}, the oldest {seconds(stats.lease_age_s_max)}"),
        ("broken invariants", f"{stats.invariant_violations:,}"),
        ("up for", seconds(stats.wall_s)),
    ]
    return Sheet(title="engine", rows=rows)


def stages_sheet(stages: Sequence[StageStats]) -> Sheet:
    """A snapshot's stages, one a line."""
    head = (
        "stage",
        "layers",
        "waves",
        "busy",
        "waiting",
        "blocks held",
        "cached",
        "of",
        "escrowed",
    )
    return Sheet(title="stages", head=head, rows=[_stage_row(stage) for stage in stages])


def _stage_row(stage: StageStats) -> Row:
    whole_s = stage.busy_s + sum(stage.wait_s.values()) + stage.idle_s
    return (
        str(stage.stage),
        f"{stage.layers[0]}-{stage.layers[1] - 1}",
        f"{stage.waves:,}",
        f"{stage.busy_s / whole_s:.1%}" if whole_s > 0 else "0.0%",
        ", ".join(f"{reason} {seconds(spent_s)}" for reason, spent_s in stage.wait_s.items()),
        f"{stage.blocks_used:,}",
        f"{stage.blocks_cached:,}",
        f"{stage.blocks_total:,}",
        f"{stage.escrow_blocks:,}",
    )


def seconds(spent_s: float) -> str:
    """A duration as people say it."""
    if spent_s < 1.0:
        return f"{spent_s * 1e3:,.1f} ms"
    return f"{spent_s:,.2f} s"


def _of(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return f"{part:,} ({share:.1%})"


def _values(values: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    text = " ".join(values[:VALUES_MAX])
    more = len(values) - VALUES_MAX
    return f"{text} and {more:,} more" if more > 0 else text


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}..."
