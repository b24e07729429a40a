"""transformers' models in float64 throughout: what they compute in float32 whatever their dtype (norms, routers, softmax) too.

Rotary tables stay theirs, which are in float32 as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def wide() -> Iterator[None]:
    """Whoever asks torch for float32 gets float64."""
    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(Tensor, "float", Tensor.double):
        yield


def _polar(radius: Tensor, angle: Tensor) -> Tensor:
    """torch's own rounds some cosines otherwise than ``cos``."""
    return torch.complex(radius * angle.cos(), radius * angle.sin())


def double_model(path: Path) -> Any:
    """To be run inside :func:`wide`, though loaded outside."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options).double().eval()
    rotary, narrow = model.model.rotary_emb, (torch.float32, Tensor.float)
    tables = rotary.forward

    def in_float32(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        same = patch.multiple(torch, float32=narrow[0], float=narrow[0], polar=_polar)
        with same, patch.object(Tensor, "float", narrow[1]):
            return tables(x, *args, **kwargs)

    rotary.forward = in_float32
    return model


def whole_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of a model of transformers by the names on disk; of fused experts (gpt-oss) by those that others have."""
    from transformers.core_model_loading import revert_weight_conversion

    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, missing
    whole: dict[str, Any] = dict(revert_weight_conversion(model, found))
    for name in [
        name for name in whole if name.partition(".mlp.experts.")[2].partition("_bias")[0] in ("gate_up_proj", "down_proj")
    ]:
        kind, fused = "bias" if name.endswith("_bias") else "weight", whole.pop(name)
        for number, part in enumerate(fused):
            prefix, part = name.rpartition(".")[0] + f".{number}.", part.t() if part.ndim == 2 else part
            if "gate_up" in name:
                whole |= {f"{prefix}gate_proj.{kind}": part[::2], f"{prefix}up_proj.{kind}": part[1::2]}
            else:
                whole[f"{prefix}down_proj.{kind}"] = part
    return whole
