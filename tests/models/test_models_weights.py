"""Hugging Face directories in: every layout reads the same weights, and damaged or foreign directories say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import check_pretrained, init_random, load_pretrained, read_eos_ids, write_random_model
from rlhf_spmd.parallel.collectives import Group, solo
from small_models import CONFIGS

CONFIG = CONFIGS["qwen2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", CONFIG, 11)
    return tmp_path / "model"


def build(path: Path, head: str = "lm", dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(read_spec(path), head, 0, 1, solo(), dtype, "cpu")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def write_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (3, 4)])
def test_random_weights_are_the_same_in_every_layout_and_on_disk(model: Path, pp: int, tp: int) -> None:
    tensors = load_file(model / "model.safetensors")
    spec = read_spec(model)
    for stage in range(pp):
        for rank in range(tp):
            group = Group("tp", tuple(range(tp)), rank)
            drawn, read = (Decoder(spec, "lm", stage, pp, group, torch.float32, "cpu") for _ in range(2))
            init_random(drawn, 11)
            load_pretrained(read, model)
            for (name, a), b in zip(drawn.named_parameters(), read.parameters(), strict=True):
                assert torch.equal(a, b), name
                for box in drawn.shards[name].boxes:
                    assert torch.equal(a[box.local_slices], tensors[box.name][box.global_slices])


def test_any_float_dtype_is_converted(model: Path) -> None:
    for stored in (torch.float64, torch.float16, torch.bfloat16):
        rewrite(model, lambda tensors, dtype=stored: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
        decoder = build(model, dtype=torch.float32)
        load_pretrained(decoder, model)
        assert torch.equal(decoder.embed.weight, load_file(model / "model.safetensors")["model.embed_tokens.weight"].float())


def test_a_stored_head_is_tied_only_where_it_is_the_embedding(tmp_path: Path) -> None:
    write_random_model(tmp_path, CONFIGS["qwen3-tied"], 11)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embed.clone()}))
    assert read_spec(tmp_path).tie_word_embeddings
    head = embed.clone()
    head[-1, -1] += 1  # the last number
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    spec = read_spec(tmp_path)
    assert not spec.tie_word_embeddings
    for rank in range(2):
        decoder = Decoder(spec, "lm", 1, 2, Group("tp", (0, 1), rank), torch.float32, "cpu")
        load_pretrained(decoder, tmp_path)
        (box,) = decoder.shards["head.weight"].boxes
        assert torch.equal(decoder.head_weight, head[box.global_slices])
    # a model whose weights are not there is as its configuration says
    (tmp_path / "model.safetensors").unlink()
    files = {"model.embed_tokens.weight": "1.safetensors", "lm_head.weight": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_spec(tmp_path).tie_word_embeddings


def test_sharded_directory(model: Path) -> None:
    whole = build(model)
    load_pretrained(whole, model)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({n: tensors[n] for n in names}, model / f"model-{i}.safetensors")
        weight_map.update(dict.fromkeys(names, f"model-{i}.safetensors"))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    split = build(model)
    load_pretrained(split, model)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), split.parameters(), strict=True))

    for bad in ("../model-0.safetensors", "/etc/passwd", "sub/model-0.safetensors", "model-0.bin", 3):
        changed = {**weight_map, "model.norm.weight": bad}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=r"index\.json: tensor 'model\.norm\.weight'"):
            load_pretrained(split, model)
    (model / "model-1.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model-1\.safetensors"):
        load_pretrained(split, model)


def test_value_head(model: Path) -> None:
    decoder = build(model, "value")
    with pytest.raises(ValueError, match=r"score\.weight' is missing; a reward model needs a value head of one label"):
        load_pretrained(decoder, model)
    load_pretrained(decoder, model, missing_head_ok=True)
    assert decoder.head_weight.abs().sum().item() == 0
    rewrite(model, lambda tensors: tensors.update({"score.weight": torch.full((1, 32), 2.0)}))
    load_pretrained(decoder, model)
    assert decoder.head_weight.sum().item() == 64
    rewrite(model, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 32)}))
    with pytest.raises(ValueError, match=r"'score\.weight' has shape \[2, 32\], but a reward model .* one label, \[1, 32\]"):
        load_pretrained(decoder, model)


def test_tied_matrix_under_either_name(tmp_path: Path) -> None:
    spec = write_random_model(tmp_path, CONFIGS["qwen3-tied"], 1)
    first, second = (Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu") for _ in range(2))
    load_pretrained(first, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    load_pretrained(second, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "'model.layers.2.mlp.up_proj.weight' is missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(1)}), "1 tensors that a qwen2 .* 'model.layers.0.extra'"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"'model.norm.weight' has shape \[3\].*\[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32).int()}), "'model.norm.weight' has dtype I32"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(3, 32)}),
            r"'lm_head\.weight' has shape \[3, 32\], but config\.json implies",
        ),
    ],
)
def test_tensors_that_do_not_fit(model: Path, change: Callable[[dict[str, Tensor]], None], words: str) -> None:
    rewrite(model, change)
    with pytest.raises(ValueError, match=r"model\.safetensors.*" + words):
        load_pretrained(build(model), model)


def test_old_rotary_buffers_are_ignored(model: Path) -> None:
    rewrite(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_pretrained(build(model), model)


def test_unreadable_files(model: Path) -> None:
    decoder = build(model)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read as safetensors"):
        load_pretrained(decoder, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickles are never read"):
        load_pretrained(decoder, model)


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_spec(tmp_path)
    for text, why in (("{", "Expecting"), ('{"a": ' * 500 + "1" + "}" * 500, "nested more than 100 levels deep")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: not readable as JSON: {why}"):
            read_spec(tmp_path)


def test_fewer_tensors_than_a_model_has_are_refused_without_a_list_of_their_names(model: Path) -> None:
    write_config(model, model_type="qwen3_moe", num_experts=10_000, num_experts_per_tok=1, num_hidden_layers=1000)
    spec = read_spec(model)
    with pytest.raises(
        ValueError, match=r"too few for the model of config\.json, num_hidden_layers=1000 with 10000000 experts"
    ):
        check_pretrained(spec, model, "lm")


def test_end_of_sequence_ids(model: Path) -> None:
    assert read_eos_ids(model) == read_spec(model).eos_token_ids == (2,)
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert read_eos_ids(model) == read_spec(model).eos_token_ids == (5, 9)
    (model / "generation_config.json").write_text('{"temperature": 1.0}')
    assert read_eos_ids(model) == (2,)
    write_config(model, eos_token_id="end")
    with pytest.raises(ValueError, match=r"config\.json.*'eos_token_id' is 'end'"):
        read_spec(model)


@pytest.mark.parametrize("named", ["outside_family", "outside_package.toy", "{0}/outside_family.py", "hub", "..models.llama"])
def test_a_model_cannot_name_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    (tmp_path / "outside_package").mkdir()
    for file in ("outside_family.py", "outside_package/__init__.py", "outside_package/toy.py"):
        (tmp_path / file).write_text("raise SystemExit('this ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"^test: model_type: unknown model family '[^\n]*; available: deepseek_v2, [^\n]*$"):
        spec_from_config({**CONFIG, "model_type": named.format(tmp_path)}, "test")


def test_norms_of_random_weights_multiply_by_one(tmp_path: Path) -> None:
    write_random_model(tmp_path, CONFIGS["gemma2"], 0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not tensors["model.norm.weight"].any() and tensors["model.embed_tokens.weight"].any()
