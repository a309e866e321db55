"""Every call the flashinfer adapter makes binds to the signatures of the installed package.

Not part of the suite: it needs flashinfer-python, without its CUDA dependencies.
`scripts/check_kernels` runs it in an environment of its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from flashinfer_in_torch import IN_TORCH
from flashinfer_waves import CPU, latent, paged, planned

from wavepp.kernels import flashinfer_attention
from wavepp.kernels.flashinfer_attention import (
    FlashInferAttention,
    FlashInferParts,
    load_flashinfer,
)


def bound(real: type, plain: type, seen: list[str]) -> type:
    """`plain`, whose calls must also be right for `real`."""

    class Bound(plain):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            inspect.signature(real.__init__).bind(self, *args, **options)
            super().__init__(*args, **options)
            seen.append(f"{real.__name__}.__init__")

        def plan(self, *args: Any, **options: Any) -> None:
            inspect.signature(real.plan).bind(self, *args, **options)
            super().plan(*args, **options)
            seen.append(f"{real.__name__}.plan")

        def run(self, *args: Any, **options: Any) -> Any:
            inspect.signature(real.run).bind(self, *args, **options)
            seen.append(f"{real.__name__}.run")
            return super().run(*args, **options)

    return Bound


def test_all_calls_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    real = load_flashinfer()
    seen: list[str] = []

    def merge(*args: Any) -> Any:
        inspect.signature(real.merge).bind(*args)
        seen.append("merge_state")
        return IN_TORCH.merge(*args)

    def latent_pages(**tables: Any) -> Any:
        pages = real.latent_pages(**tables)
        seen.append("MLAPlanMetadata.csr")
        return {name: getattr(pages, name) for name in tables}

    parts = FlashInferParts(
        paged=bound(real.paged, IN_TORCH.paged, seen),
        ragged=bound(real.ragged, IN_TORCH.ragged, seen),
        latent=bound(real.latent, IN_TORCH.latent, seen),
        latent_pages=latent_pages,
        merge=merge,
    )
    monkeypatch.setattr(flashinfer_attention, "HALF", (torch.float32,))
    adapter = FlashInferAttention(parts, CPU)
    for ours, expected in (paged(adapter, planned(20)), latent(adapter, planned())):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
    assert len(set(seen)) == 11, sorted(set(seen))
