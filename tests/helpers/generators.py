"""Small models, ragged prompts and a generator alone in this process, and what transformers generates from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from rlhf_spmd import kernels
from rlhf_spmd.data.tokenizer import Decoding, load_tokenizer
from rlhf_spmd.generation import Completion, GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.sequence import SamplingOverrides, SequenceState
from rlhf_spmd.kernels import dispatch
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_eos_ids, read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.router_replay import RouterRecord

COMMON = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,  # peaked enough that greedy decoding has no near-ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0},
    "qwen2": {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}

SMALL = GenerationConfig(page_size=8, max_num_seqs=16, max_num_batched_tokens=512)
RULES = SamplingConfig(
    temperature=1.3,
    repetition_penalty=0.7,
    frequency_penalty=0.4,
    presence_penalty=0.5,
    logit_bias={3: 1.5, 4: 2.0, 11: 2.0},
    forbidden_token_ids=[8],
    min_response_length=5,
    stop_token_ids=[4],
    min_p=0.02,
    top_k=12,
    top_p=0.9,
    logprobs=3,
)
OVERRIDES = (
    None,
    SamplingOverrides(0.0),
    SamplingOverrides(1.4, top_p=0.7),
    SamplingOverrides(1.0, top_k=3),
    SamplingOverrides(0.8, min_p=0.2),
)


class LastDigits(Decoding):
    """For models without a tokenizer."""

    special_ids: ClassVar[dict[str, int]] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        return "".join(str(token % 10) for token in ids)


@cache
def alone() -> tuple[World, Mesh]:
    world = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    return world, build_mesh(world, [0], Layout())


def load(path: str, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.set_num_threads(1)
    decoder = Decoder(read_spec(path), "lm", mesh.pp_rank, mesh.layout.pp, mesh.tp, dtype, "cpu")
    load_pretrained(decoder, path)
    return decoder


def build_generator(path: str, config: GenerationConfig = SMALL, dtype: torch.dtype = torch.float32) -> Generator:
    mesh = alone()[1]
    return Generator(load(path, mesh, dtype), mesh, config, read_eos_ids(path))


def row_of(index: int, prompt_ids: Sequence[int], most: int, num_continued: int = 0, **more: Any) -> SequenceState:
    """In flight, with room for ``most`` tokens."""
    return SequenceState(Request(index, 0, prompt_ids, most, num_continued=num_continued), buffer_line=index, **more)


def ragged_requests(num_prompts: int = 7, samples: int = 3, max_new_tokens: int = 30, vocabulary: int = 301) -> list[Request]:
    """Prompts of 1 .. 100 tokens, some with a common beginning; ``samples`` rows each, of different length limits."""
    generator = torch.Generator().manual_seed(11)
    stem = torch.randint(3, vocabulary, (40,), generator=generator).tolist()
    requests = []
    for group in range(num_prompts):
        length = [1, 3, 8, 17, 64, 65, 100][group % 7]
        ending = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        prompt = (stem[: length // 2] + ending)[:length]
        for j in range(samples):
            requests.append(Request(group * samples + j, group, prompt, max_new_tokens - 4 * j))
    return requests


def with_overrides(requests: Sequence[Request]) -> list[Request]:
    """Rows whose sampling settings differ, by turns."""
    return [replace(request, overrides=OVERRIDES[i % len(OVERRIDES)]) for i, request in enumerate(requests)]


def training_log_probs(
    decoder: Decoder, requests: list[Request], completions: list[Completion], temperature: float
) -> list[Any]:
    """log-probs of the responses from one packed forward pass, as training computes them."""
    texts = [torch.tensor([*r.prompt_ids, *c.token_ids]) for r, c in zip(requests, completions, strict=True)]
    packed = torch.cat(texts)
    with torch.no_grad():
        hidden = decoder(packed, PackedAttention([len(t) for t in texts]))
        log_probs, _ = token_log_probs(decoder, hidden, packed.roll(-1), temperature)
    out = []
    for row, request in zip(log_probs.split([len(t) for t in texts]), requests, strict=True):
        out.append(row[len(request.prompt_ids) - 1 : -1])
    return out


def num_unequal(decoder: Decoder, requests: list[Request], completions: list[Completion], temperature: float) -> int:
    expected = training_log_probs(decoder, requests, completions, temperature)
    return sum(int((log_probs != c.log_probs).sum()) for log_probs, c in zip(expected, completions, strict=True))


def chosen_by(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """The experts of each token in one forward pass, [tokens, mixtures, K]."""
    record = RouterRecord(torch.int64)
    with torch.no_grad():
        decoder(torch.tensor(tokens), PackedAttention([len(tokens)]), routers=record)
    return torch.stack([chosen[: len(tokens)] for chosen in record.chosen.values()], 1)


def assert_recorded(decoder: Decoder, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """All but the last token, which repeats the one before it."""
    for request, completion in zip(requests, completions, strict=True):
        expected, experts = chosen_by(decoder, [*request.prompt_ids, *completion.token_ids]), completion.experts
        assert experts is not None and experts.shape == expected.shape
        assert torch.equal(experts[:-1].long(), expected[:-1]) and torch.equal(experts[-1], experts[-2])


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def assert_same(completions: Sequence[Completion], expected: Sequence[Completion], tolerance: float = 0.0) -> None:
    """The same rows in the same order; log-probs differ by at most ``tolerance``."""
    for ours, reference in zip(completions, expected, strict=True):
        assert (ours.row_id, ours.token_ids) == (reference.row_id, reference.token_ids)
        assert ours.finish_reason == reference.finish_reason and len(ours.versions) == len(ours.token_ids)
        torch.testing.assert_close(ours.log_probs, reference.log_probs, atol=tolerance, rtol=0)
        torch.testing.assert_close(ours.log_probs_t1, reference.log_probs_t1, atol=tolerance, rtol=0)
        assert (ours.top_log_probs is None) == (reference.top_log_probs is None)
        if ours.top_log_probs is not None and reference.top_log_probs is not None:
            assert torch.equal(ours.top_log_probs[0], reference.top_log_probs[0])
            torch.testing.assert_close(ours.top_log_probs[1], reference.top_log_probs[1], atol=tolerance, rtol=0)


def generate_in_pieces(
    generator: Generator,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    limits: GenerationLimits,
    after_call: Callable[[Generator], None] = lambda generator: None,
) -> list[Completion]:
    """Half of the rows at first, the others with the second call, and calls until all rows have ended; sorted by row."""
    half = len(requests) // 2
    portions = [requests[:half], requests[half:]]
    completions: list[Completion] = []
    while portions or generator.kept:
        completions += generator.generate_until(portions.pop(0) if portions else [], sampling, 3, 5, limits, 1)
        after_call(generator)
    return sorted(completions, key=lambda completion: completion.row_id)


def transformers_greedy(path: str, prompts: list[list[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
    """``path``: if there is a tokenizer, ids that it lacks are kept out."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        load_tokenizer(path, required=False),
    )
    if tokenizer is not None:
        options["suppress_tokens"] = [*range(len(tokenizer), model.config.vocab_size)] or None
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, **options
        )
        out.append(generated[0, len(prompt) :].tolist())
    return out


@pytest.fixture(params=["highest", "medium", "kernels"])  # MKL, oneDNN, our own
def matmul_precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    if request.param == "kernels":
        yield request.param
    else:
        torch.set_float32_matmul_precision(request.param)
        with mock.patch.object(dispatch, "_load", return_value=None):
            yield request.param
    torch.set_float32_matmul_precision(before)


def skip_unless_exact(ops: kernels.Ops, dtype: torch.dtype, threads: int = 1) -> None:
    """Some processors' own matrix products are not exact; the trainer then computes what it would have taken from a generator."""
    if not ops.is_batch_invariant(dtype, threads):
        pytest.skip(f"this processor's products of {dtype} are not exact at this precision")


@pytest.fixture(params=["torch", "cpp"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with mock.patch.object(dispatch, "_load", return_value=None) if request.param == "torch" else contextlib.nullcontext():
        yield


def generate_on_rank(world: World, path: str, layout: Layout, config: GenerationConfig, temperature: float) -> Any:
    """This rank's completions by row id, and how many log-probs differ from a forward pass of the same layout (pp = 1)."""
    mesh = build_mesh(world, list(range(world.size)), layout)
    decoder = load(path, mesh)
    generator = Generator(decoder, mesh, config, read_eos_ids(path))
    requests = [r for r in ragged_requests() if r.group_id % layout.dp == mesh.dp_rank]
    completions = generator.generate(requests, SamplingConfig(temperature=temperature), 3, 5)
    unequal = num_unequal(decoder, requests, completions, temperature) if layout.pp == 1 else 0
    return {c.row_id: (c.token_ids, c.log_probs.tolist()) for c in completions}, unequal, generator.stats.preemptions
