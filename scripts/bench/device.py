"""How far log-probs on a device are from float32's, beside transformers': random models of several families.

python scripts/bench/device.py --out agreement.json
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import (
    Device,
    chosen,
    found_device,
    line,
    machine_facts,
    run_parts,
    save,
    table,
)
from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

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
    run_parts(agreement)
