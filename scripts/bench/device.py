"""Our kernels on one device: attention over pages alone, and how far log-probs are from float32's, beside transformers'.

    python scripts/bench/device.py attention --out attention.json    # under a minute on a GPU
    python scripts/bench/device.py agreement --out agreement.json

Models have random weights; without a GPU Triton's interpreter runs the kernels, which only shows that they start.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import (
    ROOT,
    Device,
    chosen,
    found_device,
    line,
    machine_facts,
    machine_rates,
    median,
    run_parts,
    save,
    table,
    timed,
)
from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.sequence import SequenceState, SequenceWork
from rlhf_spmd.kernels import AttentionRule
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

# Attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 64
RULE = AttentionRule(HEAD_DIM**-0.5, None, None)


def build_cache(pages: int, layers: int, device: str) -> KVCache:
    backend = build_backend("triton", torch.bfloat16, torch.device(device))
    cache = KVCache(layers, KV_HEADS, HEAD_DIM, pages, PAGE, torch.bfloat16, torch.device(device), backend)
    for layer in cache.pages:
        layer.normal_()
    return cache


def measured(step: Callable[[int], Any], layers: int, device: str, seconds: float) -> float:
    """Seconds of a layer, the median of several turns over all of them."""

    def turn() -> None:
        for layer in range(layers):
            step(layer)

    turn()
    return median(timed(turn, seconds, 3, device)[0]) / layers


def decoding(rows: int, context: int, longest: int, device: str, seconds: float) -> dict[str, Any]:
    """On a GPU by a graph of as many layers as read 4 GB, as the generator runs it."""
    held = -(-context // PAGE)
    layer_bytes = 2 * KV_HEADS * HEAD_DIM * 2 * rows * context
    layers = max(min((4 << 30) // layer_bytes, 64), 2) if device == "cuda" else 1
    cache = build_cache(rows * held, layers, device)
    pages = torch.zeros(rows, -(-longest // PAGE), dtype=torch.int32, device=device)
    pages[:, :held] = torch.randperm(rows * held, device=device).view(rows, held)
    positions = torch.full((rows,), context - 1, device=device)
    attention = cache.backend.decoding(positions, pages, cache, HEADS)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

    def all_layers() -> None:
        for layer in range(layers):
            attention.attend(layer, q, k, v, RULE)

    all_layers()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        took = measured(lambda _: graph.replay(), 1, device, seconds) / layers
    else:
        took = measured(lambda layer: attention.attend(layer, q, k, v, RULE), layers, device, seconds)
    return {"case": "decode", "rows": rows, "tokens": context, "seconds": took, "GB/s": layer_bytes / took / 1e9}


def prefill(tokens: int, device: str, seconds: float) -> dict[str, Any]:
    layers = 4 if device == "cuda" else 1
    cache = build_cache(-(-tokens // PAGE), layers, device)
    row = SequenceState(Request(0, 0, [0] * tokens, 1), pages=list(range(cache.num_pages)))
    attention = cache.backend.for_step([SequenceWork(row, 0, tokens, True)], cache, HEADS)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    took = measured(lambda layer: attention.attend(layer, q, k, v, RULE), layers, device, seconds)
    flops = 2 * HEADS * HEAD_DIM * tokens * (tokens + 1)
    return {"case": "prefill", "rows": 1, "tokens": tokens, "seconds": took, "TFLOP/s": flops / took / 1e12}


COLUMNS = "case rows tokens us GB/s of_a_copy TFLOP/s"


def attention(
    device: Device | None = None,
    rows: Sequence[int] = (64, 256),
    contexts: Sequence[int] = (350, 900, 2048, 8192),
    prompts: Sequence[int] = (2048, 16384),
    longest: int = 16384,
    seconds: float = 0.5,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """The Triton attention over pages alone, with the heads of qwen3_0.6b: decoding in GB/s beside a copy, prefill in TFLOP/s.

    Decoding: one token of each row, all rows of one context; bytes are those of keys and values. As in a graph, the table has room for
    ``--longest`` tokens a row, so most of its splits are empty. Prefill: one prompt, the products of a causal mask. A case reads layer
    after layer, so that what it reads does not lie in the L2 cache. Seconds are those of ``attend``, which writes the new tokens' keys.
    ``--quick --device cpu``: a few rows and tokens in Triton's interpreter, to try the script.
    """
    device = device or found_device()
    if quick:
        rows, contexts, prompts, longest, seconds = [1], [70], [20], 600, 0.0
    if device == "cpu":  # before anything imports triton, whose interpreter wants the tests' repairs
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(ROOT / "tests" / "helpers"))
        import triton_device  # noqa: F401
    rates = {} if quick else machine_rates(1, ["bfloat16"], device)
    report: dict[str, Any] = {"machine": machine_facts(device), "rates": rates, "cases": []}
    print(table([], COLUMNS), flush=True)
    decodes = (decoding(number, context, max(longest, context), device, seconds) for number in rows for context in contexts)
    for case in chain(decodes, (prefill(tokens, device, seconds) for tokens in prompts)):
        case["us"] = 1e6 * case["seconds"]
        if rates and "GB/s" in case:
            case["of_a_copy"] = 1e9 * case["GB/s"] / rates["copy_bytes"]
        report["cases"].append(case)
        print(line(case, COLUMNS), flush=True)
    save(report, out)


# Agreement

WORSE = 1.5
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,  # peaked enough that near-ties are rare
    "pad_token_id": 0,
    "eos_token_id": 1,
}
WINDOW: dict[str, Any] = {"sliding_window": 256, "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
    "gemma2": {
        **WINDOW,
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**WINDOW, "architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3},
}
PROMPTS = (16,) * 4 + (200,) * 4 + (700,) * 4
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "initializer_range": 0.2,
}


def ours(path: Path, rows: list[list[int]], wanted: int, device: str) -> tuple[list[list[int]], Tensor, Tensor]:
    """Greedy tokens, and their log-probs from the generator and from one packed training forward, rows one after the other."""
    world = World(Launch(), torch.device(device), torch.distributed.HashStore(), 60.0)
    mesh = build_mesh(world, [0], Layout())
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, torch.bfloat16, device)
    load_pretrained(decoder, path)
    requests = [Request(i, i, row, wanted) for i, row in enumerate(rows)]
    sampling = SamplingConfig(temperature=0.0, ignore_eos=True)
    made = sorted(Generator(decoder, mesh, GenerationConfig(), ()).generate(requests, sampling, 0, 0), key=lambda c: c.row_id)
    tokens = [completion.token_ids for completion in made]
    texts = [torch.tensor(row + drawn, device=device) for row, drawn in zip(rows, tokens, strict=True)]
    packed, lengths = torch.cat(texts), [len(text) for text in texts]
    with torch.no_grad():
        hidden = decoder(packed, PackedAttention(lengths, device))
        trained, _ = token_log_probs(decoder, hidden, packed.roll(-1), 1.0)
    responses = [row[-wanted - 1 : -1] for row in trained.split(lengths)]
    return tokens, torch.cat([completion.log_probs for completion in made]).float().cpu(), torch.cat(responses).float().cpu()


def transformers_greedy(model: Any, rows: list[list[int]], wanted: int) -> list[list[int]]:
    """Rows of the same length in one batch, so that nothing is padded."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=wanted, do_sample=False, eos_token_id=-1, pad_token_id=0)
    drawn: list[list[int]] = []
    for length, some in groupby(rows, key=len):
        ids = torch.tensor(list(some), device=model.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        drawn += out[:, length:].tolist()
    return drawn


def transformers_log_probs(model: Any, rows: list[list[int]], tokens: list[list[int]]) -> Tensor:
    parts = []
    for row, drawn in zip(rows, tokens, strict=True):
        labels = torch.tensor(drawn, device=model.device)
        with torch.no_grad():
            logits = model(torch.tensor([row + drawn], device=model.device)).logits[0, len(row) - 1 : -1].float()
        parts.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].cpu())
    return torch.cat(parts)


def compare(path: Path, rows: list[list[int]], wanted: int, device: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    tokens, generated, trained = ours(path, rows, wanted, device)
    read: Any = AutoModelForCausalLM.from_pretrained
    rounded, exact = (read(path, dtype=dtype).to(device) for dtype in (torch.bfloat16, torch.float32))
    for parameter in exact.parameters():
        parameter.data = parameter.bfloat16().float()
    others = transformers_greedy(rounded, rows, wanted)
    theirs, truth = (transformers_log_probs(model, rows, tokens) for model in (rounded, exact))
    before = [next((i for i in range(wanted) if a[i] != b[i]), wanted) for a, b in zip(tokens, others, strict=True)]
    result: dict[str, Any] = {"rows": round(before.count(wanted) / len(rows), 3)}
    result["tokens"] = round(sum(before) / wanted / len(rows), 3)
    for name, log_probs in (("generator", generated), ("training", trained), ("transformers", theirs)):
        error = (log_probs - truth).abs()
        result[name] = {"mean": float(error.mean()), "max": float(error.max())}
    farthest = max(result[name]["mean"] for name in ("generator", "training"))
    return {**result, "worse": farthest > WORSE * result["transformers"]["mean"]}


def agreement(
    device: Device | None = None,
    families: Sequence[str] | None = None,
    tokens: int = 64,
    quick: bool = False,
    out: Path | None = None,
) -> int:
    """bf16 log-probs and greedy tokens of ours and of transformers on random models of several families, on one device.

    The truth is transformers in float32 with the same bf16 weights: for the tokens that our generator draws greedily, the log-probs of
    our generator, of our training forward and of transformers in bf16 are compared with it. Rounding alone separates them, so ours
    should be about as far from the truth as transformers in bf16: the exit status is 1 where the mean distance of ours is above
    ``WORSE`` times that. Greedy tokens are compared between ours and transformers in bf16; where the two best tokens are nearly as
    likely they may differ. ``--tokens``: drawn for each prompt. ``--quick``: tiny models, short prompts.
    """
    device = device or found_device()
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1")
    sizes = {**SIZES, **(TINY if quick else {})}
    generator = torch.Generator().manual_seed(0)
    lengths = [length // 10 + 1 for length in PROMPTS] if quick else PROMPTS
    rows = [torch.randint(2, sizes["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
    report: dict[str, Any] = {"machine": machine_facts(device), "families": {}}
    columns = "family rows tokens generator training transformers worse"
    print("Equal rows and tokens; distance from the truth in nats, mean and largest.\n")
    print(table([], columns), flush=True)
    for family in chosen(families, FAMILIES):
        with tempfile.TemporaryDirectory() as name:
            write_random_model(name, {**sizes, **FAMILIES[family], "model_type": family}, seed=3)
            try:
                found = compare(Path(name), rows, tokens, device)
            except (RuntimeError, ValueError) as error:  # the other families' figures are worth having
                found = {"error": str(error).splitlines()[0], "worse": True}
        report["families"][family] = found
        shown = {key: f"{its['mean']:.1e}, {its['max']:.1e}" for key, its in found.items() if isinstance(its, dict)}
        print(line({"family": family, **found, **shown}, columns), flush=True)
        save(report, out)
    return int(any(found["worse"] for found in report["families"].values()))


if __name__ == "__main__":
    run_parts(attention, agreement)
