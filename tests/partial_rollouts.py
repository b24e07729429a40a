"""Settings of a run with prompts in flight."""

from __future__ import annotations

IN_FLIGHT = 16  # prompts; a step takes half of them

PARTIAL = (
    f"data.gen_batch_size={IN_FLIGHT}",
    "models.actor.generation.max_num_seqs=8",
    "sampling.logit_bias={0: 2.0}",  # the end of the text is likelier: responses of many lengths
    "run.save_freq=3",
    "run.keep_checkpoints=3",
)
