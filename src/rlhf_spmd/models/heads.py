"""Results of the last stage: log-probs, entropies, logits and values, vocabulary-parallel.

Training never holds logits [T, V]: chunks of rows are computed, reduced to a few numbers per token, dropped, and computed
again in the backward pass. At no time are there more than a chunk's logits [rows, V / t], twice where an entropy is computed or
has a gradient. The backward pass of a large vocabulary goes by blocks of it, so that wide copies of its weight and its gradient exist
a block at a time; that of a small one finds the logits of the last rows where they are, if its arithmetic leaves them (``Ops``).
Generation reduces its logits with the same functions, so its log-probs are bit-equal to training's.

Each rank reduces its slice of the vocabulary by itself (maximum, sum of exponentials, the label's logit); one gather of those
numbers, combined in rank order, gives every rank of the tp group the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.ops import LogitTransform
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.collectives import Group


def _combine(statistics: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and log-sum-exps [T] from this rank's ``statistics`` [4, T]; the same bits on every rank.

    Collective over the group: every rank of it must call, in program order.
    """
    if group.size == 1:
        largest, total, label, weighted = statistics
        log_total = total.log()
        return (label - largest) - log_total, log_total - weighted / total, largest + log_total
    parts = torch.stack(group.all_gather(statistics, "log_probs"))
    maxima, sums, label_logits, weighted = parts.unbind(1)
    maximum = maxima.amax(0)
    total = torch.zeros_like(maximum)
    mean_shifted = torch.zeros_like(maximum)
    label = torch.zeros_like(maximum)
    for rank in range(len(parts)):
        offset = maxima[rank] - maximum
        scale = offset.exp()
        total = total + sums[rank] * scale
        mean_shifted = mean_shifted + (weighted[rank] + sums[rank] * offset) * scale
        label = label + label_logits[rank]
    log_total = total.log()
    return (label - maximum) - log_total, log_total - mean_shifted / total, maximum + log_total


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        decoder: Decoder,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        entropy: bool,
        chunk_rows: int,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        ops = decoder.ops
        transform = LogitTransform(temperature, decoder.spec.logit_softcap)
        tokens, vocab = hidden.shape[0], weight.shape[0]
        block_rows = min(ops.backward_rows, tokens)
        whole_vocabulary = chunk_rows >= block_rows or tokens * vocab <= ops.small_head
        columns = chunk_rows * vocab // max(block_rows, 1)  # a replica may have no tokens
        blocks = block_rows, max(columns - columns % ops.head_columns, ops.head_columns)
        ctx.tile = (chunk_rows, vocab) if whole_vocabulary else blocks
        first_kept = tokens - (ops.small_head // vocab if keeps_logits and whole_vocabulary and ops.keeps_logits else 0)
        ctx.kept = {}  # logits by the first row of their chunk
        parts = []
        for rows in _chunks(tokens, chunk_rows):
            logits = ops.transform_logits(ops.logits(hidden[rows], weight), transform)
            parts.append(ops.logit_statistics(logits, labels[rows], decoder.vocab_range[0], entropy, transform))
            if rows.start >= first_kept:
                ctx.kept[rows.start] = logits
            del logits  # before the next chunk's are made
        log_probs, entropies, log_z = _combine(torch.cat(parts, 1), decoder.tp)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropies)
        ctx.decoder = decoder
        ctx.transform = transform
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient: None, not zeros
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropies = ctx.saved_tensors
        ops, first = ctx.decoder.ops, ctx.decoder.vocab_range[0]
        num_rows, num_columns = ctx.tile
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden, dtype=log_z.dtype, memory_format=torch.contiguous_format)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        # with one chunk of rows nothing is added to the weight's gradient: it needs no wider dtype
        gradient_dtype = weight.dtype if hidden.shape[0] <= num_rows and not ops.wide_head else log_z.dtype
        for block in _chunks(weight.shape[0], num_columns):
            weight_block = weight[block].to(log_z.dtype) if ops.wide_head else weight[block]
            grad_block = _gradient_block(grad_weight, block, gradient_dtype)
            for rows in _chunks(hidden.shape[0], num_rows):
                logits = ctx.kept.pop(rows.start, None)
                if logits is None:
                    logits = ops.transform_logits(ops.logits(hidden[rows], weight[block]), ctx.transform)
                entropy = None if grad_entropy is None else (entropies[rows, None], grad_entropy[rows, None])
                numbers = labels[rows], first + block.start, log_z[rows, None], grad_log_probs[rows, None], entropy
                grad = ops.head_gradients(logits, *numbers, ctx.transform, weight_block.dtype)
                ops.sum_product(grad_hidden[rows], grad, weight_block, block.start == 0)
                if grad_block is not None:
                    ops.sum_product(grad_block, grad.t(), hidden[rows].to(grad.dtype), rows.start == 0)
                del logits, grad  # before the next chunk's are made
            if grad_weight is not None and grad_block is not None and grad_block.dtype != weight.dtype:
                grad_weight[block] = grad_block
            del grad_block  # before the next block's is made
        # every rank saw its slice of the vocabulary only
        grad_hidden = ctx.decoder.tp.all_reduce(grad_hidden, "head_grad").to(hidden.dtype)
        return None, grad_hidden, grad_weight, *[None] * 5


def _gradient_block(grad_weight: Tensor | None, block: slice, dtype: torch.dtype) -> Tensor | None:
    """Return where the gradient of a block of the weight is summed: in ``grad_weight``, or, for another ``dtype``, in a new tensor."""
    part = None if grad_weight is None else grad_weight[block]
    return part if part is None or part.dtype == dtype else torch.empty_like(part, dtype=dtype)


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for first in range(0, max(num_rows, 1), chunk_rows):
        yield slice(first, min(first + chunk_rows, num_rows))


def token_log_probs(
    decoder: Decoder,
    hidden: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(labels [T]) after hidden [T, hidden] at ``temperature``, in nats, and the entropies of these distributions, or None
    without ``entropy``.

    Labels are token ids (there is no ignored label). fp32 (fp64 for an fp64 model), [T] each; the same bits on every tp rank.
    Differentiable in ``hidden`` and the head's weight, mostly by recomputation, ``chunk_rows`` tokens at a time.
    Collective over tp: every rank of it must call, in program order, with equal hidden and labels.
    """
    _check_temperature(temperature)
    weight = decoder.head_weight
    if chunk_rows is None:
        chunk_rows = max(decoder.ops.chunk_logits // weight.shape[0], 64)
    settings = float(temperature), entropy, chunk_rows, torch.is_grad_enabled()
    log_probs, entropies = _TokenLogProbs.apply(decoder, _scaled(decoder, hidden), weight, labels, *settings)
    return log_probs, entropies if entropy else None


def _scaled(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Return what the head multiplies: with its scale, whose product with the logits would round as many numbers again."""
    return hidden if decoder.spec.logit_scale == 1 else hidden * decoder.spec.logit_scale


def local_logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Return this rank's slice of the logits [T, V_local] of hidden [T, hidden], fp32 (fp64 for fp64). No gradient: for generation."""
    with torch.no_grad():
        logits = decoder.ops.logits(_scaled(decoder, hidden), decoder.head_weight)
        softcap = decoder.spec.logit_softcap
        return logits if softcap is None else decoder.ops.cap_logits(logits, softcap)


def gather_logits(decoder: Decoder, logits: Tensor) -> Tensor:
    """Return all logits [T, V] on every rank, from the slices [T, V_local].

    Collective over tp: every rank of it must call, in program order.
    """
    tp = decoder.tp
    if tp.size == 1:
        return logits
    vocab = decoder.spec.vocab_size
    widest = -(-vocab // tp.size)  # all_gather needs equal shapes
    slices = tp.all_gather(F.pad(logits, (0, widest - logits.shape[1])), "logits")
    widths = [(rank + 1) * vocab // tp.size - rank * vocab // tp.size for rank in range(tp.size)]
    return torch.cat([part[:, :width] for part, width in zip(slices, widths, strict=True)], 1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


def log_probs_of(decoder: Decoder, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log p(labels) from this rank's logits [T, V_local] (:func:`local_logits`), by :func:`token_log_probs`'s arithmetic: of one
    label per token [T] -> [T], or of several [T, k] -> [T, k], for which the logits are reduced once.

    Collective over tp: every rank of it must call, in program order.
    """
    _check_temperature(temperature)
    ops, first = decoder.ops, decoder.vocab_range[0]
    several_labels = labels.dim() == 2
    with torch.no_grad():
        unchanged = temperature == 1.0 and ops.keeps_logits
        scaled = logits if unchanged else _tempered(logits.clone(), temperature)
        statistics = ops.logit_statistics(scaled, labels[:, 0] if several_labels else labels, first, False)
        if several_labels:
            statistics = statistics[..., None].repeat(1, 1, labels.shape[1])
            outside = (labels < first) | (labels >= first + logits.shape[1])
            label_logits = logits.gather(1, (labels - first).masked_fill_(outside, 0)).masked_fill_(outside, 0)
            statistics[2] = _tempered(label_logits, temperature)
        return _combine(statistics.flatten(1), decoder.tp)[0].view(labels.shape)


def values(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Return the values [T] of hidden [T, hidden] by the value head, fp32 (fp64 for fp64), equal on every tp rank; differentiable."""
    weight = decoder.value_weight[0]
    if hidden.dtype not in (torch.float32, torch.float64):
        hidden, weight = hidden.float(), weight.float()
    return (hidden * weight).sum(-1)  # not a matrix product: one column would not be exact


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0 for log-probs; greedy decoding reports them at 1")
