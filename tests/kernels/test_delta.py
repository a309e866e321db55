"""The delta rule and the short convolution against their step-by-step formulas."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import Tensor

from wavepp.kernels.api import DeltaInputs
from wavepp.kernels.recurrent_plan import RecurrentSlots, StateSpan, plan_states
from wavepp.kernels.torch_delta import delta_rule, short_conv

HEADS, KEY, VALUE = 4, 8, 6
SLOTS = 12


def inputs(rows: int, *, channels: int = KEY, strength: float = 1.0, key_heads: int = HEADS):
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return DeltaInputs(
        q=randn(rows, key_heads, KEY),
        k=randn(rows, key_heads, KEY),
        v=randn(rows, HEADS, VALUE),
        log_decay=-strength * randn(rows, HEADS, channels).abs(),
        beta=torch.rand(rows, HEADS, generator=generator),
    )


def step_by_step(given: DeltaInputs, state: Tensor, rows: slice) -> tuple[Tensor, list[Tensor]]:
    """Results, and the state after each row, in float64 with the matrix form of the update."""
    group = HEADS // given.q.shape[1]
    q, k = (x[rows].double().repeat_interleave(group, 1) for x in (given.q, given.k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v, beta = given.v[rows].double(), given.beta[rows].double()
    alpha = given.log_decay[rows].double().exp().expand(-1, -1, KEY)
    states, results, s = [], [], state.double()
    for t in range(len(q)):
        outer = k[t, :, :, None] * k[t, :, None, :]
        forget = torch.eye(KEY) - beta[t, :, None, None] * outer
        write = beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None, :]
        s = forget @ (alpha[t, :, :, None] * s) + write
        states.append(s.float())
        results.append(torch.einsum("hkv,hk->hv", s, q[t]) * KEY**-0.5)
    return torch.stack(results).float(), states


def fresh_pool(*shape: int) -> Tensor:
    return torch.randn((SLOTS, *shape), generator=torch.Generator().manual_seed(1))


SPANS = (
    ((0, 150), RecurrentSlots(read_slot=None, write_slot=0, snapshots=((64, 3), (128, 4)))),
    ((192, 70), RecurrentSlots(read_slot=5, write_slot=5, snapshots=((64, 6),))),
    ((37, 91), RecurrentSlots(read_slot=7, write_slot=8, snapshots=((20, 9), (91, 10)))),
    ((500, 1), RecurrentSlots(read_slot=7, write_slot=11)),
)


def planned() -> tuple[StateSpan, ...]:
    return plan_states([extent for extent, _ in SPANS], [slots for _, slots in SPANS])


@pytest.mark.parametrize("strength", [0.05, 1.0, 30.0])
@pytest.mark.parametrize(("channels", "key_heads"), [(KEY, HEADS), (1, HEADS), (1, 2)])
def test_delta_rule_is_its_recurrence(channels, key_heads, strength):
    """Several spans at once, from nothing and from states, with states kept inside."""
    given = inputs(312, channels=channels, strength=strength, key_heads=key_heads)
    pool = fresh_pool(HEADS, KEY, VALUE)
    before = pool.clone()
    result = delta_rule(given, pool, planned())
    for span in planned():
        rows, slots = slice(span.row, span.row + span.length), span.slots
        start = torch.zeros_like(pool[0]) if slots.read_slot is None else before[slots.read_slot]
        expected, states = step_by_step(given, start, rows)
        # Sums of strong decays have few digits left for their differences.
        atol = 1e-4 if strength > 1 else 2e-6
        torch.testing.assert_close(result[rows], expected, atol=atol, rtol=1e-5)
        for offset, unit in (*slots.snapshots, (span.length, slots.write_slot)):
            torch.testing.assert_close(pool[unit], states[offset - 1], atol=atol, rtol=1e-5)
    untouched = [1, 2, 7]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("channels", [1, KEY])
def test_states_do_not_depend_on_cuts_at_chunk_boundaries(channels):
    given = inputs(320, channels=channels)
    whole, pieces = fresh_pool(HEADS, KEY, VALUE), fresh_pool(HEADS, KEY, VALUE)
    slots = RecurrentSlots(read_slot=None, write_slot=0, snapshots=((128, 1), (192, 2)))
    expected = delta_rule(given, whole, plan_states([(0, 320)], [slots]))
    results, begin = [], 0
    for end, write in ((128, 1), (192, 2), (320, 0)):
        part = DeltaInputs(
            **{name: getattr(given, name)[begin:end] for name in DeltaInputs.__dataclass_fields__}
        )
        read = None if begin == 0 else {128: 1, 192: 2}[begin]
        span = plan_states(
            [(begin, end - begin)], [RecurrentSlots(read_slot=read, write_slot=write)]
        )
        results.append(delta_rule(part, pieces, span))
        begin = end
    assert torch.equal(torch.cat(results), expected)
    assert torch.equal(whole[:3], pieces[:3])


def test_many_chunks_are_worked_on_a_few_at_a_time(monkeypatch):
    given = inputs(700)
    pools = [fresh_pool(HEADS, KEY, VALUE) for _ in range(2)]
    slots = RecurrentSlots(read_slot=None, write_slot=0)
    plan = plan_states([(0, 700)], [slots])
    expected = delta_rule(given, pools[0], plan)
    monkeypatch.setattr("wavepp.kernels.torch_delta.TILE_ELEMENTS", 2 * HEADS * 64 * KEY)
    torch.testing.assert_close(delta_rule(given, pools[1], plan), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(pools[1], pools[0], atol=1e-6, rtol=1e-6)


def test_memory_beside_the_result_does_not_grow_with_the_prompt(monkeypatch):
    monkeypatch.setattr("wavepp.kernels.torch_delta.TILE_ELEMENTS", 2 * HEADS * 64 * KEY)
    beside = []
    for rows in (256, 1024):
        given, pool = inputs(rows), fresh_pool(HEADS, KEY, VALUE)
        plan = plan_states([(0, rows)], [RecurrentSlots(read_slot=None, write_slot=0)])
        with LiveBytes() as live:
            result = delta_rule(given, pool, plan)
        beside.append(live.peak - result.nbytes)
    one_tensor = 4 * 2 * HEADS * 64 * 64  # of pairs of two chunks' rows
    assert one_tensor < beside[0] == beside[1] < 12 * one_tensor


def test_short_conv_is_a_causal_convolution():
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(312, 5, generator=rng), torch.randn(5, 4, generator=rng)
    pool = fresh_pool(3, 5)
    before = pool.clone()
    result = short_conv(x, weight, pool, planned())
    for span in planned():
        rows, slots = slice(span.row, span.row + span.length), span.slots
        tail = torch.zeros(3, 5) if slots.read_slot is None else before[slots.read_slot]
        line = torch.cat([tail, x[rows]])
        expected = F.silu(F.conv1d(line.t()[None], weight[:, None], groups=5)[0].t())
        torch.testing.assert_close(result[rows], expected)
        for offset, unit in (*slots.snapshots, (span.length, slots.write_slot)):
            assert torch.equal(pool[unit], line[offset : offset + 3])


@pytest.mark.parametrize(
    "slots",
    [
        RecurrentSlots(read_slot=3, write_slot=0),
        RecurrentSlots(read_slot=None, write_slot=0, snapshots=((9, 1),)),
        RecurrentSlots(read_slot=None, write_slot=0, snapshots=((4, 1), (2, 2))),
        RecurrentSlots(read_slot=None, write_slot=0, snapshots=((4, 0),)),
    ],
)
def test_slots_that_can_not_be_right_are_refused(slots):
    with pytest.raises(AssertionError):
        plan_states([(0, 8)], [slots])


def test_two_spans_may_not_write_to_one_slot():
    slots = RecurrentSlots(read_slot=None, write_slot=0)
    with pytest.raises(AssertionError, match="one slot"):
        plan_states([(0, 8), (0, 8)], [slots, slots])


def test_cut_at_random_positions_gives_nearly_the_same():
    given, rng = inputs(300), random.Random(0)
    pool = fresh_pool(HEADS, KEY, VALUE)
    whole = delta_rule(
        given, pool, plan_states([(0, 300)], [RecurrentSlots(read_slot=None, write_slot=0)])
    )
    cuts = sorted(rng.sample(range(1, 300), 6))
    results, begin = [], 0
    for end in (*cuts, 300):
        part = DeltaInputs(
            **{name: getattr(given, name)[begin:end] for name in DeltaInputs.__dataclass_fields__}
        )
        slots = RecurrentSlots(read_slot=1 if begin else None, write_slot=1)
        results.append(delta_rule(part, pool, plan_states([(begin, end - begin)], [slots])))
        begin = end
    torch.testing.assert_close(torch.cat(results), whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(pool[1], pool[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("channels", "key_heads"), [(KEY, HEADS), (1, 2)])
def test_single_rows_go_one_step(channels, key_heads):
    """Steps of decoding beside a longer span: from nothing, from a state, with a state kept."""
    given = inputs(73, channels=channels, key_heads=key_heads)
    slots = [
        RecurrentSlots(read_slot=None, write_slot=0, snapshots=((1, 1),)),
        RecurrentSlots(read_slot=2, write_slot=2),
        RecurrentSlots(read_slot=3, write_slot=3),
        RecurrentSlots(read_slot=4, write_slot=5, snapshots=((1, 6),)),
    ]
    spans = plan_states([(0, 1), (64, 1), (90, 70), (127, 1)], slots)
    pool = fresh_pool(HEADS, KEY, VALUE)
    before = pool.clone()
    result = delta_rule(given, pool, spans)
    for span in spans:
        rows, read = slice(span.row, span.row + span.length), span.slots.read_slot
        start = torch.zeros_like(pool[0]) if read is None else before[read]
        expected, states = step_by_step(given, start, rows)
        torch.testing.assert_close(result[rows], expected, atol=2e-6, rtol=1e-5)
        for unit in (span.slots.write_slot, *(unit for _, unit in span.slots.snapshots)):
            torch.testing.assert_close(pool[unit], states[-1], atol=2e-6, rtol=1e-5)
    assert torch.equal(pool[7:], before[7:])
