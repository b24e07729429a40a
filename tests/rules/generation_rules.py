"""What breaks each rule of ``generation``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig

CASES = [
    (
        lambda: check_tree(SamplingConfig(temperature=0, n=4), "sampling"),
        "sampling.temperature=0, sampling.n=4: greedy responses to a prompt are all the same; set n=1, or a temperature above 0",
    ),
    (
        lambda: check_tree(SamplingConfig(min_response_length=8, max_response_length=4), "sampling"),
        "sampling.min_response_length=8, sampling.max_response_length=4: no response could be as long; lower the first or raise the "
        "second",
    ),
    (
        lambda: check_tree(SamplingConfig(temperature=1e-9), "sampling"),
        "sampling.temperature=1e-09: must be 0 (greedy) or at least 0.001, at most 1000000.0, since scaled logits overflow "
        "elsewhere; set it to 1 for the model's own distribution",
    ),
    (
        lambda: check_tree(SamplingConfig(allowed_token_ids=[]), "sampling"),
        "sampling.allowed_token_ids=[]: no token is left to draw; leave it out for all",
    ),
    (
        lambda: check_tree(SamplingConfig(stop=[".", ""]), "sampling"),
        "sampling.stop=['.', '']: a stop string must not be empty; leave the empty one out",
    ),
    (
        lambda: check_tree(GenerationConfig(max_num_seqs=9, max_num_batched_tokens=5), "generation"),
        "generation.max_num_batched_tokens=5, generation.max_num_seqs=9: every row in flight computes at least one token in a step; "
        "raise the first or lower the second",
    ),
]
