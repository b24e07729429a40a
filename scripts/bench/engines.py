"""One engine on one workload, in the Python environment that has it; ``generation.py`` starts it, once per engine and case.

The case names the engine, the model's directory (without weights in it they are drawn on the device), device, dtype, threads, mode
and rows (prompt ids and a length each; end-of-sequence is ignored). Engines return tokens only; ours also returns the log-prob of
each, at no extra price to the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from measure import device_kernels, join_world, peak_mib, run_parts, timed
from shapes import fill, has_weights, peer_model

Rows = list[tuple[list[int], int]]  # prompt ids, tokens wanted
Generate = Callable[[Rows], list[list[int]]]


def longest_row(case: dict[str, Any]) -> int:
    return max(len(prompt) + n for prompt, n in case["rows"])


def start_ours(case: dict[str, Any]) -> Generate:
    """One rank, or under torchrun one replica per rank, each with its share of the rows (balanced by tokens)."""
    import torch

    from rlhf_spmd.data.balance import partition_by_tokens
    from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
    from rlhf_spmd.kernels import choose_ops
    from rlhf_spmd.models.decoder import Decoder
    from rlhf_spmd.models.stored import read_spec
    from rlhf_spmd.models.weights import load_pretrained
    from rlhf_spmd.parallel.layout import Layout
    from rlhf_spmd.parallel.mesh import build_mesh

    world = join_world(case["device"])
    torch.set_num_threads(case["threads"] // world.size)
    mesh = build_mesh(world, range(world.size), Layout(dp=world.size))
    dtype, exact = getattr(torch, case["dtype"]), case["settings"].get("reuse_rollout_log_probs") is True
    ops = choose_ops(dtype, world.device, batch_invariant_gpu=exact)
    decoder = Decoder(read_spec(case["path"]), "lm", 0, 1, mesh.tp, dtype, world.device, ops=ops)
    load_pretrained(decoder, case["path"]) if has_weights(case["path"]) else fill(decoder)
    generator = Generator(decoder, mesh, GenerationConfig(**case["settings"]), ())
    sampling = SamplingConfig(temperature=0.0 if case["mode"] == "greedy" else 1.0, ignore_eos=True)

    def generate(rows: Rows) -> list[list[int]]:
        world.all.barrier("bench")
        parts = partition_by_tokens([len(prompt) + n for prompt, n in rows], world.size)
        mine = [Request(i, i, *rows[i]) for i in range(len(rows)) if parts[i] == world.rank]
        made = {done.row_id: done.token_ids for done in generator.generate(mine, sampling, 0, 0)}
        world.all.barrier("bench")
        return [made.get(i, []) for i in range(len(rows))]

    return generate


def transformers_model(case: dict[str, Any]) -> Any:
    """With the settings that ours chooses for itself on CPUs: float32 products through oneDNN, freed memory kept."""
    import ctypes

    import torch

    from rlhf_spmd.kernels import has_amx

    torch.set_num_threads(case["threads"])
    if case["device"] == "cpu":
        torch.set_float32_matmul_precision("highest" if has_amx() else "medium")
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 2**31 - 1)
    return peer_model(case["path"], case["dtype"], case["device"]).eval()


def start_transformers(case: dict[str, Any]) -> Generate:
    """One static batch, padded on the left; it ends when its longest row does, and the rows are then cut."""
    import torch
    from transformers import GenerationConfig

    model = transformers_model(case)

    def generate(rows: Rows) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in rows)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows], device=model.device)
        config = GenerationConfig(
            max_new_tokens=max(n for _, n in rows),
            do_sample=case["mode"] == "sampled",
            top_k=0,
            eos_token_id=-1,  # with None generate takes the model's own
            pad_token_id=0,
        )
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return [line[width : width + n].tolist() for line, (_, n) in zip(out, rows, strict=True)]

    return generate


def start_transformers_cb(case: dict[str, Any]) -> Generate:
    """Continuous batching, with a length for each request and its own choice of attention; on CPUs a cache that holds all rows, on
    GPUs of the size that it chooses."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = transformers_model(case)
    config = GenerationConfig(
        max_new_tokens=longest_row(case), do_sample=case["mode"] == "sampled", top_k=0, eos_token_id=-1, pad_token_id=0
    )
    pages = sum(-(-(len(prompt) + n) // 256) for prompt, n in case["rows"])
    blocks = pages + 8 if case["device"] == "cpu" else None
    settings = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=case["cb_batch_tokens"] or None)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
    manager.start()

    def generate(rows: Rows) -> list[list[int]]:
        names = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in rows]
        made: dict[str, list[int]] = {}
        while len(made) < len(rows):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert not result.error, result.error
                made[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' generation thread ended")
        return [made[name] for name in names]

    return generate


def start_vllm(case: dict[str, Any]) -> Generate:
    import torch

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    torch.set_num_threads(case["threads"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=case["path"],
        skip_tokenizer_init=True,
        dtype=case["dtype"],
        load_format="auto" if has_weights(case["path"]) else "dummy",
        max_model_len=longest_row(case) + 1,
        max_num_seqs=max(len(case["rows"]), 8),
        enable_prefix_caching=False,  # repetitions bring the same prompts
    )

    def generate(rows: Rows) -> list[list[int]]:
        temperature = 0.0 if case["mode"] == "greedy" else 1.0
        wanted = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in rows]
        done = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in rows], wanted, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    return generate


def start_openvino(case: dict[str, Any]) -> Generate:
    """Cache in the model's dtype (its default on CPUs is 8 bits), so that it does the same work."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    kind = {"float32": "f32", "bfloat16": "bf16"}[case["dtype"]]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 256, 8192
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind, "INFERENCE_NUM_THREADS": case["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(case["exported"], scheduler, "CPU", properties)

    def config(tokens: int) -> Any:
        made = genai.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.eos_token_id = tokens, True, -1
        if case["mode"] == "sampled":
            made.do_sample, made.temperature, made.top_p, made.top_k = True, 1.0, 1.0, 2**31 - 1
        return made

    def generate(rows: Rows) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in rows]
        return [list(done.m_generation_ids[0]) for done in pipeline.generate(prompts, [config(n) for _, n in rows])]

    return generate


def export_openvino(**case: Any) -> dict[str, float]:
    """Write the model in OpenVINO's format, weights baked in: what a trainer would do after every update."""
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(case["path"], export=True, compile=False, load_in_8bit=False)
    model.save_pretrained(case["exported"])
    return {"seconds": round(time.time() - case["spawned"], 2)}


STARTS = {
    "ours": start_ours,
    "ours_2_ranks": start_ours,
    "transformers": start_transformers,
    "transformers_cb": start_transformers_cb,
    "vllm": start_vllm,
    "openvino": start_openvino,
}


def measure_engine(**case: Any) -> dict[str, Any] | None:
    """Start-up seconds (from the start of the process to the first token of a small prompt), wall and CPU seconds of each repetition,
    peak memory (resident, on GPUs that of all tensors), the tokens of the first repetition, and the rows that it made too short."""
    rows = [(prompt, n) for prompt, n in case["rows"]]
    generate = STARTS[case["engine"]](case)
    generate([(rows[0][0][:16], 1)])
    startup = time.time() - case["spawned"]
    generate([(prompt, min(n, 8)) for prompt, n in rows])
    wall, cpu, made = timed(lambda: generate(rows), case["seconds"], case["least"], case["device"])
    figures = {"startup_s": round(startup, 2), "wall_s": wall, "cpu_s": cpu, "peak_mib": round(peak_mib(case["device"]), 1)}
    figures["tokens"] = made[0]
    figures["short"] = [i for i, (got, (_, n)) in enumerate(zip(made[0], rows, strict=True)) if len(got) != n]
    if case["engine"] == "ours" and case["device"] == "cuda":
        figures["kernels"] = device_kernels(lambda: generate([(prompt, min(n, 32)) for prompt, n in rows]))
    return over_ranks(figures) if case["engine"] == "ours_2_ranks" else figures


def over_ranks(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Rank 0: the slowest rank's seconds, the sum of CPU seconds and of memory, and every rank's rows."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, figures)
    every = {key: [part[key] for part in parts] for key in figures}
    if dist.get_rank():
        return None
    return {
        "startup_s": max(every["startup_s"]),
        "wall_s": [max(times) for times in zip(*every["wall_s"], strict=False)],
        "cpu_s": [sum(times) for times in zip(*every["cpu_s"], strict=False)],
        "peak_mib": sum(every["peak_mib"]),
        "tokens": [next(row for row in rows if row) for rows in zip(*every["tokens"], strict=True)],
        "short": [],
    }


if __name__ == "__main__":
    run_parts()
