"""The wave-time model: sums, inversion, and the fit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp.errors import ConfigError
from wavepp.planner.packing import Cut
from wavepp.planner.wave_time import (
    CONSTANT_SHARE,
    StageCosts,
    StageFit,
    WaveLoad,
    WaveTimeModel,
    assumed_costs,
    fit_stage,
    parse_stage_costs,
    span_context,
)
from wavepp.units import RequestId

M = 16384
TOKENS = StageCosts(c0=0.0, c1=1.0, c2=0.0)
TRUE = StageCosts(c0=0.015, c1=18e-6, c2=1.35e-10)


def loads(rng: random.Random, count: int) -> list[WaveLoad]:
    """Waves of 2K to 16K tokens at contexts of 0 to 262K."""
    made = []
    for _ in range(count):
        tokens = rng.randrange(2048, 16385)
        made.append(WaveLoad(tokens=tokens, context=span_context(rng.randrange(262144), tokens)))
    return made


def close(costs: StageCosts | None, share: float) -> bool:
    """Predictions agree within `share` over the whole range of waves."""
    assert costs is not None
    ratios = [costs.seconds(load) / TRUE.seconds(load) for load in loads(random.Random(9), 100)]
    return 1 - share <= min(ratios) <= max(ratios) <= 1 + share


@given(st.integers(0, 1000), st.integers(1, 300))
def test_context_is_the_sum_of_attended_positions(start: int, length: int) -> None:
    assert span_context(start, length) == sum(range(start + 1, start + length + 1))


def test_the_load_of_a_wave_is_that_of_its_spans() -> None:
    cuts = [
        Cut(request_id=RequestId("a"), start=10, length=5, final=False),
        Cut(request_id=RequestId("b"), start=0, length=3, final=True),
    ]
    assert WaveLoad.of(cuts) == WaveLoad(tokens=8, context=11 + 12 + 13 + 14 + 15 + 1 + 2 + 3)


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**5),
    st.sampled_from([TRUE, TOKENS, StageCosts(c0=0.1, c1=0.0, c2=1e-9)]),
)
def test_tokens_within_is_the_inverse_of_the_work(
    start: int, length: int, costs: StageCosts
) -> None:
    def work(tokens: int) -> float:
        return costs.work_seconds(WaveLoad(tokens=tokens, context=span_context(start, tokens)))

    fitting = costs.tokens_within(start, work(length) * (1 + 1e-9))
    assert length <= fitting <= length + 1
    assert costs.tokens_within(start, 0.0) == 0


def test_the_fit_finds_the_coefficients_of_exact_timings() -> None:
    fit = StageFit(wave_tokens_max=M)
    assert fit.costs is None
    for load in loads(random.Random(1), 60):
        fit.add(load, TRUE.seconds(load))
    assert close(fit.costs, 0.01)


def test_the_fit_stands_noise_and_outliers() -> None:
    """5 % of noise, and one wave in ten takes ten times as long."""
    rng = random.Random(2)
    fit = StageFit(wave_tokens_max=M)
    for index, load in enumerate(loads(rng, 300)):
        noise = rng.uniform(0.95, 1.05)
        fit.add(load, TRUE.seconds(load) * noise * (10 if index % 10 == 9 else 1))
    assert close(fit.costs, 0.2)


def test_the_fit_follows_a_drift() -> None:
    rng = random.Random(3)
    fit = StageFit(wave_tokens_max=M)
    for load in loads(rng, 200):
        fit.add(load, TRUE.seconds(load) / 2)
    for load in loads(rng, 200):
        fit.add(load, TRUE.seconds(load))
    assert close(fit.costs, 0.05)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_coefficients_are_never_negative(seed: int, count: int) -> None:
    """Whatever the timings say."""
    rng = random.Random(seed)
    fit = StageFit(wave_tokens_max=M)
    for load in loads(rng, count):
        fit.add(load, rng.uniform(1e-6, 10.0))
        costs = fit.costs
        assert costs is not None
        assert min(costs.c0, costs.c1, costs.c2) >= 0
        assert costs.c1 + costs.c2 > 0


def test_equal_waves_do_not_make_a_constant_out_of_noise() -> None:
    """Nothing tells c0 from c1; the time of such waves is right, and c0 stays small."""
    rng = random.Random(4)
    load = WaveLoad(tokens=16384, context=span_context(100_000, 16384))
    fit = StageFit(wave_tokens_max=M)
    for _ in range(200):
        fit.add(load, 0.5 * rng.uniform(0.98, 1.02))
    assert fit.costs is not None
    assert fit.costs.seconds(load) == pytest.approx(0.5, rel=0.02)
    assert fit.costs.c0 < 0.1


def test_a_fit_starts_from_given_coefficients_and_leaves_them_for_what_it_sees() -> None:
    slow = StageCosts(c0=0.1, c1=1e-3, c2=1e-9)
    fit = StageFit(slow, wave_tokens_max=M)
    assert fit.costs == slow
    for load in loads(random.Random(5), 200):
        fit.add(load, TRUE.seconds(load))
    assert close(fit.costs, 0.02)


def test_samples_of_no_time_are_ignored() -> None:
    fit = StageFit(wave_tokens_max=M)
    fit.add(WaveLoad(tokens=5, context=15), 0.0)
    assert fit.costs is None


def test_the_slowest_stage_depends_on_the_work() -> None:
    flat = StageCosts(c0=0.0, c1=2e-5, c2=0.0)
    steep = StageCosts(c0=0.0, c1=1e-5, c2=1e-9)
    model = WaveTimeModel([flat, steep], wave_tokens_max=M)
    assert model.slowest(WaveLoad(tokens=1000, context=span_context(0, 1000))) == flat
    assert model.slowest(WaveLoad(tokens=1000, context=span_context(50_000, 1000))) == steep


def test_before_any_sample_waves_are_assumed_to_have_a_small_constant() -> None:
    unknown = WaveTimeModel([None, None], wave_tokens_max=M)
    assumed = unknown.slowest(WaveLoad(tokens=1, context=1))
    assert assumed == assumed_costs(M)
    assert assumed.c0 == pytest.approx(CONSTANT_SHARE * M * assumed.c1)


def test_each_stage_is_fitted_by_its_own_times() -> None:
    model = WaveTimeModel([None, None], wave_tokens_max=M)
    for load in loads(random.Random(6), 100):
        model.add(load, [TRUE.seconds(load), 2 * TRUE.seconds(load)])
    first, second = model.costs
    assert close(first, 0.01)
    assert second is not None
    assert second.c1 == pytest.approx(2 * TRUE.c1, rel=0.02)


def test_a_profile_is_fitted_off_line() -> None:
    samples = [(load, TRUE.seconds(load)) for load in loads(random.Random(7), 30)]
    assert close(fit_stage(samples), 0.001)
    with pytest.raises(ConfigError, match="no sample"):
        fit_stage([])


def test_coefficients_are_read_from_a_file_s_content() -> None:
    document = {"stages": [{"c0": 0.015, "c1": 18e-6, "c2": 1.35e-10}, {"c0": 0, "c1": 1, "c2": 0}]}
    assert parse_stage_costs(document) == (TRUE, TOKENS)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({}, "'stages'"),
        ({"stages": []}, "'stages'"),
        ({"stages": [{"c0": 1, "c1": 1, "c2": 1}], "more": 1}, "'stages'"),
        ({"stages": [{"c0": 1, "c1": 1}]}, "stage 0: expected c0, c1 and c2"),
        ({"stages": [{"c0": 1, "c1": "x", "c2": 1}]}, "stage 0: c1 'x' is no number"),
        ({"stages": [{"c0": -1, "c1": 1, "c2": 1}]}, "stage 0: c0 -1"),
        ({"stages": [{"c0": 1, "c1": float("nan"), "c2": 1}]}, "stage 0: c1 nan"),
        ({"stages": [{"c0": 1, "c1": 0, "c2": 0}]}, "stage 0: c1 and c2 are both 0"),
    ],
)
def test_bad_coefficients_are_named(document: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_stage_costs(document)
