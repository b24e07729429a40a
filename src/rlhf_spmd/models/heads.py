"""What comes out of the last stage: log-probs, entropies, logits and values, vocabulary-parallel.

Training never holds logits [T, V]: chunks of rows are computed, reduced to a few numbers per token, dropped, and computed
again in the backward pass. Generation reduces its logits with the same functions, so its log-probs are bit-equal to training's.

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

from rlhf_spmd.models.attention import exact_rows, pad_rows
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.collectives import Group

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits per chunk: about a cache on CPU, 256 MiB on GPU


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T in fp32 (fp64 for fp64), with enough rows in the product to be exact."""
    rows = hidden.shape[0]
    hidden = pad_rows(hidden, exact_rows(weight.numel()))
    if hidden.dtype in (torch.float32, torch.float64):
        return F.linear(hidden, weight)[:rows]
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)[:rows]
    return F.linear(hidden.float(), weight.float())[:rows]


def _local_statistics(logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
    """[4, T]: maximum, sum of exp(l - max), the label's logit (0 where it lies elsewhere), sum of exp(l - max) * (l - max)
    (0 unless ``entropy``) over this rank's logits [T, V_local], which are overwritten."""
    local = labels - first
    inside = (local >= 0) & (local < logits.shape[1])
    at_label = logits.gather(1, local.masked_fill(~inside, 0)[:, None])[:, 0].masked_fill(~inside, 0)
    maximum = logits.amax(-1)
    shifted = logits.sub_(maximum[:, None])
    exponentials = shifted.exp()
    weighted = exponentials.mul(shifted).sum(-1) if entropy else torch.zeros_like(maximum)
    return torch.stack([maximum, exponentials.sum(-1), at_label, weighted])


def _combine(statistics: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Local statistics [4, T] -> (log_probs [T], entropy [T], logsumexp [T]), the same bits on every rank.

    Collective over the group: every rank of it must call, in program order.
    """
    parts = torch.stack(group.all_gather(statistics, "log_probs")) if group.size > 1 else statistics[None]
    maxima, sums, at_label, weighted = parts.unbind(1)
    maximum = maxima.amax(0)
    total = torch.zeros_like(maximum)
    mean_shifted = torch.zeros_like(maximum)
    label = torch.zeros_like(maximum)
    for rank in range(len(parts)):
        offset = maxima[rank] - maximum
        scale = offset.exp()
        total = total + sums[rank] * scale
        mean_shifted = mean_shifted + (weighted[rank] + sums[rank] * offset) * scale
        label = label + at_label[rank]
    log_total = total.log()
    return (label - maximum) - log_total, log_total - mean_shifted / total, maximum + log_total


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        first: int,
        group: Group,
        temperature: float,
        entropy: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for rows in _chunks(hidden.shape[0], chunk_rows):
            logits = _project(hidden[rows], weight)
            parts.append(_local_statistics(_tempered(logits, temperature), labels[rows], first, entropy))
        log_probs, entropies, log_z = _combine(torch.cat(parts, 1), group)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropies)
        ctx.settings = (first, group, temperature, chunk_rows)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient: None, not zeros
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropies = ctx.saved_tensors
        first, group, temperature, chunk_rows = ctx.settings
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        wide = weight.to(log_z.dtype) if hidden.device.type == "cpu" else weight
        grad_hidden = torch.empty_like(hidden, dtype=log_z.dtype)
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden.shape[0], chunk_rows):
            log_p = _tempered(_project(hidden[rows], weight), temperature).sub_(log_z[rows, None])
            grad = log_p.exp().neg_()
            if grad_entropy is not None:
                grad *= (log_p.add_(entropies[rows, None])).mul_(grad_entropy[rows, None]).add_(grad_log_probs[rows, None])
            else:
                grad *= grad_log_probs[rows, None]
            local = labels[rows] - first
            inside = (local >= 0) & (local < grad.shape[1])
            at_label = grad_log_probs[rows].masked_fill(~inside, 0)
            grad.scatter_add_(1, local.masked_fill(~inside, 0)[:, None], at_label[:, None])
            grad = _tempered(grad, temperature).to(wide.dtype)
            grad_hidden[rows] = torch.mm(grad, wide).to(log_z.dtype)
            if grad_weight is not None:
                grad_weight += torch.mm(grad.t(), hidden[rows].to(wide.dtype))
        # every rank saw its slice of the vocabulary only
        grad_hidden = group.all_reduce(grad_hidden, "head_grad").to(hidden.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


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
    """log p(labels [T]) after hidden [T, hidden] at ``temperature``, in nats, and with ``entropy`` that distribution's entropy.

    Labels are token ids (there is no ignored label). fp32 (fp64 for an fp64 model), [T] each; the same bits on every tp rank.
    Differentiable in ``hidden`` and the head's weight by recomputation, ``chunk_rows`` tokens at a time.
    Collective over tp: every rank of it must call, in program order, with equal hidden and labels.
    """
    _check_temperature(temperature)
    weight = decoder.head_weight
    if chunk_rows is None:
        chunk_rows = max(CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26) // weight.shape[0], 64)
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, weight, labels, decoder.vocab_range[0], decoder.tp, float(temperature), entropy, chunk_rows
    )
    return log_probs, entropies if entropy else None


def local_logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """This rank's slice of the logits [T, V_local] of hidden [T, hidden], fp32 (fp64 for fp64). No gradient: for generation."""
    with torch.no_grad():
        return _project(hidden, decoder.head_weight)


def gather_logits(decoder: Decoder, logits: Tensor) -> Tensor:
    """Slices [T, V_local] -> all logits [T, V] on every rank.

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


def logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """All logits [T, V] of hidden [T, hidden]. Collective over tp: every rank of it must call, in program order."""
    return gather_logits(decoder, local_logits(decoder, hidden))


def log_probs_of(decoder: Decoder, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(labels [T]) [T] from this rank's logits [T, V_local] (:func:`local_logits`): :func:`token_log_probs`'s arithmetic.

    Collective over tp: every rank of it must call, in program order.
    """
    _check_temperature(temperature)
    with torch.no_grad():
        scaled = _tempered(logits.clone(), temperature)
        return _combine(_local_statistics(scaled, labels, decoder.vocab_range[0], False), decoder.tp)[0]


def values(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Value head: hidden [T, hidden] -> [T], fp32 (fp64 for fp64), the same on every tp rank; differentiable."""
    assert decoder.head_kind == "value", f"values needs a value head, this decoder has {decoder.head_kind!r}"
    weight = decoder.head_weight[0]
    if hidden.dtype not in (torch.float32, torch.float64):
        hidden, weight = hidden.float(), weight.float()
    return (hidden * weight).sum(-1)  # not a matrix product: one column would not be exact


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0 for log-probs; greedy decoding reports them at 1")
