"""What is refused on arrival, and with which words."""

from __future__ import annotations

import numpy as np
import pytest

from wavepp.control.driver import DriverControl
from wavepp.control.facts import Arrival, Arrived
from wavepp.control.options import DriverOptions
from wavepp.control.work import GroupFacts, GroupKind, Sampling, StageFacts
from wavepp.errors import ConfigError, QueueFullError, RequestError
from wavepp.units import StageIndex


def stage_facts(
    stage: int, blocks: int, *, block_size: int = 4, kind: GroupKind = "attention"
) -> StageFacts:
    group = GroupFacts(name="full", kind=kind, units=blocks, bytes_per_unit=8)
    return StageFacts(
        stage=StageIndex(stage),
        layers=(stage, stage + 1),
        block_size=block_size,
        vocab_size=100,
        max_model_len=50,
        groups=(group,),
    )


def arrival(user_id: str, tokens: list[int], *, max_tokens: int = 1) -> Arrival:
    return Arrival(
        user_id=user_id,
        token_ids=np.asarray(tokens, dtype=np.int64),
        max_tokens=max_tokens,
        sampling=Sampling(),
    )


def driver(*blocks: int, **limits: int) -> DriverControl:
    options = DriverOptions(ring_depth=2, wave_tokens_max=8, max_num_seqs=1, **limits)
    return DriverControl([stage_facts(i, count) for i, count in enumerate(blocks)], options)


def refusal(control: DriverControl, request: Arrival) -> RequestError:
    refused = control.refusal(request)
    assert refused is not None
    return refused


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "code", "words"),
    [
        ([], 1, "empty_prompt", "the prompt is empty"),
        ([1, -2], 1, "token_out_of_range", "token id -2 is outside the vocabulary [0, 100)"),
        ([1, 100], 1, "token_out_of_range", "token id 100 is outside"),
        ([1, 2**40], 1, "token_out_of_range", f"token id {2**40} is outside"),
        ([1] * 51, 1, "context_length_exceeded", "has 51 tokens and max_tokens is 1"),
        ([1] * 50, 2, "context_length_exceeded", "at most 50"),
        ([1] * 33, 1, "larger_than_pool", "needs 9 cache blocks of 4 tokens; stage 1 has 8"),
        ([1] * 32, 2, "larger_than_pool", "needs 9 cache blocks"),
    ],
)
def test_refusal_names_what_is_wrong(
    tokens: list[int], max_tokens: int, code: str, words: str
) -> None:
    refused = refusal(driver(20, 8, 20), arrival("a", tokens, max_tokens=max_tokens))
    assert refused.code == code
    assert words in str(refused)


@pytest.mark.parametrize(("tokens", "max_tokens"), [([99], 0), ([0] * 32, 1), ([0] * 31, 2)])
def test_refusal_lets_the_largest_pass(tokens: list[int], max_tokens: int) -> None:
    assert driver(20, 8, 20).refusal(arrival("a", tokens, max_tokens=max_tokens)) is None


def test_refusal_of_a_live_id_only_while_it_lives() -> None:
    control = driver(8)
    control.handle(Arrived(arrival=arrival("a", [1])), now=0.0)
    assert refusal(control, arrival("a", [2])).code == "duplicate_request_id"
    assert control.refusal(arrival("b", [2])) is None


def test_queue_limit_on_requests() -> None:
    control = driver(8, max_num_queued_reqs=2)
    for name in ("a", "b"):
        control.handle(Arrived(arrival=arrival(name, [1])), now=0.0)
    refused = refusal(control, arrival("c", [1]))
    assert isinstance(refused, QueueFullError)
    assert "2 requests wait; max_num_queued_reqs is 2" in str(refused)


def test_queue_limit_on_tokens_always_lets_one_wait() -> None:
    control = driver(8, max_num_queued_tokens=5)
    assert control.refusal(arrival("a", [1] * 9)) is None
    control.handle(Arrived(arrival=arrival("a", [1] * 4)), now=0.0)
    assert control.refusal(arrival("b", [1])) is None
    assert isinstance(refusal(control, arrival("b", [1, 1])), QueueFullError)


def test_row_a18_stages_must_agree_on_the_block_size() -> None:
    facts = [stage_facts(0, 8), stage_facts(1, 8), stage_facts(2, 8, block_size=8)]
    options = DriverOptions(ring_depth=2, wave_tokens_max=8, max_num_seqs=1)
    with pytest.raises(ConfigError, match="block_size: stage 0 has 4, stage 2 has 8"):
        DriverControl(facts, options)


def test_snapshots_limit_no_lengths() -> None:
    facts = [stage_facts(0, 2, kind="recurrent")]
    options = DriverOptions(ring_depth=2, wave_tokens_max=8, max_num_seqs=9)
    control = DriverControl(facts, options)
    assert control.limits.blocks is None
    assert control.limits.oversized_over is None
    assert control.refusal(arrival("a", [1] * 50)) is None


def test_driver_refuses_an_unknown_fact() -> None:
    with pytest.raises(TypeError):
        driver(8).handle("news", now=0.0)  # type: ignore[arg-type]
