"""What breaks each rule of ``inference`` and of the programs over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.inference.inference_program import read_config
from rlhf_spmd.inference.sampling_params import SamplingParams
from rlhf_spmd.serve import ServeConfig


def settings(schema: type[Any], *overrides: str) -> Callable[[], Any]:
    return partial(read_config, schema, None, ["model.path=m", *overrides])


generate = partial(settings, GenerateConfig, "data.path=d", "out=o")
serve = partial(settings, ServeConfig)
CASES: list[tuple[Callable[[], Any], str]] = [
    *(
        (generate(setting), f"{setting}: nothing is trained here; leave it out")
        for setting in (
            *("generation.reshard_method=none", "generation.buffers=keep", "layout.zero=2"),
            *("generation.reuse_rollout_log_probs=true", "generation.kv_cache=keep"),
        )
    ),
    *(
        (generate(setting), f"{setting}: {why}; leave it out")
        for setting, why in (
            ("generation.pp=2", "here layout.pp says it"),
            ("generation.tp=2", "here layout.tp says it"),
            ("layout.cp=2", "generation does not split sequences"),
            ("layout.ep=2", "generation shares experts over layout.tp by generation.ep"),
            ("layout.vpp=2", "generation does not interleave stages"),
            ("layout.sequence_parallel=true", "generation runs without it"),
        )
    ),
    (
        generate("keep=3", "sampling.n=2", "reward.function=math"),
        "keep=3, sampling.n=2: a prompt has no more responses than the second; lower the first or raise the second",
    ),
    (
        generate("keep=best"),
        "keep=best, reward.function=null: responses are chosen by score; give reward.function",
    ),
    (
        generate("keep=pairs", "reward.function=math"),
        "keep=pairs, sampling.n=1: a pair is two responses to a prompt; set sampling.n to at least 2",
    ),
    (serve("layout.pp=2"), "layout.pp=2: a model that is asked has no stages; set layout.tp instead"),
    (
        lambda: SamplingParams(min_tokens=9, max_tokens=3),
        "sampling_params.min_tokens=9, sampling_params.max_tokens=3: no response could be as long; lower the first or raise the second",
    ),
]
