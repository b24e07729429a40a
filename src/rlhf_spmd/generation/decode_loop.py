"""Several tokens of each row between two looks of the host: a step of decoding that reads and writes device tensors only.

All that a step needs lies at fixed addresses, and it ends by writing what the next one starts from: the last tokens, their positions,
the number of the step. So a step can be captured as a CUDA graph, one for each size of batch, and replayed. Batches are then
padded with copies of their first row, which compute and write the same. A row that has come to its limit stays at its last
position, whose key and value nobody reads any more (a prompt's last token is computed by each row for itself). The host
sees the tokens after the last step and drops what was drawn after a stop.

Draws, tokens and log-probs are those of :class:`Runner`, row by row: with backends that are exact they have its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.kv_cache import on_device
from rlhf_spmd.generation.runner import NOT_FINITE, Runner
from rlhf_spmd.generation.sampler import row_keys, sample, uniform_on_device
from rlhf_spmd.generation.scheduler import Step, Work
from rlhf_spmd.generation.sequence import Row
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of


def padded_size(num_rows: int) -> int:
    """Rows of the graph that serves so many: powers of two up to 16, then multiples of 16."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 16 else -(-num_rows // 16) * 16


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


class DecodeLoop:
    """``most`` steps at a time for up to ``max_rows`` rows of ``runner``, of at most ``longest`` tokens. ``graphs``: captured, where
    that can be, see :meth:`can_capture`."""

    def __init__(self, runner: Runner, most: int, max_rows: int, longest: int, graphs: bool) -> None:
        self.runner, self.most, self.graphs = runner, most, graphs and self.can_capture(runner)
        self.pads = self.graphs
        size, device, page_size = padded_size(max_rows), runner.device, runner.cache.page_size
        # positions of the last tokens, where they must end, lengths of the prompts, keys of the draws
        self.state = torch.zeros(4, size, dtype=torch.int64, device=device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.table = torch.zeros(size, -(-longest // page_size), dtype=torch.int32, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(most, size, dtype=torch.int64, device=device)
        shape = len(runner.log_probs), most, size
        self.log_probs = torch.zeros(shape, dtype=runner.log_probs.dtype, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._under_way: list[int] = []  # tokens to come of each row

    @staticmethod
    def serves(runner: Runner) -> bool:
        """Whether the device alone can draw: no rules that the host applies, no drafts, no stages, no likeliest tokens, no rows
        that draw otherwise than the others."""
        draws = runner.draws
        alone = len(runner.samplings) == 1 and runner.decoder.pp == 1
        return alone and not (draws.rules or draws.speculates or draws.sampling.logprobs)

    @staticmethod
    def can_capture(runner: Runner) -> bool:
        """top_p and experts look at numbers on the host; collectives and torch's paged attention take other memory each time."""
        plain = runner.samplings[0].top_p == 1.0 and runner.decoder.spec.experts is None and runner.decoder.tp.size == 1
        return plain and runner.device.type == "cuda" and runner.cache.backend.capturable

    def start(self, work: Sequence[Work], steps: int) -> None:
        """``steps`` tokens, or as many as its limit leaves, of each row of ``work``, whose pages have room for them.

        Collective over tp: every rank of it must call, in program order.
        """
        runner, rows = self.runner, [item.row for item in work]
        size = padded_size(len(rows)) if self.pads else len(rows)
        padded = rows + [rows[0]] * (size - len(rows))
        index = np.array([row.index for row in padded])
        state = np.array([(row.length - 1, row.limit - 2, row.prompt_length) for row in padded]).T
        keys = row_keys(runner.draws.seed, runner.steps[index], runner.row_ids[index]).view(np.int64)
        width = max(len(row.pages) for row in rows)
        if self.graphs:  # few widths, so few graphs; a much wider table than the rows need would cost programs that do nothing
            width = min(1 << (width - 1).bit_length(), self.table.shape[1])
        table = np.zeros((size, width), dtype=np.int32)
        for line, row in zip(table, padded, strict=True):
            line[: len(row.pages)] = row.pages
        self.state[:, :size] = on_device(np.concatenate([state, keys[None]]), runner.device)
        self.table[:size, :width] = on_device(table, runner.device)
        places = on_device(index * runner.width + state[0], runner.device)
        self.ids[:size] = runner.tokens.index_select(0, places)
        self.number.zero_()
        for _ in range(steps):
            if self.graphs:
                self._graph(size, width).replay()
            else:
                self._step(size, width)
        self._under_way = [min(steps, row.limit - row.length) for row in rows]
        self._keep(rows)

    def finish(self, work: Sequence[Work]) -> tuple[Step, list[int]]:
        """The step as it turned out, each row having guessed all of its tokens but the last, and its tokens, row by row.

        Raises NotFinite.
        """
        counts, self._under_way = self._under_way, []
        step, drawn = Step(), []
        by_row = self.drawn[: max(counts), : len(counts)].t().tolist()
        for item, count, tokens in zip(work, counts, by_row, strict=True):
            item.row.draft = tokens[: count - 1]
            step.work.append(item._replace(num_tokens=count))
            drawn += self.runner.checked(tokens[:count], [item.row] * count)
        return step, drawn

    def _keep(self, rows: Sequence[Row]) -> None:
        """Tokens and log-probs to where the runner has them."""
        runner = self.runner
        numbers = np.arange(max(self._under_way))
        real = (numbers[:, None] < np.array(self._under_way)).reshape(-1)

        def places(width: int, firsts: Sequence[int]) -> Tensor:
            at = np.array([row.index for row in rows]) * width + np.array(firsts) + numbers[:, None]
            return on_device(at.reshape(-1)[real], runner.device)

        chosen = on_device(np.flatnonzero(real), runner.device)
        tokens = self.drawn[: len(numbers), : len(rows)].reshape(-1).index_select(0, chosen)
        runner.tokens.index_copy_(0, places(runner.width, [row.length for row in rows]), tokens)
        at = places(runner.log_probs.shape[2], [row.num_new for row in rows])
        for kept, some in zip(runner.log_probs, self.log_probs, strict=True):
            kept.view(-1).index_copy_(0, at, some[: len(numbers), : len(rows)].reshape(-1).index_select(0, chosen))

    def _step(self, size: int, width: int) -> None:
        runner = self.runner
        decoder, sampling = runner.decoder, runner.samplings[0]
        positions, lasts, prompts, keys = self.state[:, :size]
        ids = self.ids[:size]
        attention = runner.cache.backend.decoding(positions, self.table[:size, :width], runner.cache, runner.num_heads)
        logits = local_logits(decoder, decoder(ids, attention))
        drawn = sample(gather_logits(decoder, logits), sampling, uniform_on_device(keys, positions + 1 - prompts))
        if drawn.is_cuda:  # as in Runner
            decoder.tp.broadcast(drawn, 0, "generation:tokens")
        for kept, temperature in runner.notes(self.log_probs, sampling):
            log_probs = log_probs_of(decoder, logits, drawn, temperature)
            for line in kept:
                line[:, :size].index_copy_(0, self.number, log_probs[None])
        self.drawn[:, :size].index_copy_(0, self.number, drawn.masked_fill(~log_probs.isfinite(), NOT_FINITE)[None])
        ids.copy_(drawn)
        positions += positions < lasts
        self.number += 1

    def _graph(self, size: int, width: int) -> torch.cuda.CUDAGraph:
        """Captured when first wanted, after a step that compiles kernels and fills caches and is then undone."""
        if (size, width) not in self._graphs:
            changing = (self.ids, self.state, self.number)
            before = [tensor.clone() for tensor in changing]
            stream = capture_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size, width)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._step(size, width)
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
            self._graphs[size, width] = graph
        return self._graphs[size, width]
