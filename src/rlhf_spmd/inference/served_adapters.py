"""Adapters of one model that requests name: the weights have the adapter of one request at a time, merged, as an export has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf_spmd.models.adapters import merge
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.lora import LoraConfig, adapter_parts, is_adapter, with_stored_settings
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_json
from rlhf_spmd.models.weights import check_adapter, stored_factors


def read_adapter(spec: ModelSpec, path: str, where: str) -> LoraConfig:
    """Return the settings of the adapter in PEFT's directory ``path``. Raises ValueError, one line, if it does not fit the model."""
    file = Path(path) / ADAPTER_CONFIG
    lora = with_stored_settings(LoraConfig(path=path), read_json(file), str(file))
    check_adapter(spec, lora, "lm", where)
    return lora


class ServedAdapters:
    """The weights of ``decoder``, with at most one of the adapters ``settings``, which has PEFT's directories by name.

    - base: the weights that adapters change, as they are without one
    - factors: by adapter and weight, A and B
    - current: the adapter that the weights have; None: none
    """

    def __init__(self, decoder: Decoder, settings: Mapping[str, LoraConfig]) -> None:
        self.decoder = decoder
        self.settings = settings
        self.current: str | None = None
        self.factors: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        for name, lora in settings.items():
            assert lora.path is not None, "read_adapter has set it"
            tp = decoder.tp
            plan = plan_params(decoder.spec, decoder.head_kind, decoder.stage, decoder.pp, tp.rank, tp.size, lora=lora)
            shards = {name: shard for name, shard in plan.items() if is_adapter(name)}
            self.factors[name] = stored_factors(decoder, lora.path, shards)
        weights = decoder.state_dict()
        names = {name for factors in self.factors.values() for name in factors}
        self.base = {name: weights[f"{name}.weight"].clone() for name in sorted(names)}

    @torch.no_grad()
    def use(self, adapter: str | None) -> None:
        """Give the weights this adapter. Local: no communication. Storage stays where it is, as CUDA graphs need it."""
        if adapter == self.current:
            return
        decoder = self.decoder
        weights = decoder.state_dict()
        before, after = self.factors.get(self.current or "", {}), self.factors.get(adapter or "", {})
        for name in before.keys() | after.keys():
            values = self.base[name]
            if adapter is not None and name in after:
                lora = self.settings[adapter]
                parts = adapter_parts(decoder.shards[f"{name}.weight"], lora)
                values = merge(decoder.ops, values, *after[name], parts, lora.scale)
            weights[f"{name}.weight"].copy_(values)
        self.current = adapter
