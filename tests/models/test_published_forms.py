"""Models published in FP8 and in MXFP4: read as bf16 in every layout, as transformers reads them, and exported without."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.kernels.routing import split_to_bf16_terms
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.file_forms import find_tensor
from rlhf_spmd.models.heads import local_logits
from rlhf_spmd.models.stored import StoredModel, read_spec
from rlhf_spmd.models.weights import check_pretrained, load_pretrained, write_random_model
from rlhf_spmd.parallel.boxes import zero_shards
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.rank_shards import rank_shards
from saved_models import checkpoint_of, logits, model_tensors
from small_models import CONFIGS

WHOLE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128}  # blocks of 128 x 128
# a tp rank has 160 of 320 columns, or 80 of 160, which cut blocks; the last block of kv_a_proj_with_mqa has 16 rows
UNEVEN = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160, "kv_lora_rank": 138, "q_lora_rank": 130}
PUBLISHED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write_fp8(
    path: Path, config: dict[str, Any], scales: torch.dtype, block: bool = True, exact: bool = False
) -> dict[str, Tensor]:
    """Matrices but those of embedding, head and routers in random FP8; returns the tensors in bf16. ``exact``: scales are powers of
    two, with which nothing is rounded."""
    write_random_model(path, config, 5)
    generator, stored, whole = torch.Generator().manual_seed(2), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(path / "model.safetensors").items():
        whole[name] = stored[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
        if tensor.ndim < 2 or any(word in name for word in ("embed", "lm_head", ".gate.", "shared_expert_gate", "conv1d")):
            continue
        codes = (torch.randn(tensor.shape, generator=generator) * 8).to(torch.float8_e4m3fn)
        counts = [-(-size // 128) for size in tensor.shape] if block else []
        scale = torch.rand(counts, generator=generator) * 0.01 + 0.002
        scale = (torch.exp2(scale.log2().round()) if exact else scale).to(scales)
        stored |= {name: codes, f"{name}_scale_inv": scale}
        values = codes.float()
        for row in range(0, tensor.shape[0], 128):
            for column in range(0, tensor.shape[1], 128):
                factor = scale[row // 128, column // 128] if block else scale
                values[row : row + 128, column : column + 128] *= factor.float()
        whole[name] = values.bfloat16()
        if not block:
            stored[name.replace(".weight", ".activation_scale")] = torch.ones((), dtype=scales)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    quantized = PUBLISHED if block else {**PUBLISHED, "activation_scheme": "static", "weight_block_size": None}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    return whole


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2, zero=3, ep=2), Layout(pp=2, tp=4)])
def test_every_rank_reads_its_part(tmp_path: Path, layout: Layout) -> None:
    want = write_fp8(tmp_path, {**CONFIGS["deepseek-v3"], **UNEVEN, "num_hidden_layers": 2}, torch.float32)
    spec = read_spec(tmp_path)
    with ExitStack() as stack:
        stored = StoredModel(tmp_path, spec, stack)
        for pp, dp, _, tp in map(layout.coordinate, range(layout.size)):
            shards = zero_shards(rank_shards(spec, "lm", layout, pp, tp), dp, layout.dp_shard, ep=(dp, layout.ep))
            for box in (box for shard in shards.values() for box in shard.boxes):
                expected = split_to_bf16_terms(want[box.name]) if box.name.endswith("correction_bias") else want[box.name]
                got = find_tensor(stored, box.name, box.shape, False)[box.global_slices]
                assert got.numel() and torch.equal(got, expected[box.global_slices]), box


def check_export(source: Path, want: dict[str, Tensor]) -> Path:
    """Returns the directory of the export, which has the tensors ``want`` and says nothing of another form."""
    check_pretrained(read_spec(source), source, "lm")
    path = checkpoint_of(model_tensors(source), source, source.parent / "run", "lm")
    out = export_hugging_face(path, "actor", source, source.parent / "out", dtype=torch.bfloat16)
    got = load_file(out / "model.safetensors")
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    return out


@pytest.mark.parametrize(
    ("name", "scales", "block"),
    [("deepseek-v3", torch.float32, True), ("qwen3-moe", torch.bfloat16, True), ("ministral3", torch.bfloat16, False)],
)
def test_fp8_is_read_as_bf16_and_exported_without(tmp_path: Path, name: str, scales: torch.dtype, block: bool) -> None:
    want = write_fp8(tmp_path / "source", {**CONFIGS[name], **UNEVEN, "num_hidden_layers": 2}, scales, block)
    check_export(tmp_path / "source", want)


def test_transformers_has_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_fp8(tmp_path, {**CONFIGS["qwen3-moe"], **WHOLE, "num_hidden_layers": 2}, torch.float32, exact=True)
    decoder = Decoder(read_spec(tmp_path), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, tmp_path)
    with torch.no_grad():
        got = decoder(torch.arange(1, 11), PackedAttention([10]), local_logits)
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))[0]
    assert (got - theirs).abs().max() < 1e-4 * theirs.abs().max()


BLOCKS = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32


def write_mxfp4(path: Path) -> dict[str, Tensor]:
    """Random bytes for the experts' weights; returns what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = {**CONFIGS["gpt-oss"], **BLOCKS}
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
    want = write_mxfp4(source)
    out = check_export(source, want)
    assert logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)).isfinite().all()
    decoder = Decoder(read_spec(source), "lm", 0, 1, solo(), torch.bfloat16, "cpu")
    load_pretrained(decoder, source)
    gate = want["model.layers.1.mlp.experts.gate_up_proj"][2, :, 0::2].t()
    assert torch.equal(decoder.layers[1].gate_up.weight.view(6, 2, 96, 64)[2, 0], gate)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", {**CONFIGS["qwen3-tied"], "num_hidden_layers": 1}, torch.float32)
    write_mxfp4(tmp_path / "mxfp4")
    stored = {form: load_file(tmp_path / form / "model.safetensors") for form in ("fp8", "mxfp4")}
    name, scales = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.down_proj_scales"
    for form, changes, words in (
        ("fp8", {f"{name}_scale_inv": None}, f"'{name}_scale_inv' is missing"),
        ("fp8", {f"{name}_scale_inv": torch.ones(2, 1)}, r"has shape \[2, 1\], but blocks of 128 x 128 have \[1, 1\]"),
        ("fp8", {f"{name}_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}, "has dtype U8; allowed: F64, F32"),
        ("fp8", {name: stored["fp8"][name].float()}, "has dtype F32; allowed: F8_E4M3"),
        (
            "fp8",
            {f"{name}s_scale_inv": torch.ones(1, 1)},
            f"1 tensors that a qwen3 model does not have, such as '{name}s_scale_inv'",
        ),
        ("mxfp4", {scales: None}, f"'{scales}' is missing"),
        ("mxfp4", {scales: stored["mxfp4"][scales].float()}, "has dtype F32; allowed: U8"),
    ):
        changed = {key: value for key, value in {**stored[form], **changes}.items() if value is not None}
        save_file(changed, tmp_path / form / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            check_pretrained(read_spec(tmp_path / form), tmp_path / form, "lm")
