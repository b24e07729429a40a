"""gpt-oss as it is published: experts in MXFP4, read as transformers reads them, and exported without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import read_spec, spec_from_config
from rlhf_spmd.models.weights import check_pretrained, load_pretrained, write_random_model
from rlhf_spmd.parallel.collectives import solo
from saved_models import checkpoint_of, logits, model_tensors
from small_models import CONFIGS

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32


def write_published(path: Path) -> dict[str, Tensor]:
    """Random bytes for the experts' weights; returns what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = {**CONFIGS["gpt-oss"], **SIZES}
    write_random_model(path, {**config, "initializer_range": 0.2}, 5)
    stored, whole = load_file(path / "model.safetensors"), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in stored if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")]:
        count, inner, outer = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, outer, inner // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, (count, outer, inner // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)
    stored = {name: x if x.dtype == torch.uint8 else x.bfloat16() for name, x in stored.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return whole | {name: x for name, x in stored.items() if x.dtype != torch.uint8}


def test_mxfp4_is_read_as_transformers_reads_it_and_exported_without(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    want = write_published(source)
    spec = read_spec(source)
    check_pretrained(spec, source, "lm")
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.bfloat16, "cpu")
    load_pretrained(decoder, source)
    path = checkpoint_of(model_tensors(source), source, tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", source, tmp_path / "out", dtype=torch.bfloat16)
    got = load_file(out / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype == torch.bfloat16 and torch.equal(got[name], tensor), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)).isfinite().all()
    gate = want["model.layers.1.mlp.experts.gate_up_proj"][2, :, 0::2].t()
    assert torch.equal(decoder.layers[1].gate_up.weight.view(6, 2, 96, 64)[2, 0], gate)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    write_published(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    scales = stored.pop("model.layers.0.mlp.experts.down_proj_scales")
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec = read_spec(tmp_path)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj_scales' is missing"):
        check_pretrained(spec, tmp_path, "lm")
    stored["model.layers.0.mlp.experts.down_proj_scales"] = scales.float()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has dtype F32; allowed: U8"):
        check_pretrained(spec, tmp_path, "lm")
    with pytest.raises(
        ValueError, match="quantization_config: 'quant_method' is 'fp8', which is not supported; allowed: 'mxfp4'"
    ):
        spec_from_config({**CONFIGS["gpt-oss"], "quantization_config": {"quant_method": "fp8"}}, "test")
