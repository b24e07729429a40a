"""Export: a directory that transformers loads with the same logits, whatever layout wrote the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sort_digits
from rlhf_spmd.checkpoint.export import copy_companions, export_config, export_hugging_face
from rlhf_spmd.checkpoint.files import Spec
from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.data.tokenizer import load_tokenizer
from saved_models import checkpoint_of, flip_bit, logits


def make_model(path: Path, family: str, tied: bool, value_head: bool = False) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    if value_head:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize(
    ("family", "tied", "shard_bytes", "head"),
    [
        ("llama", False, 4 << 30, "lm"),
        ("qwen2", True, 10_000, "lm"),
        ("qwen3", False, 10_000, "both"),  # a policy that is its own critic is exported as a language model
        ("llama", True, 4 << 30, "both"),
    ],
)
def test_transformers_loads_the_export(tmp_path: Path, family: str, tied: bool, shard_bytes: int, head: str) -> None:
    from transformers import AutoModelForCausalLM

    source, out = tmp_path / "source", tmp_path / "run" / "export"
    model = make_model(source, family, tied)
    tensors = model.state_dict() | ({"v_head.weight": torch.ones(1, 32)} if head == "both" else {})
    path = checkpoint_of(tensors, source, tmp_path / "run", head)
    for _ in range(2):  # the second replaces the first
        export_hugging_face(path, "actor", source, out, shard_bytes)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert (out / "model.safetensors").is_file() == (shard_bytes > 10_000)
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
    assert sorted(p.name for p in out.parent.iterdir()) == ["checkpoints", "export"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_head_that_differs_from_a_tied_embedding_is_kept(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    make_model(source, family, tied=False)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    if family == "gemma2":  # whose default that is
        del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    path = checkpoint_of(model.state_dict(), source, tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_value_head_and_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    critic = make_model(tmp_path / "critic", "llama", tied=False, value_head=True)
    make_model(tmp_path / "source", "llama", tied=True)  # the critic started from a language model
    path = checkpoint_of(critic.state_dict(), tmp_path / "source", tmp_path / "run", "value")
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(loaded).__name__ == "LlamaForSequenceClassification" and loaded.config.num_labels == 1
    assert torch.equal(logits(loaded.eval()), logits(critic))
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "half", dtype=torch.bfloat16)
    loaded = AutoModelForSequenceClassification.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(loaded.model.norm.weight, critic.model.norm.weight.bfloat16())


def write_tokenizer(source: Path, **names: str | None) -> Any:
    """One token per character, of which the first four are <pad>, <bos>, <eos>, <unk>; ``names`` change what it calls them."""
    sort_digits.write_tokenizer(source)
    change_json(source / "tokenizer_config.json", **names)
    return load_tokenizer(source)


def change_json(file: Path, **changes: Any) -> None:
    value = {**(json.loads(file.read_text()) if file.is_file() else {}), **changes}
    file.write_text(json.dumps({key: its for key, its in value.items() if its is not None}))


@pytest.mark.parametrize(
    ("pad", "names"),
    [(2, {"pad_token": "<eos>"}), (None, {"pad_token": None}), (2, {"pad_token": "<unk>"}), (None, {"pad_token": "<eos>"})],
)
def test_transformers_reads_a_score_at_the_end_of_a_row(tmp_path: Path, pad: int | None, names: dict[str, str]) -> None:
    """Where the configuration pads with the token that ends rows, or with none."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = tmp_path / "source"
    model = make_model(source, "llama", tied=False, value_head=True)
    change_json(source / "config.json", eos_token_id=2, bos_token_id=1, pad_token_id=pad)
    tokenizer = write_tokenizer(source, **names)
    change_json(source / "special_tokens_map.json", pad_token="<eos>")
    path = checkpoint_of(model.state_dict(), source, tmp_path / "run", "value")
    out = export_hugging_face(path, "actor", source, tmp_path / "out", tokenizer=tokenizer)
    loaded = AutoModelForSequenceClassification.from_pretrained(out).eval()
    rows = [[1, 4, 5, 6, 2], [1, 7, 2], [1, 8, 9, 10, 11, 12, 2]]
    with torch.no_grad():
        expected = torch.cat([model.score(model.model(torch.tensor([row])).last_hidden_state[:, -1]) for row in rows])
        assert torch.equal(torch.cat([loaded(torch.tensor([row])).logits for row in rows]), expected)
        for side in ("left", "right"):
            padded = AutoTokenizer.from_pretrained(out).pad({"input_ids": rows}, padding_side=side)
            together = loaded(**{name: torch.as_tensor(value) for name, value in padded.items()}).logits
            assert (together - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("ends", "pad"), [([1, 2], None), (2, 1)])
def test_rows_are_padded_with_a_special_token_that_does_not_end_them_or_not_at_all(
    tmp_path: Path, ends: Any, pad: int | None
) -> None:
    """Without a tokenizer."""
    source = tmp_path / "source"
    model = make_model(source, "llama", tied=False, value_head=True)
    change_json(source / "config.json", eos_token_id=ends, bos_token_id=1, pad_token_id=2)
    path = checkpoint_of(model.state_dict(), source, tmp_path / "run", "value")
    out = export_hugging_face(path, "actor", source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == pad


@pytest.mark.parametrize(
    ("named", "chat", "wanted"),
    [
        (2, None, 2),
        ([2], None, [2]),  # as it was
        (None, None, 2),
        (0, None, [0, 2]),
        (0, "{% for m in messages %}{{ m.content }}<unk>{% endfor %}", [0, 2, 3]),
    ],
)
def test_an_export_names_all_ends(tmp_path: Path, named: Any, chat: str | None, wanted: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    model = make_model(source, "llama", tied=False)
    for file in ("config.json", "generation_config.json"):
        change_json(source / file, eos_token_id=named)
    path = checkpoint_of(model.state_dict(), source, tmp_path / "run", "lm")
    tokenizer = write_tokenizer(source)
    out = export_hugging_face(path, "actor", source, tmp_path / "out", tokenizer=tokenizer, chat_template=chat)
    assert [json.loads((out / f"{file}config.json").read_text())["eos_token_id"] for file in ("", "generation_")] == [
        wanted
    ] * 2
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == wanted
    assert load_tokenizer(out).chat_template == chat


def test_what_export_refuses(tmp_path: Path) -> None:
    model = make_model(tmp_path / "source", "llama", tied=True)
    path = checkpoint_of(model.state_dict(), tmp_path / "source", tmp_path / "run", "lm")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not empty and not a model directory"):
        export_hugging_face(path, "actor", tmp_path / "source", precious)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        export_hugging_face(path, "actor", precious, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no role 'critic'"):
        export_hugging_face(path, "critic", tmp_path / "source", tmp_path / "out")
    flip_bit(next(path.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="is damaged"):
        export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("chat_template", [None, "{{ 'TRAINED' }}"])
def test_templates_are_the_source_s_or_the_one_of_training(tmp_path: Path, chat_template: str | None) -> None:
    """transformers prefers a template of the name tool_use where there are tools."""
    from transformers import AutoTokenizer

    source, out = tmp_path / "source", tmp_path / "out"
    for directory in (source, out):
        directory.mkdir()
    write_tokenizer(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ 'PLAIN' }}", "tool_use": "{{ 'TOOLS' }}"}
    tokenizer.save_pretrained(source)
    change_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    copy_companions(source, out, chat_template)
    exported = AutoTokenizer.from_pretrained(out)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    texts = [
        exported.apply_chat_template([{"role": "user", "content": "?"}], tools=some, tokenize=False) for some in (None, tools)
    ]
    assert texts == (["PLAIN", "TOOLS"] if chat_template is None else ["TRAINED", "TRAINED"])
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("source", "tensors", "absent", "changed"),
    [
        (
            {"auto_map": {"AutoConfig": "own.Own"}, "custom_pipelines": {}},
            ["lm_head.weight"],
            ["auto_map", "custom_pipelines"],
            {},
        ),
        ({"mtp_num_hidden_layers": 1}, ["lm_head.weight"], [], {"mtp_num_hidden_layers": 0}),
        (
            {"architectures": ["Gemma3TextForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"}},
            ["model.norm.weight"],
            ["num_labels", "id2label"],
            {"architectures": ["Gemma3ForCausalLM"]},
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
            ["score.weight"],
            [],
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "tie_word_embeddings": False},
        ),
    ],
)
def test_a_configuration_says_nothing_of_what_is_not_exported(
    source: dict[str, Any], tensors: list[str], absent: list[str], changed: dict[str, Any]
) -> None:
    config = export_config({"model_type": "llama", **source}, [Spec(name, torch.float32, (1,)) for name in tensors])
    assert config.items() >= changed.items() and not {*absent} & config.keys()
