"""The families that differ from Llama in more than names: gradients, generation, training and export."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tasks
from double_transformers import whole_gradients
from engine_runs import assert_same, together, train
from generators import (
    SMALL,
    build_generator,
    generate_on_rank,
    num_unequal,
    ragged_requests,
    tokens_of,
    training_log_probs,
    transformers_greedy,
)
from ranks import run_ranks
from reshard_cases import Simulated, layout_of
from reshard_generation import generate_in_layout
from reshard_plans import check_plans
from rlhf_spmd.checkpoint.export import export_config, export_hugging_face
from rlhf_spmd.checkpoint.files import Spec
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.kernels import AttentionRule, Ops
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.expert_config import Experts, is_fixed
from rlhf_spmd.models.experts import MixtureWeights, mix_experts, route
from rlhf_spmd.models.heads import local_logits, token_log_probs, values
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import read_spec, spec_from_config
from rlhf_spmd.models.stored import read_json
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.workers.flops import forward_flops
from saved_models import checkpoint_of, logits, model_tensors
from small_models import CONFIGS, LENGTHS, make_batch, make_model

LINEAR = ("qwen3-5", "qwen3-5-moe", "qwen3-next")
DENSE = ("gemma4", "phi4-mini", "seed-oss", "olmo2", "olmo3", "exaone4", "smollm3", "granite", "glm4", "ministral3")
LATENT = ("deepseek-v3", "deepseek-v2")
EXPERTS = ("qwen3-moe", "mixtral", "qwen2-moe", "olmoe", "glm4-moe", "gpt-oss", *LATENT)
FAMILIES = ("mistral", "phi3", "gemma2", "gemma3", *EXPERTS, *DENSE)
ROLES = ("actor", "critic", "reference")
WEIGHTS = torch.linspace(-1, 1, sum(LENGTHS))


def make_ids(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Without the padding token, which transformers gives no gradient in the embedding."""
    ids, labels = make_batch(vocab_size)
    return ids.clamp(min=1), labels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_model(root / name, {**CONFIGS[name], "vocab_size": 301}) for name in FAMILIES}


def their_gradients(path: Path) -> dict[str, Tensor]:
    """By the names on disk."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids, labels = make_ids(read_spec(path).vocab_size)
    for some, targets, weights in zip(ids.split(LENGTHS), labels.split(LENGTHS), WEIGHTS.split(LENGTHS), strict=True):
        log_probs = model(some[None]).logits[0].log_softmax(-1)
        (log_probs.gather(1, targets[:, None])[:, 0] * weights).sum().backward()
    return whole_gradients(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_transformers(models: dict[str, Path], name: str) -> None:
    path = models[name]
    decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    ids, labels = make_ids(decoder.spec.vocab_size)
    log_probs, _ = decoder(ids, PackedAttention(LENGTHS), lambda d, hidden: token_log_probs(d, hidden, labels))
    (log_probs * WEIGHTS).sum().backward()
    theirs = their_gradients(path)
    scale = max(float(g.abs().max()) for g in theirs.values())
    for key, parameter in decoder.named_parameters():
        assert (parameter.grad is None) == is_fixed(key)
        for box in () if parameter.grad is None else decoder.shards[key].boxes:
            assert parameter.grad is not None
            expected = theirs[box.name][box.global_slices]
            assert (parameter.grad[box.local_slices] - expected).abs().max() < 2e-5 * scale, box.name
            theirs[box.name][box.global_slices] = 0
    assert not any(g.any() for g in theirs.values()), "a gradient that no parameter has"


@pytest.mark.parametrize("name", FAMILIES)
def test_generation(models: dict[str, Path], name: str) -> None:
    """transformers' greedy tokens, with windows shorter than the texts; sampled log-probs are a training forward's, to the bit, or
    nearly where generation has other products."""
    requests = ragged_requests(samples=1, max_new_tokens=30)
    generator = build_generator(str(models[name]))
    greedy = generator.generate(requests, SamplingConfig(temperature=0.0), 0, 0)
    assert tokens_of(greedy) == transformers_greedy(str(models[name]), [list(r.prompt_ids) for r in requests], 30)
    sampled = generator.generate(requests, SamplingConfig(temperature=0.7), 3, 5)
    if name not in LATENT:
        assert num_unequal(generator.decoder, requests, sampled, 0.7) == 0
    for wanted, found in zip(training_log_probs(generator.decoder, requests, sampled, 0.7), sampled, strict=True):
        assert (wanted - found.log_probs).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gemma2", Layout(pp=2)),
        ("gemma4", Layout(pp=2)),
        ("gemma4", Layout(tp=2)),
        ("qwen3-moe", Layout(tp=2)),
        ("phi3", Layout(tp=2)),
        ("olmo2", Layout(tp=2)),
        ("exaone4", Layout(pp=2)),
        ("olmoe", Layout(tp=2)),
        ("smollm3", Layout(pp=2)),
        ("glm4", Layout(tp=2)),
    ],
)
def test_generation_in_layouts(models: dict[str, Path], name: str, layout: Layout) -> None:
    results = run_ranks(layout.size, generate_on_rank, str(models[name]), layout, SMALL, 0.8)
    reference = build_generator(str(models[name])).generate(ragged_requests(), SamplingConfig(temperature=0.8), 3, 5)
    for found, unequal, _ in results:
        assert unequal == 0
        for completion in reference:
            tokens, log_probs = found[completion.row_id]
            assert tokens == completion.token_ids
            torch.testing.assert_close(torch.tensor(log_probs), completion.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "head", "layout", "checkpointing"),
    [
        ("qwen3-moe", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("qwen3-moe", "value", Layout(tp=2, sequence_parallel=True), "none"),
        ("qwen2-moe", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("qwen2-moe", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("olmoe", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("glm4-moe", "lm", Layout(pp=2, tp=2, dp=1), "none"),
        ("gpt-oss", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("gpt-oss", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("glm4-moe", "lm", Layout(tp=2, dp=2, zero=3), "full"),
        ("deepseek-v3", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("deepseek-v3", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("deepseek-v3", "value", Layout(tp=4, sequence_parallel=True), "selective"),
        ("deepseek-v2", "lm", Layout(tp=2, dp=2, zero=2), "full"),
        ("deepseek-v2", "lm", Layout(pp=2, dp=2, zero=1), "none"),
        ("gemma2", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("gemma3", "lm", Layout(dp=2, zero=3), "full"),
        ("gemma4", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "selective"),
        ("gemma4", "lm", Layout(tp=2, dp=2, zero=3), "none"),
        ("gemma4", "value", Layout(tp=2, dp=2, cp=2), "none"),
        ("phi3", "lm", Layout(tp=4), "none"),
        ("phi4-mini", "lm", Layout(pp=2, tp=2), "none"),
        ("seed-oss", "lm", Layout(dp=2, zero=2), "none"),
        ("olmo2", "lm", Layout(tp=4), "selective"),
        ("olmo3", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("exaone4", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("smollm3", "value", Layout(pp=2, dp=2, zero=1), "none"),
        ("granite", "lm", Layout(dp=2, zero=3), "full"),
        ("glm4", "lm", Layout(tp=2, dp=2, zero=3), "none"),
        ("ministral3", "lm", Layout(tp=2, sequence_parallel=True), "selective"),
    ],
    ids=str,
)
def test_training_is_the_same_in_layouts(
    models: dict[str, Path], name: str, head: str, layout: Layout, checkpointing: str
) -> None:
    path, options = str(models[name]), {"activation_checkpointing": checkpointing}
    got = together(run_ranks(layout.size, train, path, layout, [2, 3], head, options))
    assert_same(got, together(run_ranks(1, train, path, Layout(), [1], head, {})), 1e-9)


@pytest.mark.parametrize(("axis", "layers"), [("tp", 4), ("pp", 3)])
def test_ppo_with_two_families(tmp_path: Path, axis: str, layers: int) -> None:
    """A Gemma 2 learns with a critic that is a mixture of experts: the same run on one rank and, split, on two, where each generates
    with the whole actor. Its stages may have two layers and one."""
    task = tasks.task()
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12}
    for role, name, kind in (("actor", "gemma2", "CausalLM"), ("critic", "qwen3-moe", "SequenceClassification")):
        config = {**CONFIGS[name], **sizes, "architectures": [f"AFor{kind}"], "num_hidden_layers": layers}
        write_random_model(tmp_path / role, config, 3)
        shutil.copytree(task / "tokenizer", tmp_path / role, dirs_exist_ok=True)
    common = [f"models.{role}.path={tmp_path / model}" for role, model in zip(ROLES, ("actor", "critic", "actor"), strict=True)]
    common += [f"models.{role}.dtype=float64" for role in ROLES]
    split = [f"models.actor.layout.{axis}=2", f"models.actor.generation.{axis}=1", "models.critic.layout.dp=2"]
    split += ["models.critic.layout.zero=3", "models.reference.layout.pp=2"]
    for ranks, overrides in ((1, []), (2, split)):
        run_ranks(
            ranks, tasks.train_here, str(task / "ppo.json"), tasks.settings(tmp_path / str(ranks), 2, *common, *overrides)
        )
    alone, both = (tasks.read_run(tmp_path / str(ranks)) for ranks in (1, 2))
    assert alone.log_prob_difference() < 1e-12 and alone.responses == both.responses
    for difference, where in (tasks.worst_metric(alone, both, 1e-3), tasks.worst_tensor(alone, both)):
        assert difference < 1e-8, where


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen3-moe", "qwen2-moe", "olmo3", "glm4-moe", "gpt-oss", *LATENT])
def test_transitions_of_the_hybrid_engine(name: str) -> None:
    """Exact to the element, and computed in the generation layout, where fused rows of two training slices lie together."""
    kv = 8 if name in LATENT else 4
    spec = spec_from_config({**CONFIGS[name], "num_attention_heads": 8, "num_key_value_heads": kv, "head_dim": 8}, "test")
    for train_layout, pp, tp in ((Layout(2, 4, 1), 1, 2), (Layout(1, 2, 4, 3), 2, 4)):
        check_plans(Simulated("zero_redundancy", layout_of("zero_redundancy", train_layout, pp, tp), spec))
    layout = layout_of("zero_redundancy", Layout(tp=4), 1, 2)
    assert max(run_ranks(4, generate_in_layout, spec, "zero_redundancy", layout, True)) < 1e-12


@pytest.mark.parametrize("name", FAMILIES + LINEAR)
def test_export_is_what_transformers_writes(tmp_path: Path, name: str) -> None:
    """transformers writes a directory, four ranks read it and write a checkpoint, and its export is the same model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = deepcopy(CONFIGS[name])  # transformers writes into it
    config = {key: value for key, value in own.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(CONFIGS[name]["model_type"], **config)).eval()
    model.save_pretrained(tmp_path / "source")
    path = checkpoint_of(model_tensors(tmp_path / "source"), tmp_path / "source", tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    written, exported = (load_file(tmp_path / part / "model.safetensors") for part in ("source", "out"))
    assert written.keys() == exported.keys() and all(torch.equal(written[key], exported[key]) for key in written)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize(
    ("kind", "name"), [("gemma3", "gemma3"), ("gemma4", "gemma4"), ("mistral3", "mistral"), ("mistral3", "ministral3")]
)
def test_the_language_model_of_one_that_sees(tmp_path: Path, kind: str, name: str) -> None:
    """transformers writes a model with a vision tower; two ranks read its language model, and the export is one for text."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    text = {key: value for key, value in deepcopy(CONFIGS[name]).items() if key != "architectures"}
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    ids = dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), text["vocab_size"] - 1)
    seeing = {"vision_config": {**eyes, "patch_size": 14}, "mm_tokens_per_image": 4, **ids}
    config = AutoConfig.for_model(kind, text_config=text, tie_word_embeddings=kind.startswith("gemma"), **seeing)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert any("vision_tower." in name for name in stored)
    named = {name.replace("language_model.", ""): x for name, x in stored.items() if "language_model." in name}
    path = checkpoint_of(named, tmp_path / "source", tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded).__name__ == CONFIGS[name]["architectures"][0]
    assert read_json(out / "config.json")["architectures"] == CONFIGS[name]["architectures"]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))
    spec = read_spec(tmp_path / "source")
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, tmp_path / "source")
    tokens, _ = make_batch(spec.vocab_size)
    with torch.no_grad():
        got = local_logits(decoder, decoder(tokens, PackedAttention(LENGTHS)))
        want = torch.cat([model(some[None]).logits[0] for some in tokens.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "glm4", "deepseek-v3"])
def test_value_models_equal_transformers_classifiers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make_model(tmp_path, {**CONFIGS[name], "architectures": ["AForSequenceClassification"], "num_labels": 1})
    spec = read_spec(path)
    decoder = Decoder(spec, "value", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    ids, _ = make_batch(spec.vocab_size)
    with torch.no_grad():
        got = decoder(ids, PackedAttention(LENGTHS), values)
        want = torch.cat([model.score(model.model(some[None])[0])[0, :, 0] for some in ids.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4
    head = [Spec("score.weight", torch.float32, (1, 32))]
    assert export_config(CONFIGS[name], head)["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_experts_against_a_loop_over_tokens(normalise: bool, blocks: int) -> None:
    experts, hidden, width = Experts(5, 2, 6, normalise), 4, 6
    torch.manual_seed(0)
    x, router, gate, up, down = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((9, hidden), (5, hidden), (5, width, hidden), (5, width, hidden), (5, hidden, width))
    )
    with torch.no_grad():
        x[2:] = x[2]  # several tokens to the same experts, and one expert without any
    expected = []
    for row in x:
        probabilities = (router @ row).softmax(0)
        best = probabilities.argsort(descending=True)[:2].tolist()
        total = probabilities[best].sum() if normalise else 1
        parts = [down[e] @ (torch.nn.functional.silu(gate[e] @ row) * (up[e] @ row)) for e in best]
        expected.append(sum(probabilities[e] / total * part for e, part in zip(best, parts, strict=True)))
    halves = [part.chunk(blocks, 1) for part in (gate, up)]
    entry = torch.cat([torch.cat([half[b] for half in halves], 1).reshape(-1, hidden) for b in range(blocks)])
    weights = MixtureWeights(router, entry, down.reshape(-1, width))
    got = mix_experts(Ops(), x, weights, experts, False, blocks)
    assert len(set(route(Ops(), x, weights, experts, Ops().route)[1].flatten().tolist())) < 5
    weight = torch.randn_like(got)
    inputs = [x, router, gate, up, down]
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((torch.stack(expected) * weight).sum(), inputs),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-12
    assert (got - torch.stack(expected)).abs().max() < 1e-12


def test_rules_of_layers() -> None:
    gemma2, gemma3 = (spec_from_config(CONFIGS[name], "test") for name in ("gemma2", "gemma3"))
    assert gemma2.attention_rule(0) == AttentionRule(12**-0.5, 2.0, 5) and gemma2.attention_rule(1).window is None
    assert [gemma3.local_rope(layer) for layer in range(4)] == [True, True, False, True]
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
    assert [bool(spec_from_config(moe, "test").experts_of(layer)) for layer in range(4)] == [False, False, False, True]


def test_flops_count_active_experts_and_windows(models: dict[str, Path]) -> None:
    spec = spec_from_config(CONFIGS["qwen3-moe"], "test")
    attention, head = 32 * 12 * (2 * 4 + 2 * 2), 101 * 32
    weights = 4 * attention + 3 * 32 * (6 + 3 * 3 * 24) + 32 * 3 * 48 + head
    assert forward_flops(spec, 10, 0) == 10 * 2 * weights
    assert forward_flops(spec, 10, 8) == 10 * (2 * weights + 4 * 4 * 48 * 4)  # a query sees half of its sequence
    shared = spec_from_config(CONFIGS["qwen2-moe"], "test")
    attention = 32 * 8 * (2 * 4 + 2 * 2)
    sparse, dense = 32 * (6 + 1 + 3 * (3 * 24 + 40)), 32 * 3 * 48
    assert forward_flops(shared, 10, 0) == 10 * 2 * (4 * attention + 2 * sparse + 2 * dense + head)
    shape = shape_of(shared, "lm")
    assert shape.active == attention + (sparse + dense) / 2
    every = sum(tensor.numel() for tensor in load_file(models["qwen2-moe"] / "model.safetensors").values())
    assert shape.params == every - 2 * (301 - 101) * 32
    short = spec_from_config({**CONFIGS["mistral"], "sliding_window": 9}, "test")
    plain = spec_from_config({**CONFIGS["mistral"], "sliding_window": None}, "test")
    assert forward_flops(short, 10, 9) == forward_flops(plain, 10, 9)
    longer = forward_flops(short, 10, 1e9) - forward_flops(short, 10, 0)
    assert longer == pytest.approx(10 * 4 * 4 * 32 * 9)  # never more than the window


def test_experts_that_tp_does_not_divide() -> None:
    spec = spec_from_config({**CONFIGS["qwen3-moe"], "moe_intermediate_size": 22}, "test")
    with pytest.raises(ValueError, match=r"layout: tp=4 does not divide moe_intermediate_size=22"):
        check_layout(spec, 1, 4, "layout")


def test_layers_behind_the_last_one_are_not_read(tmp_path: Path) -> None:
    path = make_model(tmp_path, {**CONFIGS["glm4-moe"], "num_nextn_predict_layers": 1})
    tensors = load_file(path / "model.safetensors")
    further = {
        name.replace("layers.3.", "layers.4."): tensor.clone() for name, tensor in tensors.items() if "layers.3." in name
    }
    save_file({**tensors, **further, "model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    assert torch.equal(decoder.layers[3].router.weight, tensors["model.layers.3.mlp.gate.weight"])
    assert export_config(read_json(path / "config.json"), [Spec("a", torch.float32, (1,))])["num_nextn_predict_layers"] == 0
    beyond = {name.replace("layers.3.", "layers.5."): tensor.clone() for name, tensor in tensors.items() if "layers.3." in name}
    save_file({**tensors, **beyond}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors that a glm4_moe model does not have, such as 'model\.layers\.5"):
        load_pretrained(decoder, path)


def test_norms_of_random_weights_multiply_by_one(tmp_path: Path) -> None:
    write_random_model(tmp_path, CONFIGS["gemma2"], 0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not tensors["model.norm.weight"].any() and tensors["model.embed_tokens.weight"].any()
