"""The flashinfer adapter hands its kernels the right pages, rows and merges. The kernels here are
plain torch of the same contract; float32 stands for the half types, so that results compare."""

from __future__ import annotations

import sys

import pytest
import torch
from flashinfer_in_torch import IN_TORCH
from flashinfer_waves import CPU, latent, paged, planned

from wavepp.errors import ConfigError
from wavepp.kernels import flashinfer_attention
from wavepp.kernels.flashinfer_attention import FlashInferAttention
from wavepp.kernels.select import select_ops


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    monkeypatch.setattr(flashinfer_attention, "HALF", (torch.float32,))
    monkeypatch.setattr(flashinfer_attention, "SCRATCH_BYTES", 1)
    return FlashInferAttention(IN_TORCH, CPU)


def wrappers(adapter: FlashInferAttention) -> list:
    return [planned.wrapper for planned in adapter._wrappers.values()]


@pytest.mark.parametrize("window", [None, 5, 16, 50])
def test_paged_attention_sees_its_pages(adapter: FlashInferAttention, window: int | None) -> None:
    ours, expected = paged(adapter, planned(window))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
    assert [type(wrapper) for wrapper in wrappers(adapter)] == [IN_TORCH.paged]


def test_latent_attention_merges_own_and_cached_rows(adapter: FlashInferAttention) -> None:
    ours, expected = latent(adapter, planned())
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
    kinds = {type(wrapper) for wrapper in wrappers(adapter)}
    assert kinds == {IN_TORCH.ragged, IN_TORCH.latent}


def test_wave_is_planned_once_for_all_layers(adapter: FlashInferAttention) -> None:
    waves = [planned(), planned()]
    for wave in waves:
        for _ in range(3):
            paged(adapter, wave)
            latent(adapter, wave)
    assert [wrapper.plans for wrapper in wrappers(adapter)] == [2, 2, 2]


def test_what_has_no_kernel_is_left_to_torch() -> None:
    adapter = FlashInferAttention(IN_TORCH, CPU)  # float32
    for ours, expected in (paged(adapter, planned()), latent(adapter, planned())):
        assert torch.equal(ours, expected)
    assert not wrappers(adapter)


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"flashinfer is not installed: .*wavepp\[cuda\]"):
        select_ops(torch.device("cuda"))
