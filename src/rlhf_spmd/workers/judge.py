"""A reward whose model is a judge: it generates a verdict on each response, and the number in it is the score (``reward.judge``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.controller import CallRecord
from rlhf_spmd.data.batch import Batch, decode_json
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.rewards.binding import Row
from rlhf_spmd.workers.reward import RewardWorker
from rlhf_spmd.workers.rollout_engine import build_generating


class JudgeWorker(RewardWorker):
    """Generates in its role's own layout. A row whose verdict cannot be read, or whose question is too long, has failed."""

    head = "lm"

    def build_more(self) -> None:
        super().build_more()
        self.verdicts: dict[int, str] = {}  # of the last call, by row id
        if self.serves("compute_reward"):
            self.generating = build_generating(self, None)

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        self.verdicts = {}

    def longest(self, context: int) -> int:
        config = self.config.generation
        pages = math.inf if config.num_pages is None else config.num_pages * config.page_size + 1
        return int(min(context, pages, math.inf if config.enable_chunked_prefill else config.max_num_batched_tokens))

    def score_by_model(self, batch: Batch) -> tuple[Tensor | None, dict[int, str]]:
        assert self.reward.judge is not None and self.retokenizer is not None and self.generating is not None
        judge, generating = self.reward.judge, self.generating
        questions, refused = self.retokenizer.read(batch) if len(batch) else ([], {})
        chosen = [self.reward.chooses(row) for row in decode_json(batch["row"])] if len(batch) else []
        asked = [i for i, chooses in enumerate(chosen) if chooses and i not in refused]
        ids = batch.row_ids.tolist()
        requests = [Request(ids[i], ids[i], questions[i], judge.max_response_length) for i in asked]
        sampling = SamplingConfig(temperature=judge.temperature, max_response_length=judge.max_response_length)
        with generating.generation_weights():
            completions = generating.generator.generate(requests, sampling, self.build.seed, 0, generating.tick)
        generating.report()
        given = torch.zeros(len(batch), dtype=torch.float64)
        texts = decode(self.retokenizer.own, [completion.token_ids for completion in completions])
        for i, verdict, completion in zip(asked, texts, completions, strict=True):
            self.verdicts[ids[i]] = verdict
            try:
                given[i] = judge.score(verdict, cut=completion.finish_reason == "length")
            except ValueError as error:
                refused[i] = str(error)
        return (given if self.mesh.last_stage and len(batch) else None), refused

    def sample(self, batch: Batch, i: int, text: Row, scores: Tensor) -> dict[str, Any]:
        return super().sample(batch, i, text, scores) | {"verdict": self.verdicts.get(int(batch.row_ids[i]))}
