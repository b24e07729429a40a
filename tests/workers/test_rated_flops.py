"""What data sheets say of a card, by the name that its driver gives it."""

from __future__ import annotations

import pytest
import torch

from rlhf_spmd.workers.flops import rated_flops, rating_of


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 67.0),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA H200 NVL", 835.0, 60.0),
        ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA A10G", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA B200", 2250.0, None),
    ],
)
def test_cards(name: str, half: float | None, single: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    for dtype, rating in ((torch.bfloat16, half), (torch.float16, half), (torch.float32, single), (torch.float64, None)):
        assert rating_of(name, dtype) == (None if rating is None else rating * 1e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert rating_of(name, torch.float32) is None
    assert rated_flops(torch.device("cpu"), torch.float32) is None
