"""Families against transformers: log-probs, entropies, gradients, values, exports; against themselves on stages and tensor-parallel
ranks; and what the planner counts of them."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from double_transformers import double_model, whole_gradients, wide
from generators import build_generator, num_unequal, ragged_requests, training_log_probs
from places import SHARED
from ranks import run_ranks
from rlhf_spmd.checkpoint.export import export_config, export_hugging_face
from rlhf_spmd.checkpoint.files import Spec
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.kernels import AttentionRule
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import local_logits, token_log_probs, values
from rlhf_spmd.models.layer_kinds import is_fixed
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.models.stored import read_json, read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.workers.flops import forward_flops
from saved_models import checkpoint_of, logits, model_tensors
from small_models import CONFIGS, LENGTHS, SHORT_FAMILIES, make_batch, make_model
from tiers import tiers

GREEDY = {"deepseek-v2-lite": {**CONFIGS["deepseek-v2"], "topk_method": "greedy"}}  # which does without its groups
ALL = {**CONFIGS, **GREEDY}
PRETRAINED = ("tinystories-656k", "stories260k")
LINEAR = ("qwen3-5", "qwen3-5-moe", "qwen3-next")
TEMPERATURE = 0.7
# dtype, largest difference of a log-prob, and of a gradient relative to the largest one: float32 shows what rounds, float64 the formula
PRECISIONS = ((torch.float64, 1e-9, 1e-9), (torch.float32, 1e-4, 2e-5))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_model(root / name, {**config, "vocab_size": 301}) for name, config in ALL.items()}


def make_ids(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Without the padding token, which transformers gives no gradient in the embedding."""
    ids, labels = make_batch(vocab_size)
    return ids.clamp(min=1), labels


def weighted(log_probs: Tensor, entropies: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)
    return (log_probs * weights).sum() + (entropies * weights.flip(0)).sum()


def by_transformers(path: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs and entropies in float64, and gradients of their weighted sum by the names on disk."""
    model = double_model(path)
    ids, labels = make_ids(model.config.vocab_size)
    rows, entropies = [], []
    with wide():
        for some, targets in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
            table = (model(some[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            rows.append(table.gather(1, targets[:, None])[:, 0])
            entropies.append(-(table.exp() * table).sum(-1))
        results = torch.cat(rows), torch.cat(entropies)
        weighted(*results).backward()
        return *(x.detach() for x in results), whole_gradients(model)


@pytest.mark.parametrize("name", [*ALL, *PRETRAINED])
def test_log_probs_and_gradients_equal_transformers(models: dict[str, Path], name: str) -> None:
    path = models.get(name) or SHARED / "models" / name
    if not path.is_dir():
        pytest.skip(f"{name} is not on this machine")
    *expected, gradients = by_transformers(path)
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    for dtype, most, most_of_gradients in PRECISIONS if name in SHORT_FAMILIES else PRECISIONS[:1]:
        decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), dtype, "cpu")
        load_pretrained(decoder, path)
        ids, labels = make_ids(decoder.spec.vocab_size)
        results = token_log_probs(decoder, decoder(ids, PackedAttention(LENGTHS)), labels, TEMPERATURE, True, chunk_rows=48)
        weighted(*results).backward()
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.dtype == dtype or dtype != torch.float64
            assert (ours - theirs).abs().max() < most
        without = set(gradients)
        for key, parameter in decoder.named_parameters():
            assert (parameter.grad is None) == is_fixed(key)
            for box in () if parameter.grad is None else decoder.shards[key].boxes:
                difference = parameter.grad[box.local_slices] - gradients[box.name][box.global_slices]
                assert difference.abs().max() < most_of_gradients * scale, f"{dtype}, {box.name}"
                without.discard(box.name)
        assert not any(gradients[key].any() for key in without), "a gradient that no parameter has"


def scores(path: Path, pp: int, tp: Group) -> list[Tensor]:
    """Log-probs and entropies of a forward pass in float64, whose stages run one after the other in this process, and the gradient of
    what the head gets."""
    spec = read_spec(path)
    x, labels = make_ids(spec.vocab_size)
    with torch.no_grad():
        for stage in range(pp):
            decoder = Decoder(spec, "lm", stage, pp, tp, torch.float64, "cpu")
            load_pretrained(decoder, path)
            x = decoder(x, PackedAttention(LENGTHS))
    results = token_log_probs(decoder, x.requires_grad_(), labels, TEMPERATURE, True, chunk_rows=48)
    weighted(*results).backward()
    return [*(result.detach() for result in results), x.grad]


def scores_on_rank(world: World, paths: list[Path]) -> list[list[Tensor]]:
    return [scores(path, 2, world.all) for path in paths]


def test_stages_and_tensor_parallelism_change_no_score(models: dict[str, Path]) -> None:
    paths = list(models.values())
    expected = [scores(path, 1, solo()) for path in paths]
    staged = [scores(path, 3, solo()) for path in paths]
    for results in (staged, *run_ranks(2, scores_on_rank, paths)):
        for path, ours, alone in zip(paths, results, expected, strict=True):
            for split, joined in zip(ours, alone, strict=True):
                assert (split - joined).abs().max() < 1e-11 * joined.abs().max().clamp(min=1), path.name


@pytest.mark.parametrize("name", ["llama", *tiers(["gemma3", "qwen3-moe", "glm4", "deepseek-v3", "qwen3-5"], SHORT_FAMILIES)])
def test_value_models_equal_transformers_classifiers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make_model(
        tmp_path, {**CONFIGS[name], "architectures": ["AForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    )
    decoder = Decoder(read_spec(path), "value", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    ids, _ = make_batch(decoder.spec.vocab_size)
    with torch.no_grad():
        got = decoder(ids, PackedAttention(LENGTHS), values)
        want = torch.cat([model.score(model.model(some[None])[0])[0, :, 0] for some in ids.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4
    head = [Spec("score.weight", torch.float32, (1, 32))]
    assert export_config(CONFIGS[name], head)["architectures"] == [type(model).__name__]


# with those that alone have what they have
SAMPLED = (*SHORT_FAMILIES, "olmo2", "smollm3", "granite", "ministral3", "qwen2-moe")


@pytest.mark.parametrize("name", tiers([name for name in CONFIGS if name not in LINEAR], SAMPLED))
def test_sampled_log_probs_are_those_of_a_training_forward(models: dict[str, Path], name: str) -> None:
    """To the bit, or nearly where generation has other products."""
    requests = ragged_requests(samples=1, max_new_tokens=30)
    generator = build_generator(str(models[name]))
    sampled = generator.generate(requests, SamplingConfig(temperature=TEMPERATURE), 3, 5)
    if not name.startswith("deepseek"):
        assert num_unequal(generator.decoder, requests, sampled, TEMPERATURE) == 0
    expected = training_log_probs(generator.decoder, requests, sampled, TEMPERATURE)
    for log_probs, completion in zip(expected, sampled, strict=True):
        assert (log_probs - completion.log_probs).abs().max() < 2e-5


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith(("llama", "qwen3-tied"))])
def test_export_is_what_transformers_writes(tmp_path: Path, name: str) -> None:
    """transformers writes a directory, four ranks read it and write a checkpoint, and its export is the same model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    copied = deepcopy(CONFIGS[name])  # transformers writes into it
    config = {key: value for key, value in copied.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(CONFIGS[name]["model_type"], **config)).eval()
    model.save_pretrained(tmp_path / "source")
    path = checkpoint_of(model_tensors(tmp_path / "source"), tmp_path / "source", tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    written, exported = (load_file(tmp_path / part / "model.safetensors") for part in ("source", "out"))
    assert written.keys() == exported.keys() and all(torch.equal(written[key], exported[key]) for key in written)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))


GEMMA_EYES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}


SEEING = ["gemma4", "mistral", "qwen3-5-moe stacked", "gemma3", "ministral3", "qwen3-5", "qwen3-5-moe"]


@pytest.mark.parametrize("case", tiers(SEEING, SEEING[:3]))
def test_the_language_model_of_one_that_sees(tmp_path: Path, case: str) -> None:
    """transformers writes a model with a vision tower. Its language model is read, and the export is one for text. Files that are
    stacked have all experts in one tensor, as on the hub."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    name, stacked = case.removesuffix(" stacked"), case.endswith(" stacked")
    kind = "mistral3" if "istral" in name else name.replace("-", "_")
    torch.manual_seed(0)
    text = {key: value for key, value in deepcopy(CONFIGS[name]).items() if key != "architectures"}
    if kind.startswith("qwen"):
        seeing: dict[str, Any] = {"vision_config": {**QWEN_EYES, "num_position_embeddings": 16}}
    else:
        ids = dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), text["vocab_size"] - 1)
        seeing = {"vision_config": {**GEMMA_EYES, "patch_size": 14}, "mm_tokens_per_image": 4, **ids}
        seeing["tie_word_embeddings"] = kind.startswith("gemma")
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, text_config=text, **seeing)).eval()
    source = tmp_path / "source"
    model.save_pretrained(source)
    stored = load_file(source / "model.safetensors")
    assert any("vision_tower." in key or ".visual." in key for key in stored)
    if stacked:
        stored = {key: tensor for key, tensor in stored.items() if ".experts." not in key}
        stored |= {key: tensor.contiguous() for key, tensor in model.state_dict().items() if ".experts." in key}
        assert stored["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 48, 32)
    if kind.startswith("qwen"):
        save_file({**stored, "mtp.fc.weight": torch.zeros(2)}, source / "model.safetensors", metadata={"format": "pt"})
    decoder = Decoder(read_spec(source), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, source)
    tokens, _ = make_batch(decoder.spec.vocab_size)
    with torch.no_grad():
        got = local_logits(decoder, decoder(tokens, PackedAttention(LENGTHS)))
        want = torch.cat([model(some[None]).logits[0] for some in tokens.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4
    out = export_hugging_face(
        checkpoint_of(model_tensors(source), source, tmp_path / "run", "lm"), "actor", source, tmp_path / "out"
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded).__name__ == CONFIGS[name]["architectures"][0]
    assert read_json(out / "config.json")["architectures"] == CONFIGS[name]["architectures"]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (logits(loaded.eval()) - logits(model)).abs().max() < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_the_planner_counts_what_files_hold(models: dict[str, Path], name: str) -> None:
    """Parameters, multiplications of a token's matrices, those of a layer that a token takes, and elements of each layer's cache."""
    spec, tensors = read_spec(models[name]), load_file(models[name] / "model.safetensors")
    shape = shape_of(spec, "lm")
    parts = {key: 3 if "correction_bias" in key else 1 for key in tensors}  # a correction is held in three parts
    assert shape.params == pytest.approx(sum(parts[key] * tensor.numel() for key, tensor in tensors.items()))
    matrices = 0.0 if spec.tie_word_embeddings else -spec.vocab_size * spec.hidden_size  # the embedding is looked up
    for key, tensor in tensors.items():
        if tensor.ndim > 1 and "conv1d" not in key and not key.endswith("proj_bias"):
            share = spec.experts.experts_per_token / spec.experts.num_experts if spec.experts and ".experts." in key else 1
            matrices += share * tensor.numel()
    linear = len(spec.delta_rule.layers) if spec.delta_rule else 0
    assert forward_flops(spec, 10, 0) == pytest.approx(10 * 2 * (matrices + 3 * linear * 8 * 24 * 16))
    assert shape.matmul_weights == pytest.approx((matrices - spec.vocab_size * spec.hidden_size) / spec.num_hidden_layers)
    if spec.delta_rule:
        state = 8 * 24 * 16 + 3 * (2 * 4 * 24 + 8 * 16)
        assert (shape.query_dims, shape.key_dims, shape.row_state) == (4 * 16 / 2, 2 * 16 / 2, state / 2)
    elif spec.latent is None:
        for tp in (1, 2, 4):
            elements = [
                2 * math.prod(cache_shape(spec.spec_for_layer(layer), 0, tp)) for layer in range(spec.num_hidden_layers)
            ]
            assert shape.cached_numbers(tp) * spec.num_hidden_layers == pytest.approx(sum(elements), rel=0.01)


def test_flops_count_tokens_before_a_query_and_windows() -> None:
    spec = spec_from_config(CONFIGS["qwen3-moe"], "test")
    assert forward_flops(spec, 10, 8) - forward_flops(spec, 10, 0) == 10 * 4 * 4 * 48 * 4  # a query sees half of its sequence
    short, plain = (spec_from_config({**CONFIGS["mistral"], "sliding_window": window}, "test") for window in (9, None))
    assert forward_flops(short, 10, 9) == forward_flops(plain, 10, 9)
    longer = forward_flops(short, 10, 1e9) - forward_flops(short, 10, 0)
    assert longer == pytest.approx(10 * 4 * 4 * 32 * 9)  # never more than the window


def test_rules_of_layers() -> None:
    scaled = {**CONFIGS["llama3"]["rope_scaling"], "rope_theta": 10000.0}
    with_parameters = {key: value for key, value in CONFIGS["llama3"].items() if not key.startswith("rope_")}
    assert spec_from_config({**with_parameters, "rope_parameters": scaled}, "new") == spec_from_config(CONFIGS["llama3"], "old")
    gemma2, gemma3 = (spec_from_config(CONFIGS[name], "test") for name in ("gemma2", "gemma3"))
    assert gemma2.attention_rule(0) == AttentionRule(12**-0.5, 2.0, 5) and gemma2.attention_rule(1).window is None
    assert [gemma3.rope_kind(layer) for layer in range(4)] == ["local", "local", "global", "local"]
    both = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": 500.0}
    old = {key: value for key, value in CONFIGS["gemma3"].items() if not key.startswith("rope_")}
    new = spec_from_config({**old, "rope_parameters": both}, "test")
    assert new == gemma3 and (new.rope_theta, new.local_rope_theta) == (50000.0, 500.0)
    named = {**CONFIGS["gemma2"], "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}
    assert spec_from_config(named, "test").windows == (None, None, None, 5)
    no_window = {key: value for key, value in CONFIGS["mistral"].items() if key != "sliding_window"}
    assert spec_from_config(no_window, "test").windows == (4096,) * 4
    assert spec_from_config({**no_window, "sliding_window": None}, "test").windows == ()
    assert spec_from_config({**CONFIGS["phi3"], "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}, "test")
    exaone = {key: value for key, value in CONFIGS["exaone4"].items() if not key.startswith("sliding_")}
    hybrid, plain = (spec_from_config({**exaone, **more}, "test") for more in ({}, {"sliding_window": None}))
    assert (hybrid.windows, hybrid.unrotated) == ((4096, 4096, 4096, None), (3,))
    assert (plain.windows, plain.unrotated) == ((None,) * 4, ())
    named = {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention", *["sliding_attention"] * 3]}  # as published
    assert spec_from_config({**exaone, **named}, "test").unrotated == (0,)
    moe = {**CONFIGS["qwen3-moe"], "decoder_sparse_step": 2}
    assert [bool(spec_from_config(moe, "test").experts_at(layer)) for layer in range(4)] == [False, False, False, True]


def test_layers_behind_the_last_one_are_not_read(tmp_path: Path) -> None:
    path = make_model(tmp_path, {**CONFIGS["glm4-moe"], "num_nextn_predict_layers": 1})
    tensors = load_file(path / "model.safetensors")
    last = {name: tensor.clone() for name, tensor in tensors.items() if "layers.3." in name}
    further = {name.replace("layers.3.", "layers.4."): tensor for name, tensor in last.items()}
    save_file({**tensors, **further, "model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    assert torch.equal(decoder.layers[3].router.weight, tensors["model.layers.3.mlp.gate.weight"])
    assert export_config(read_json(path / "config.json"), [Spec("a", torch.float32, (1,))])["num_nextn_predict_layers"] == 0
    beyond = {name.replace("layers.3.", "layers.5."): tensor for name, tensor in last.items()}
    save_file({**tensors, **beyond}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors that a glm4_moe model does not have, such as 'model\.layers\.5"):
        load_pretrained(decoder, path)
