"""What breaks each rule of ``generation``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.generation.config import SamplingConfig

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
]
