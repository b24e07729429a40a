"""Linear attention (gated delta rule): the arithmetic, models against transformers, training and generation in layouts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tasks
from engine_runs import OPTIM, assert_same, together, train
from generators import (
    SMALL,
    build_generator,
    generate_on_rank,
    load,
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
from rlhf_spmd.generation import GenerationConfig, GenerationLimits, Generator, SamplingConfig
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.prompt_states import SPARE_SLOTS
from rlhf_spmd.generation.recurrent_states import slot_bytes
from rlhf_spmd.kernels import DeltaShape, DeltaStates, mix_tokens
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import local_logits, token_log_probs, values
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.sharding import tensor_shapes
from rlhf_spmd.models.spec import read_eos_ids, read_spec, spec_from_config
from rlhf_spmd.models.stored import read_json
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.train import prepare
from rlhf_spmd.training.banner import _linear_attention
from rlhf_spmd.training.checks import exact_rollouts
from rlhf_spmd.training.plan_roles import _may_capture
from rlhf_spmd.workers.flops import forward_flops
from saved_models import checkpoint_of
from small_models import CONFIGS, LENGTHS, make_batch, make_model

FAMILIES = ("qwen3-5", "qwen3-5-moe", "qwen3-next")
SHAPE = DeltaShape(2, 6, 5, 4, 4)
NARROW = 1e-3  # in float32, of log-probs between one token at a time and chunks, with these weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("linear")
    return {name: make_model(root / name, {**CONFIGS[name], "vocab_size": 301}) for name in FAMILIES}


def inputs(lengths: Sequence[int], shape: DeltaShape = SHAPE) -> tuple[Tensor, ...]:
    """x, decay, rate and the convolution's weight of sequences padded to the longest, float64."""
    generator, longest = torch.Generator().manual_seed(3), max(lengths)
    sizes = (shape.channels,), (shape.values,), (shape.values,)
    x, decay, rate = (torch.randn(len(lengths), longest, *size, generator=generator, dtype=torch.float64) for size in sizes)
    weight = torch.randn(shape.channels, 1, shape.kernel, generator=generator, dtype=torch.float64)
    return x, -decay.exp(), rate.sigmoid(), weight


def by_definition(x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
    """One sequence [S, C], token by token and head by head -> [S, value heads, D]."""
    kernel, memory = shape.kernel, torch.zeros(shape.values, shape.key_dim, shape.value_dim, dtype=x.dtype)
    outs = []
    for t in range(len(x)):
        seen = [x[t - back] if t >= back else torch.zeros_like(x[0]) for back in reversed(range(kernel))]
        total = sum(one * weight[:, 0, i] for i, one in enumerate(seen))
        assert isinstance(total, Tensor)
        row = total * total.sigmoid()
        q, k, v = row.split([shape.keys * shape.key_dim, shape.keys * shape.key_dim, shape.values * shape.value_dim])
        out = []
        for head in range(shape.values):
            key_head = head // (shape.values // shape.keys)
            query, key = (part.view(shape.keys, -1)[key_head] for part in (q, k))
            query, key = (part / (part.square().sum() + 1e-6).sqrt() for part in (query, key))
            state = memory[head] * decay[t, head].exp()
            memory[head] = state + torch.outer(key, rate[t, head] * (v.view(shape.values, -1)[head] - key @ state))
            out.append(query @ memory[head] / shape.key_dim**0.5)
        outs.append(torch.stack(out))
    return torch.stack(outs)


def test_chunks_are_the_rule_token_by_token() -> None:
    """Sequences of several chunks, padded to the longest, whole and in parts of any size."""
    lengths = [150, 64, 7]
    x, decay, rate, weight = inputs(lengths)
    valid = (torch.arange(150) < torch.tensor(lengths)[:, None])[:, :, None]
    got, _, memory = mix_tokens(x, decay, rate, weight, SHAPE, valid, None)
    for i, length in enumerate(lengths):
        want = by_definition(x[i, :length], decay[i, :length], rate[i, :length], weight, SHAPE)
        assert (got[i, :length] - want).abs().max() < 1e-12
    states, before, outs = None, 0, []
    for size in (1, 70, 1, 1, 77):
        some, decays, rates = (each[:1, before : before + size] for each in (x, decay, rate))
        out, seen, left = mix_tokens(some, decays, rates, weight, SHAPE, None, states)
        states, before = DeltaStates(seen[:, -3:], left), before + size
        outs.append(out)
    assert states is not None and before == 150
    assert (torch.cat(outs, 1)[0] - got[0]).abs().max() < 1e-12 and (states.memory[0] - memory[0]).abs().max() < 1e-12


class Elements(TorchDispatchMode):
    """Counts the elements of all results."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += sum(part.numel() for part in tree_leaves(result) if isinstance(part, torch.Tensor))
        return result


def test_backward_passes_grow_with_the_length_and_not_its_square() -> None:
    counts = []
    for length in (256, 1024):
        x, decay, rate, weight = (each.requires_grad_() for each in inputs([length]))
        out = mix_tokens(x, decay, rate, weight, SHAPE, None, None)[0].sum()
        with Elements() as mode:
            out.backward()
        counts.append(mode.count)
    assert counts[1] < 4.1 * counts[0]


def test_gradients_are_those_of_the_rule() -> None:
    x, decay, rate, weight = (each.requires_grad_() for each in inputs([70]))
    factor = torch.linspace(-1, 1, 70 * SHAPE.values * SHAPE.value_dim, dtype=torch.float64)
    found = []
    for out in (mix_tokens(x, decay, rate, weight, SHAPE, None, None)[0][0], _differentiable(x, decay, rate, weight)):
        found.append(torch.autograd.grad((out.flatten() * factor).sum(), (x, decay, rate, weight)))
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() < 1e-11


def _differentiable(x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
    """As ``by_definition``, for the first sequence, by the matrix form of each step and without writing in place."""
    shape, outs, padded = SHAPE, [], torch.cat([x.new_zeros(3, SHAPE.channels), x[0]])
    state = torch.zeros(shape.values, shape.key_dim, shape.value_dim, dtype=x.dtype)
    for t in range(x.shape[1]):
        row = torch.nn.functional.silu((padded[t : t + 4] * weight[:, 0].t()).sum(0))
        q, k, v = row.split([shape.keys * shape.key_dim, shape.keys * shape.key_dim, shape.values * shape.value_dim])
        q, k = (part.view(shape.keys, -1).repeat_interleave(shape.values // shape.keys, 0) for part in (q, k))
        q, k = (part / (part.square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        eye = torch.eye(shape.key_dim, dtype=x.dtype)
        forget = eye - rate[0, t, :, None, None] * k[:, :, None] * k[:, None]
        learnt = rate[0, t, :, None, None] * k[:, :, None] * v.view(shape.values, 1, -1)
        state = decay[0, t].exp()[:, None, None] * forget @ state + learnt
        outs.append((q[:, None] @ state)[:, 0] / shape.key_dim**0.5)
    return torch.stack(outs)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_in_float32(models: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32, attn_implementation="eager").eval()
    decoder = Decoder(read_spec(models[name]), "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, models[name])
    ids, labels = make_batch(301)
    with torch.no_grad():
        got, _ = token_log_probs(decoder, decoder(ids, PackedAttention(LENGTHS)), labels)
        rows = [model(some[None]).logits[0].log_softmax(-1) for some in ids.split(LENGTHS)]
    want = torch.cat(rows).gather(1, labels[:, None])[:, 0]
    assert (got - want).abs().max() < 5e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_in_common_change_nothing(models: dict[str, Path], name: str) -> None:
    """Rows of a group lie in a batch with their prompt once: log-probs and gradients are those of whole rows."""
    spec = read_spec(models[name])
    ids, labels = make_batch(301)
    prompt, first, second = ids[:9], ids[9:20], ids[20:24]
    whole = torch.cat([prompt, first, prompt, second])
    once = torch.cat([prompt, first, second])
    places = torch.cat([torch.arange(20), torch.arange(9), torch.arange(20, 24)])
    found = []
    for tokens, attention in (
        (whole, PackedAttention([20, 13])),
        (once, PackedAttention([20, 13], places=places)),
    ):
        decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float64, "cpu")
        load_pretrained(decoder, models[name])
        kept = torch.arange(len(tokens)) if len(tokens) == len(once) else torch.cat([torch.arange(20), torch.arange(29, 33)])
        target = labels[: len(tokens)].clone()
        target[kept] = labels[: len(once)]
        got, _ = decoder(tokens, attention, lambda d, hidden, target=target: token_log_probs(d, hidden, target))
        got[kept].square().sum().backward()
        found.append((got[kept].detach(), {key: p.grad for key, p in decoder.named_parameters() if p.grad is not None}))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-11
    for key, grad in found[0][1].items():
        assert (grad - found[1][1][key]).abs().max() < 1e-9 * grad.abs().max().clamp(min=1), key


@pytest.mark.parametrize(
    ("name", "head", "layout", "checkpointing"),
    [
        ("qwen3-5", "lm", Layout(tp=2), "none"),
        ("qwen3-5", "lm", Layout(pp=2, tp=2, sequence_parallel=True), "none"),
        ("qwen3-5", "lm", Layout(tp=2, dp=2, zero=3), "selective"),
        ("qwen3-5", "value", Layout(tp=4), "full"),
        ("qwen3-5", "lm", Layout(pp=4), "none"),
        ("qwen3-5", "value", Layout(dp=2, zero=2), "selective"),
    ],
    ids=str,
)
def test_training_is_the_same_in_layouts(
    models: dict[str, Path], name: str, head: str, layout: Layout, checkpointing: str
) -> None:
    path, options = str(models[name]), {"activation_checkpointing": checkpointing}
    got = together(run_ranks(layout.size, train, path, layout, [2, 3], head, options))
    assert_same(got, together(run_ranks(1, train, path, Layout(), [1], head, {})), 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(models: dict[str, Path], name: str) -> None:
    requests = ragged_requests(samples=1, max_new_tokens=30)
    greedy = build_generator(str(models[name])).generate(requests, SamplingConfig(temperature=0.0), 0, 0)
    assert tokens_of(greedy) == transformers_greedy(str(models[name]), [list(r.prompt_ids) for r in requests], 30)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 13},  # prompts in several parts, rows of the batch in one step with them
        {"num_pages": 22},  # preemption
        {"max_num_seqs": 3},
        {"micro_batches": 3, "page_size": 3},
    ],
    ids=str,
)
def test_batches_and_chunks_change_nothing(models: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    """Log-probs of sampled tokens are a training forward's."""
    config, requests = replace(SMALL, **options), ragged_requests()
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, NARROW)):
        generator = build_generator(str(models[name]), config, dtype)
        sampled = generator.generate(requests, SamplingConfig(temperature=0.7), 3, 5)
        wanted = training_log_probs(generator.decoder, requests, sampled, 0.7)
        assert max(float((w - c.log_probs).abs().max()) for w, c in zip(wanted, sampled, strict=True)) < most
        assert generator.stats.hit_tokens > 0 and (generator.stats.preemptions > 0) == ("num_pages" in options)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=4), Layout(pp=2, tp=2)], ids=str)
def test_generation_in_layouts(models: dict[str, Path], layout: Layout) -> None:
    path, sampling = str(models["qwen3-5"]), SamplingConfig(temperature=0.8)
    results = run_ranks(layout.size, generate_on_rank, path, layout, SMALL, 0.8)
    reference = build_generator(path).generate(ragged_requests(), sampling, 3, 5)
    for found, _, _ in results:
        for completion in reference:
            tokens, log_probs = found[completion.row_id]
            assert tokens == completion.token_ids
            torch.testing.assert_close(torch.tensor(log_probs), completion.log_probs, atol=NARROW, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_transitions_of_the_hybrid_engine(name: str) -> None:
    """Exact to the element, and computed in the generation layout, where fused rows of two training slices lie together."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
    spec = spec_from_config({**CONFIGS[name], **sizes}, "test")
    for train_layout, pp, tp in ((Layout(2, 4, 1), 1, 2), (Layout(1, 2, 4, 3), 2, 4)):
        check_plans(Simulated("zero_redundancy", layout_of("zero_redundancy", train_layout, pp, tp), spec))
    layout = layout_of("zero_redundancy", Layout(tp=4), 1, 2)
    assert max(run_ranks(4, generate_in_layout, spec, "zero_redundancy", layout, True)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "name", "stacked"),
    [("qwen3_5", "qwen3-5", False), ("qwen3_5_moe", "qwen3-5-moe", False), ("qwen3_5_moe", "qwen3-5-moe", True)],
)
def test_the_language_model_of_one_that_sees(tmp_path: Path, kind: str, name: str, stacked: bool) -> None:
    """transformers writes a model with a vision tower; its language model is read, and the export is one for text. ``stacked``: files
    have all experts in one tensor, as on the hub."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    text = {key: value for key, value in deepcopy(CONFIGS[name]).items() if key != "architectures"}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
    config = AutoConfig.for_model(kind, text_config=text, vision_config={**eyes, "num_position_embeddings": 16})
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file)
    assert any(name.startswith("model.visual.") for name in stored)
    if stacked:
        stored = {key: tensor for key, tensor in stored.items() if ".experts." not in key}
        stored |= {key: tensor.contiguous() for key, tensor in model.state_dict().items() if ".experts." in key}
        assert stored["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 48, 32)
    save_file({**stored, "mtp.fc.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    spec = read_spec(tmp_path / "source")
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, tmp_path / "source")
    ids, _ = make_batch(101)
    with torch.no_grad():
        got = local_logits(decoder, decoder(ids, PackedAttention(LENGTHS)))
        want = torch.cat([model(some[None]).logits[0] for some in ids.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4
    tensors = {key: torch.empty(shape) for key, shape in tensor_shapes(spec, "lm").items()}
    for key, parameter in decoder.named_parameters():
        for box in decoder.shards[key].boxes:
            tensors[box.name][box.global_slices] = parameter.detach()[box.local_slices]
    path = checkpoint_of(tensors, tmp_path / "source", tmp_path / "run", "lm")
    out = export_hugging_face(path, "actor", tmp_path / "source", tmp_path / "out")
    both: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    loaded, report = both
    assert type(loaded).__name__ == CONFIGS[name]["architectures"][0]
    assert read_json(out / "config.json")["architectures"] == CONFIGS[name]["architectures"]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        again = torch.cat([loaded.eval()(some[None]).logits[0] for some in ids.split(LENGTHS)])
    assert (again - want).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next"])
def test_value_models_equal_transformers_classifiers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make_model(tmp_path, {**CONFIGS[name], "architectures": ["AForSequenceClassification"], "num_labels": 1})
    decoder = Decoder(read_spec(path), "value", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    ids, _ = make_batch(101)
    with torch.no_grad():
        got = decoder(ids, PackedAttention(LENGTHS), values)
        want = torch.cat([model.score(model.model(some[None])[0])[0, :, 0] for some in ids.split(LENGTHS)])
    assert (got - want).abs().max() < 1e-4
    head = [Spec("score.weight", torch.float32, (1, 32))]
    assert export_config(CONFIGS[name], head)["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("kv_cache", ["free", "keep", "offload"])
def test_calls_that_are_interrupted_change_nothing(models: dict[str, Path], kv_cache: str) -> None:
    """Rows go on with their states, or compute their tokens again; rows that come later take slots that others had."""
    path, requests = str(models["qwen3-5"]), ragged_requests(samples=2, max_new_tokens=20)
    sampling, config = SamplingConfig(temperature=0.7), replace(SMALL, max_num_batched_tokens=50, kv_cache=kv_cache)
    wanted = build_generator(path, SMALL, torch.float64).generate(requests, sampling, 3, 5)
    generator = build_generator(path, replace(config, max_num_seqs=6), torch.float64)
    found, fresh, late = [], requests[:4], requests[4:]
    while fresh or generator.kept or late:
        found += generator.generate_until(fresh, sampling, 3, 5, GenerationLimits(steps=5), version=1)
        generator.before_training()
        fresh, late = late[:4], late[4:]
    for got, want in zip(sorted(found, key=lambda c: c.row_id), wanted, strict=True):
        assert got.token_ids == want.token_ids and (got.log_probs - want.log_probs).abs().max() < 1e-10


def generate_in_parts(world: World, path: str, layout: Layout) -> dict[int, list[int]]:
    """Token ids by row, of calls that are interrupted: more rows come than the first call had."""
    mesh = build_mesh(world, range(world.size), layout)
    config = replace(SMALL, max_num_seqs=6, num_pages=200, kv_cache="keep")
    generator = Generator(load(path, mesh, torch.float64), mesh, config, read_eos_ids(path))
    fresh, late = ragged_requests(samples=2, max_new_tokens=12)[:2], ragged_requests(samples=2, max_new_tokens=12)[2:]
    found: dict[int, list[int]] = {}
    while fresh or generator.kept or late:
        ended = generator.generate_until(fresh, SamplingConfig(temperature=0.7), 3, 5, GenerationLimits(steps=5), version=1)
        found |= {one.row_id: one.token_ids for one in ended}
        fresh, late = late[:4], late[4:]
    return found


def test_stages_without_linear_layers_keep_the_same_rows(tmp_path: Path) -> None:
    """The first stage has states for as many rows as the first call had, and the second has none; both decide alike."""
    config = {**CONFIGS["qwen3-5"], "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    path = str(make_model(tmp_path, {**config, "vocab_size": 301}))
    (alone,) = run_ranks(1, generate_in_parts, path, Layout())
    assert run_ranks(2, generate_in_parts, path, Layout(pp=2)) == [alone, alone]


def test_rows_whose_states_find_no_memory_wait(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, requests = models["qwen3-5"], ragged_requests(samples=2, max_new_tokens=12)
    wanted = build_generator(str(path), SMALL, torch.float64).generate(requests, SamplingConfig(), 3, 5)
    generator = build_generator(str(path), SMALL, torch.float64)
    room = 9.99 * slot_bytes(generator.decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_spmd.generation.generator.cache_room", lambda *args: room)
        assert generator._affordable(16)[0] == 4
        found = generator.generate(requests, SamplingConfig(), 3, 5)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert capsys.readouterr().err.splitlines() == [
        "warning: generation has 4 rows in flight, not 16: half of the cache's 0.00 GiB is for states of linear attention, 0.06 MiB a "
        "row; raise gpu_memory_utilization or generation.tp"
    ]


def test_ppo_on_one_rank_and_split(tmp_path: Path) -> None:
    """A Qwen3.5 learns with a critic that is a Qwen3-Next, in layouts that generation regroups."""
    task = tasks.task()
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12}
    for role, name, kind in (("actor", "qwen3-5", "CausalLM"), ("critic", "qwen3-next", "SequenceClassification")):
        config = {**CONFIGS[name], **sizes, "architectures": [f"AFor{kind}"]}
        write_random_model(tmp_path / role, config, 3)
        shutil.copytree(task / "tokenizer", tmp_path / role, dirs_exist_ok=True)
    roles = ("actor", "critic", "reference")
    common = [f"models.{role}.path={tmp_path / model}" for role, model in zip(roles, ("actor", "critic", "actor"), strict=True)]
    common += [f"models.{role}.dtype=float64" for role in roles]
    split = ["models.actor.layout.tp=2", "models.actor.generation.tp=1", "models.critic.layout.dp=2"]
    split += ["models.critic.layout.zero=3", "models.reference.layout.pp=2"]
    for ranks, overrides in ((1, []), (2, split)):
        arguments = str(task / "ppo.json"), tasks.settings(tmp_path / str(ranks), 2, *common, *overrides)
        run_ranks(ranks, tasks.train_here, *arguments)
    alone, both = (tasks.read_run(tmp_path / str(ranks)) for ranks in (1, 2))
    assert alone.log_prob_difference() < 1e-10 and alone.responses == both.responses
    for difference, where in (tasks.worst_metric(alone, both, 1e-3), tasks.worst_tensor(alone, both)):
        assert difference < 1e-8, where


def test_what_linear_attention_cannot_do(tmp_path: Path) -> None:
    """Refused before work starts. Rollouts are not exact: old log-probs are computed in a training forward."""
    task = tasks.task()
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS}
    write_random_model(tmp_path / "model", {**CONFIGS["qwen3-5"], **sizes}, 3)
    shutil.copytree(task / "tokenizer", tmp_path / "model", dirs_exist_ok=True)

    def job(*more: str, ranks: int = 1) -> Any:
        paths = [f"models.{role}.path={tmp_path / 'model'}" for role in ("actor", "reference")]
        return prepare(str(task / "ppo.json"), tasks.settings(tmp_path / "x", 1, *paths, *more), ranks)

    found = job()
    assert not exact_rollouts(found.config, found.plans)
    assert _linear_attention(found, torch.device("cpu")) == ", linear attention torch"
    assert _may_capture(found.plans["actor"])  # decode steps on a GPU
    generation = "models.actor.generation"
    for more, words in (
        (f"{generation}.reuse_rollout_log_probs=true", "linear attention .* one token by other sums than many; leave it out"),
        (f"{generation}.speculative_tokens=2", r"models\.actor\.generation\.speculative_tokens=2: .* leave it out"),
        ("models.actor.layout.cp=2", r"models\.actor\.layout\.cp=2: linear attention .* allowed: 1"),
        ("models.actor.layout.tp=8", r"tp=8 does not divide"),
    ):
        with pytest.raises(ValueError, match=words):
            job(more, ranks=8 if "layout" in more else 1)
    with pytest.raises(ValueError, match=r"^generation\.speculative_tokens=2: .* linear attention, .* leave it out$"):
        build_generator(str(tmp_path / "model"), GenerationConfig(speculative_tokens=2))


@pytest.mark.parametrize(
    ("options", "layout", "most"),
    [
        ({"lora": LoraConfig(rank=2)}, Layout(pp=2, tp=2, sequence_parallel=True), 1e-10),
        ({"lora": LoraConfig(rank=2, target_modules=["in_proj_qkv", "out_proj", "q_proj"])}, Layout(tp=2, dp=2, zero=2), 1e-10),
        ({"optim": replace(OPTIM, name="muon")}, Layout(tp=2, dp=2, zero=1), 0.02),  # whose products are in bf16
    ],
    ids=["lora", "lora of some", "muon"],
)
@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next"])
def test_adapters_and_muon_in_layouts(
    models: dict[str, Path], name: str, options: dict[str, Any], layout: Layout, most: float
) -> None:
    if name == "qwen3-next" and "lora" in options:
        named = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
        options = {"lora": replace(options["lora"], target_modules=named)}
    path = str(models[name])
    got = together(run_ranks(layout.size, train, path, layout, [2, 3], "lm", options))
    assert_same(got, together(run_ranks(1, train, path, Layout(), [1], "lm", options)), most)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_planner_counts_what_transformers_has(models: dict[str, Path], name: str) -> None:
    spec, shape = read_spec(models[name]), shape_of(read_spec(models[name]), "lm")
    tensors = load_file(models[name] / "model.safetensors")
    assert shape.params == pytest.approx(sum(tensor.numel() for tensor in tensors.values()))
    delta, linear = spec.delta, 2
    assert delta is not None and len(delta.layers) == linear
    matrices = {key: tensor.numel() for key, tensor in tensors.items() if tensor.ndim == 2 and "embed" not in key}
    every = sum(matrices.values())
    if spec.experts is not None:  # a token takes three of six
        every -= sum(n for key, n in matrices.items() if ".experts." in key) // 2
    assert forward_flops(spec, 10, 0) == 10 * 2 * (every + 3 * linear * 8 * 24 * 16)
    assert shape.active == pytest.approx((every - matrices["lm_head.weight"]) / 4)
    assert (shape.queries, shape.keys, shape.state) == (4 * 16 / 2, 2 * 16 / 2, (8 * 24 * 16 + 3 * (2 * 4 * 24 + 8 * 16)) / 2)


def test_states_count_in_the_cache(models: dict[str, Path]) -> None:
    """A slot for each row in flight, and what the planner says of them is what the generator allocates."""
    path, requests = models["qwen3-5"], ragged_requests()
    generator = build_generator(str(path), replace(SMALL, max_num_seqs=5, kv_cache="keep"))
    generator.generate_until(requests, SamplingConfig(), 3, 5, GenerationLimits(steps=2), version=1)
    kept = generator._micro_batches
    assert kept is not None
    states = kept.micro_batches[0].cache.states
    assert states is not None and states.num_slots == 5 + SPARE_SLOTS and len(kept.micro_batches[0].cache.pages) == 2
    held = states.inputs.nbytes + states.memory.nbytes
    state = 4 * 4 * shape_of(generator.decoder.spec, "lm").state
    assert held == (5 + SPARE_SLOTS) * slot_bytes(generator.decoder) == (5 + SPARE_SLOTS) * state
    free = {}
    for size in (0, slot_bytes(generator.decoder)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlhf_spmd.generation.generator.slot_bytes", lambda decoder, size=size: size)
            patch.setattr("rlhf_spmd.generation.generator.cache_room", lambda *args: 10_000_000)
            free[size] = build_generator(str(path))._affordable(7)[1]
    page = KVCache.page_bytes(2, 2, 16, 8, torch.float32)
    assert free[0] - free[size] == pytest.approx((7 + SPARE_SLOTS) * size / page, abs=1)
