"""Linear attention (gated delta rule): the arithmetic, prefixes in common, states in generation, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tasks
from generators import SMALL, alone, build_generator, load, ragged_requests, tokens_of, training_log_probs
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.page_allocator import SPARE_SLOTS
from rlhf_spmd.generation.recurrent_states import slot_bytes
from rlhf_spmd.kernels import DeltaShape, DeltaStates, delta_rule
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_eos_ids
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.preflight.banner import _linear_attention
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.preflight.plan_roles import _may_capture
from rlhf_spmd.train import prepare
from small_models import CONFIGS, make_batch, make_model

SHAPE = DeltaShape(2, 6, 5, 4, 4)
NARROW = 1e-3  # in float32, of log-probs between one token at a time and chunks, with these weights


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("linear"), {**CONFIGS["qwen3-5"], "vocab_size": 301}))


def inputs(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """x, decay, rate and the convolution's weight of sequences padded to the longest, float64."""
    generator, longest = torch.Generator().manual_seed(3), max(lengths)
    sizes = (SHAPE.channels,), (SHAPE.values,), (SHAPE.values,)
    x, decay, rate = (torch.randn(len(lengths), longest, *size, generator=generator, dtype=torch.float64) for size in sizes)
    weight = torch.randn(SHAPE.channels, 1, SHAPE.kernel, generator=generator, dtype=torch.float64)
    return x, -decay.exp(), rate.sigmoid(), weight


def by_definition(x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
    """One sequence [S, C], token by token, by the matrix form of each step -> [S, value heads, D]."""
    outs, padded = [], torch.cat([x.new_zeros(SHAPE.kernel - 1, SHAPE.channels), x])
    state = torch.zeros(SHAPE.values, SHAPE.key_dim, SHAPE.value_dim, dtype=x.dtype)
    for t in range(len(x)):
        total = (padded[t : t + SHAPE.kernel] * weight[:, 0].t()).sum(0)
        row = total * total.sigmoid()
        q, k, v = row.split([SHAPE.keys * SHAPE.key_dim, SHAPE.keys * SHAPE.key_dim, SHAPE.values * SHAPE.value_dim])
        q, k = (part.view(SHAPE.keys, -1).repeat_interleave(SHAPE.values // SHAPE.keys, 0) for part in (q, k))
        q, k = (part / (part.square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        learning = rate[t, :, None, None] * k[:, :, None]
        forget = torch.eye(SHAPE.key_dim, dtype=x.dtype) - learning * k[:, None]
        state = decay[t].exp()[:, None, None] * forget @ state + learning * v.view(SHAPE.values, 1, -1)
        outs.append((q[:, None] @ state)[:, 0] / SHAPE.key_dim**0.5)
    return torch.stack(outs)


def test_chunks_are_the_rule_token_by_token() -> None:
    """Sequences of several chunks, padded to the longest, whole and in parts of any size; and the gradients of one."""
    lengths = [150, 64, 7]
    x, decay, rate, weight = leaves = [each.requires_grad_() for each in inputs(lengths)]
    valid = (torch.arange(150) < torch.tensor(lengths)[:, None])[:, :, None]
    got, _, memory = delta_rule(x, decay, rate, weight, SHAPE, valid, None)
    for i, length in enumerate(lengths):
        want = by_definition(x[i, :length], decay[i, :length], rate[i, :length], weight)
        assert (got[i, :length] - want).abs().max() < 1e-12
    factor = torch.linspace(-1, 1, got[1, :64].numel(), dtype=torch.float64)
    want = by_definition(x[1, :64], decay[1, :64], rate[1, :64], weight)
    gradients = (torch.autograd.grad((out.flatten() * factor).sum(), leaves) for out in (got[1, :64], want))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-11
    states, before, outs = None, 0, []
    for size in (1, 70, 1, 1, 77):
        some, decays, rates = (each[:1, before : before + size] for each in (x, decay, rate))
        out, seen, left = delta_rule(some, decays, rates, weight, SHAPE, None, states)
        states, before = DeltaStates(seen[:, -3:], left), before + size
        outs.append(out)
    assert states is not None and before == 150
    assert (torch.cat(outs, 1)[0] - got[0]).abs().max() < 1e-12 and (states.memory[0] - memory[0]).abs().max() < 1e-12


def test_prefixes_in_common_change_nothing(path: str) -> None:
    """Rows of a group lie in a batch with their prompt once: log-probs and gradients are those of whole rows."""
    ids, labels = make_batch(301)
    prompt, first, second = ids[:9], ids[9:20], ids[20:24]
    token_index = torch.cat([torch.arange(20), torch.arange(9), torch.arange(20, 24)])
    every, of_once = torch.arange(24), torch.cat([torch.arange(20), torch.arange(29, 33)])
    results = []
    for tokens, attention, kept in (
        (torch.cat([prompt, first, prompt, second]), PackedAttention([20, 13]), of_once),
        (torch.cat([prompt, first, second]), PackedAttention([20, 13], token_index=token_index), every),
    ):
        decoder = load(path, alone()[1], torch.float64)
        target = labels[: len(tokens)].clone()
        target[kept] = labels[:24]
        log_probs, _ = decoder(tokens, attention, lambda d, hidden, target=target: token_log_probs(d, hidden, target))
        log_probs[kept].square().sum().backward()
        results.append((log_probs[kept].detach(), {key: p.grad for key, p in decoder.named_parameters() if p.grad is not None}))
    (log_probs, gradients), (ours, our_gradients) = results
    assert (log_probs - ours).abs().max() < 1e-11
    for key, grad in gradients.items():
        assert (grad - our_gradients[key]).abs().max() < 1e-9 * grad.abs().max().clamp(min=1), key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 13},  # prompts in several parts, rows of the batch in one step with them
        {"num_pages": 22},  # preemption
        {"max_num_seqs": 3},
        {"page_size": 3},
    ],
    ids=str,
)
def test_batches_and_chunks_change_nothing(path: str, options: dict[str, Any]) -> None:
    """Log-probs of sampled tokens are a training forward's."""
    config, requests = replace(SMALL, **options), ragged_requests(samples=2)
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, NARROW)):
        generator = build_generator(path, config, dtype)
        sampled = generator.generate(requests, SamplingConfig(temperature=0.7), 3, 5)
        wanted = training_log_probs(generator.decoder, requests, sampled, 0.7)
        assert max(float((w - c.log_probs).abs().max()) for w, c in zip(wanted, sampled, strict=True)) < most
        assert generator.stats.hit_tokens > 0 and (generator.stats.preemptions > 0) == ("num_pages" in options)


def in_parts(generator: Generator, requests: list[Request]) -> list[Completion]:
    """Calls that are interrupted: more rows come than the first call had, and take slots that others had."""
    completions, fresh, late = [], requests[:2], requests[2:]
    while fresh or generator.kept or late:
        completions += generator.generate_until(fresh, SamplingConfig(), 3, 5, GenerationLimits(steps=5), version=1)
        generator.before_training()
        fresh, late = late[:4], late[4:]
    return sorted(completions, key=lambda completion: completion.row_id)


@pytest.mark.parametrize("kv_cache", ["free", "keep", "offload"])
def test_calls_that_are_interrupted_change_nothing(path: str, kv_cache: str) -> None:
    """Rows go on with their states, or compute their tokens again."""
    requests, config = (
        ragged_requests(samples=2, max_new_tokens=20),
        replace(SMALL, max_num_batched_tokens=50, kv_cache=kv_cache),
    )
    expected = build_generator(path, SMALL, torch.float64).generate(requests, SamplingConfig(), 3, 5)
    completions = in_parts(build_generator(path, replace(config, max_num_seqs=6), torch.float64), requests)
    for ours, whole in zip(completions, expected, strict=True):
        assert ours.token_ids == whole.token_ids and (ours.log_probs - whole.log_probs).abs().max() < 1e-10


def generate_in_parts(world: World, path: str, layout: Layout) -> list[list[int]]:
    mesh = build_mesh(world, range(world.size), layout)
    config = replace(SMALL, max_num_seqs=6, num_pages=200, kv_cache="keep")
    generator = Generator(load(path, mesh, torch.float64), mesh, config, read_eos_ids(path))
    return tokens_of(in_parts(generator, ragged_requests(samples=2, max_new_tokens=12)))


def test_stages_without_linear_layers_keep_the_same_rows(tmp_path: Path) -> None:
    """The first stage has states for as many rows as the first call had, and the second has none; both decide alike."""
    config = {**CONFIGS["qwen3-5"], "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    path = str(make_model(tmp_path, {**config, "vocab_size": 301}))
    expected = run_ranks(1, generate_in_parts, path, Layout())
    assert run_ranks(2, generate_in_parts, path, Layout(pp=2)) == expected * 2


def test_rows_whose_states_find_no_memory_wait(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    requests = ragged_requests(samples=2, max_new_tokens=12)
    wanted = build_generator(path, SMALL, torch.float64).generate(requests, SamplingConfig(), 3, 5)
    generator = build_generator(path, SMALL, torch.float64)
    room = 9.99 * slot_bytes(generator.decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_spmd.generation.generator.cache_room", lambda *args: room)
        assert generator._affordable(16)[0] == 4
        waiting = generator.generate(requests, SamplingConfig(), 3, 5)
    assert tokens_of(waiting) == tokens_of(wanted)
    assert capsys.readouterr().err.splitlines() == [
        "warning: generation has 4 rows in flight, not 16: half of the cache's 0.00 GiB is for states of linear attention, 0.06 MiB a "
        "row; raise gpu_memory_utilization or generation.tp"
    ]


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
    assert not exact_rollouts(found.config, found.roles)
    assert _linear_attention(found, torch.device("cpu")) == ", linear attention torch"
    assert _may_capture(found.roles["actor"])  # decode steps on a GPU
    generation = "models.actor.generation"
    for more, words in (
        (f"{generation}.reuse_rollout_log_probs=true", "linear attention .* one token by other sums than many; leave it out"),
        ("models.actor.layout.cp=2", r"models\.actor\.layout\.cp=2: linear attention .* allowed: 1"),
        ("models.actor.layout.tp=8", r"tp=8: does not divide"),
    ):
        with pytest.raises(ValueError, match=words):
            job(more, ranks=8 if "layout" in more else 1)


def test_states_count_in_the_cache(path: str) -> None:
    """A slot for each row in flight, and what the planner says of them is what the generator allocates."""
    requests = ragged_requests()
    generator = build_generator(path, replace(SMALL, max_num_seqs=5, kv_cache="keep"))
    generator.generate_until(requests, SamplingConfig(), 3, 5, GenerationLimits(steps=2), version=1)
    kept = generator._micro_batches
    assert kept is not None
    states = kept.micro_batches[0].cache.states
    assert states is not None and states.num_slots == 5 + SPARE_SLOTS and len(kept.micro_batches[0].cache.pages) == 2
    held = states.inputs.nbytes + states.memory.nbytes
    state = 4 * 4 * shape_of(generator.decoder.spec, "lm").row_state
    assert held == (5 + SPARE_SLOTS) * slot_bytes(generator.decoder) == (5 + SPARE_SLOTS) * state
    free = {}
    for size in (0, slot_bytes(generator.decoder)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlhf_spmd.generation.generator.slot_bytes", lambda decoder, size=size: size)
            patch.setattr("rlhf_spmd.generation.generator.cache_room", lambda *args: 10_000_000)
            free[size] = build_generator(path)._affordable(7)[1]
    page = KVCache.page_bytes(2, 2, 16, 8, torch.float32)
    assert free[0] - free[size] == pytest.approx((7 + SPARE_SLOTS) * size / page, abs=1)
