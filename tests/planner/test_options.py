"""What a search may choose from."""

from __future__ import annotations

from itertools import pairwise

from places import ROOT
from rlhf_spmd import plan
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.machine import ClusterConfig
from rlhf_spmd.planner.planning import ProblemBuilder

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def test_rows_in_flight_fill_the_cache() -> None:
    """Generation may have more than half as many rows in flight as fit: each number is at most twice the one before."""
    settings = ["data.max_prompt_length=1024", "data.max_response_length=1024", "data.train_batch_size=1024"]
    for role in ("actor", "critic"):
        settings += [f"models.{role}.spec.{key}={value}" for key, value in LLAMA_7B.items()]
    request = plan.read_request(str(ROOT / "configs" / "quickstart_ppo.yaml"), settings)
    machine = ClusterConfig(nodes=1, gpu="a100").machine()
    problem = ProblemBuilder(request.calls, machine, [FormulaTimes(machine)], 16384).problem()
    (generate,) = (call for call in problem.calls if call.name == "actor.generate_sequences")
    tried = sorted({option.settings.max_num_seqs for option in generate.options if option.size == 8})
    assert tried[-1] >= 512 and all(more <= 2 * fewer for fewer, more in pairwise(tried)), tried
