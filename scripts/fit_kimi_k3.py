"""Fits the coefficients of the cost model b300-kimi-k3 to published figures; prints residuals.

python scripts/fit_kimi_k3.py

In steady state the slowest stage is always busy, with full waves of M tokens, so a prompt of n
tokens takes on it

    n / X(n) = n * (c0 / M + c1 + c2 * (n + 1) / 2)        seconds, X: input tokens a second

The published settings have twelve layers on the slowest stage (boundaries lie between blocks of
attention residuals), three of them with attention. c0 cannot be told from c1 by full waves: it is
assumed. Tensor parallelism: see `tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

M, M_TP = 16384, 32768
WAVE_S = 1.0e-3  # a layer: half of what reading its weights takes
COLLECTIVE_WAVE_S = 6.0e-5
LAYERS, STAGE_LAYERS, STAGE_ATTENTION, ATTENTION = 93, 12, 3, 24
DEVICES = 8

COLD = {65536: 44643.0, 131072: 35878.0, 262144: 28031.0}  # published, concurrency 32
REUSE = {131072: 289096.0, 262144: 218743.0}  # published, 90 % cached; not fitted, predicted

# TP8/EP8: one published throughput (reuse 262K, concurrency 32), and three that rest on published
# geometric means over concurrencies 1 to 32 (58.8, 49.1, 37.8 %) and on a guess of how far those
# means lie below the throughput at 32: prompts of 4, 8 and 16 full waves leave some of eight stages
# idle when there are few of them.
TP_REUSE = (262144, 127099.0)
TP_RATIO = {65536: 1.588, 131072: 1.491, 262144: 1.378}
MEAN_SHARE = {65536: 0.83, 131072: 0.90, 262144: 0.95}


@dataclass(frozen=True)
class Line:
    """Seconds a token = token_s + context_s * mean context."""

    token_s: float
    context_s: float

    def at(self, context: float) -> float:
        return self.token_s + self.context_s * context


def fit(seconds: Mapping[float, float], known_s: float = 0.0) -> Line:
    """The line through context -> seconds a token, least squares of relative errors.

    Args:
        known_s: a part of the seconds that is not to be fitted.
    """
    contexts, values = np.array(list(seconds)), np.array(list(seconds.values()))
    rows = np.stack([np.ones(len(contexts)), contexts], axis=1)
    solved, *_ = np.linalg.lstsq(rows / values[:, None], 1 - known_s / values, rcond=None)
    return Line(float(solved[0]), float(solved[1]))


def pipeline() -> Line:
    """c1 and c2 of the slowest stage."""
    wave_s = STAGE_LAYERS * WAVE_S / M
    return fit({(n + 1) / 2: 1 / rate for n, rate in COLD.items()}, wave_s)


def tensor_parallel() -> tuple[Line, dict[float, float]]:
    """Seconds a token on all devices, and what it was fitted to."""
    seconds = {(n + 1) / 2: TP_RATIO[n] / (rate * MEAN_SHARE[n]) for n, rate in COLD.items()}
    length, rate = TP_REUSE
    seconds[_reuse_context(length)] = 1 / (rate * _suffix(length) / length)
    return fit(seconds), seconds


def coefficients() -> dict[str, float]:
    """What stands in the file."""
    stage, (tensor, _) = pipeline(), tensor_parallel()
    token_s, context_s = stage.token_s / STAGE_LAYERS, stage.context_s / STAGE_ATTENTION
    waves_s = LAYERS * (WAVE_S / DEVICES + COLLECTIVE_WAVE_S) / M_TP
    return {
        "token_s": token_s,
        "context_s": context_s,
        "collective_token_s": (tensor.token_s - waves_s) / LAYERS - token_s / DEVICES,
        "context_factor": tensor.context_s / (ATTENTION * context_s / DEVICES),
    }


def residuals() -> list[tuple[str, float, float]]:
    """(what, published input tokens a second, the model's) of the pipeline."""
    stage, wave_s = pipeline(), STAGE_LAYERS * WAVE_S / M
    rows = [
        (f"cold {n}, fitted", rate, 1 / (wave_s + stage.at((n + 1) / 2)))
        for n, rate in COLD.items()
    ]
    for n, rate in REUSE.items():
        computed = 1 / (wave_s + stage.at(_reuse_context(n)))
        rows.append((f"reuse {n}, predicted", rate, computed * n / _suffix(n)))
    return rows


def _suffix(length: int) -> float:
    return 0.1 * length


def _reuse_context(length: int) -> float:
    return length - _suffix(length) / 2


def _print_table(rows: Sequence[tuple[str, float, float]]) -> None:
    for name, published, modelled in rows:
        print(f"{name:26} {published:10,.0f} {modelled:10,.0f} {modelled / published - 1:+7.1%}")


if __name__ == "__main__":
    for name, value in coefficients().items():
        print(f"{name:20} {value:.4e}")
    print(f"\n{'input tokens/s':26} {'published':>10} {'model':>10}")
    _print_table(residuals())
    line, seconds = tensor_parallel()
    print("\nTP8, computed tokens/s, by mean context")
    _print_table([(f"{c:,.0f}", 1 / s, 1 / line.at(c)) for c, s in seconds.items()])
