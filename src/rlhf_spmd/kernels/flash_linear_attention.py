"""Linear attention over packed sequences by the package flash-linear-attention (fla), where it is installed on a GPU.

Its kernels take queries, keys and values in the model's dtype, as transformers hands them over; this project's own arithmetic
(:mod:`linear_attention`) has them in fp32 from the convolution on.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.devices import MIN_CAPABILITY, model_device
from rlhf_spmd.kernels.flash_attention import DTYPES
from rlhf_spmd.kernels.linear_attention import DeltaShape, DeltaStates, split_channels
from rlhf_spmd.kernels.packing import Packing

PACKAGE = "flash-linear-attention"
MIN_VERSION = (0, 5)  # since it value heads may outnumber key heads


class FlashLinearAttention:
    """Linear attention by two functions of the package: the convolution and the rule. ``name``: in the log line at the start of a
    run."""

    name = "fla"

    def mix(
        self,
        x: Tensor,
        decay: Tensor,
        rate: Tensor,
        weight: Tensor,
        shape: DeltaShape,
        packing: Packing,
        before: DeltaStates | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs [T, value heads, D], and with ``before`` the memory behind the last tokens.

        ``x``: [T, C]; ``decay`` and ``rate``: [T, value heads]; ``weight``: [C, 1, kernel]. ``before``: the states of the sequences,
        which all have tokens; None: sequences begin.
        """
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        inputs, memory = (None, None) if before is None else before
        if inputs is not None:  # the package keeps ``kernel`` inputs, the oldest of which it never reads
            inputs = F.pad(inputs.transpose(1, 2), (1, 0)).contiguous()
        options = {"initial_state": inputs, "activation": "silu", "cu_seqlens": packing.long_bounds}
        mixed, _ = causal_conv1d(x[None].contiguous(), weight[:, 0], **options)
        q, k, v = split_channels(mixed, shape)
        out, after = chunk_gated_delta_rule(
            q,
            k,
            v.flatten(2, 3),
            g=decay[None],
            beta=rate[None],
            initial_state=None if memory is None else memory.flatten(1, 2),
            output_final_state=memory is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=packing.long_bounds,
        )
        return out[0], None if memory is None else after.view_as(memory)


@cache
def choose_packed_delta(dtype: torch.dtype) -> FlashLinearAttention | None:
    """Return the package's linear attention for models of ``dtype`` on this process's device, or None if it does not serve."""
    device = model_device()
    if device.type != "cuda" or dtype not in DTYPES or find_spec("fla") is None:
        return None
    return FlashLinearAttention() if torch.cuda.get_device_capability() >= MIN_CAPABILITY and _is_new() else None


def _is_new() -> bool:
    try:
        return tuple(int(part) for part in version(PACKAGE).split(".")[:2]) >= MIN_VERSION
    except (PackageNotFoundError, ValueError):
        return False
