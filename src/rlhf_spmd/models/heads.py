"""What comes out of the last stage: log-probs, entropies, logits and values, vocabulary-parallel.

Training never holds logits [T, V]: chunks of rows are computed, reduced to a few numbers per token, dropped, and computed
again in the backward pass. At no time are there more than a chunk's logits [rows, V / t], twice where an entropy is computed or
has a gradient. The backward pass of a large vocabulary goes by blocks of it, so that wide copies of its weight and its gradient exist
a block at a time; that of a small one finds the logits of the last rows (``KEPT_ELEMENTS``) where they are.
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

from rlhf_spmd import kernels
from rlhf_spmd.models.attention import exact_rows, pad_rows
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.collectives import Group

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits per chunk, 16 MiB on CPU
BLOCK_ROWS = {"cpu": 1 << 10, "cuda": 1 << 13}  # of a chunk in the backward pass: fewer add to gradients too often
KEPT_ELEMENTS = 1 << 23  # logits of the last chunks that the kernels' forward pass leaves for backward, 32 MiB


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T in fp32 (fp64 for fp64), with enough rows in the product to be exact."""
    found = kernels.ready(hidden)
    if found is not None and found.multiplies(hidden, weight):
        return found.linear(hidden, weight, wide=True)
    rows = hidden.shape[0]
    hidden = pad_rows(hidden, exact_rows(weight.numel()))
    if hidden.dtype in (torch.float32, torch.float64):
        return F.linear(hidden, weight)[:rows]
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)[:rows]
    return F.linear(hidden.float(), weight.float())[:rows]


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _local_statistics(logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
    """[4, T]: maximum, sum of exp(l - max), the label's logit (0 where it lies elsewhere), sum of exp(l - max) * (l - max)
    (0 unless ``entropy``) over this rank's logits [T, V_local], which torch overwrites, the kernels do not."""
    found = kernels.ready(logits)
    if found is not None:
        return found.logit_statistics(logits, labels, first, entropy)
    local = labels - first
    inside = (local >= 0) & (local < logits.shape[1])
    at_label = logits.gather(1, local.masked_fill(~inside, 0)[:, None])[:, 0].masked_fill(~inside, 0)
    maximum = logits.amax(-1)
    shifted = logits.sub_(maximum[:, None])
    exponentials = shifted.exp() if entropy else shifted.exp_()
    total = exponentials.sum(-1)
    weighted = shifted.mul_(exponentials).sum(-1) if entropy else torch.zeros_like(maximum)
    return torch.stack([maximum, total, at_label, weighted])


def _combine(statistics: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Local statistics [4, T] -> (log_probs [T], entropy [T], logsumexp [T]), the same bits on every rank.

    Collective over the group: every rank of it must call, in program order.
    """
    if group.size == 1:
        largest, total, label, weighted = statistics
        log_total = total.log()
        return (label - largest) - log_total, log_total - weighted / total, largest + log_total
    parts = torch.stack(group.all_gather(statistics, "log_probs"))
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
        softcap: float | None,
        entropy: bool,
        chunk_rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        parts, ctx.kept = [], {}
        vocab, block_rows = weight.shape[0], min(BLOCK_ROWS.get(hidden.device.type, 1 << 13), hidden.shape[0])
        whole = chunk_rows >= block_rows or hidden.shape[0] * vocab <= KEPT_ELEMENTS
        ctx.tile = (chunk_rows, vocab) if whole else (block_rows, max(chunk_rows * vocab // block_rows, 1))
        first_kept = hidden.shape[0] - (KEPT_ELEMENTS // vocab if keep and whole else 0)
        for rows in _chunks(hidden.shape[0], chunk_rows):
            logits = _scaled(hidden[rows], weight, softcap, temperature)
            parts.append(_local_statistics(logits, labels[rows], first, entropy))
            if rows.start >= first_kept and kernels.ready(logits) is not None:
                ctx.kept[rows.start] = logits
            del logits  # before the next chunk's are made
        log_probs, entropies, log_z = _combine(torch.cat(parts, 1), group)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropies)
        ctx.settings = (first, group, temperature, softcap)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient: None, not zeros
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropies = ctx.saved_tensors
        (first, group, temperature, softcap), (num_rows, num_columns) = ctx.settings, ctx.tile
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for block in _chunks(weight.shape[0], num_columns):
            wide = weight[block].to(log_z.dtype) if hidden.device.type == "cpu" else weight[block]
            part = grad_weight if grad_weight is None else grad_weight[block].to(log_z.dtype)
            for rows in _chunks(hidden.shape[0], num_rows):
                logits = ctx.kept.pop(rows.start, None)
                if logits is None:
                    logits = _scaled(hidden[rows], weight[block], softcap, temperature)
                slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square_()
                entropy = None if grad_entropy is None else (entropies[rows, None], grad_entropy[rows, None])
                numbers = labels[rows], first + block.start, log_z[rows, None], grad_log_probs[rows, None], entropy
                grad = _logit_gradients(logits, *numbers)
                grad = _tempered(grad if slope is None else grad.mul_(slope), temperature).to(wide.dtype)
                _add_product(grad_hidden[rows], grad, wide)
                if part is not None:
                    _add_product(part, grad.t(), hidden[rows].to(grad.dtype))
                del logits, slope, grad  # before the next chunk's are made
            if grad_weight is not None and part is not None and part.dtype != weight.dtype:
                grad_weight[block] = part
        # every rank saw its slice of the vocabulary only
        grad_hidden = group.all_reduce(grad_hidden, "head_grad").to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """In place; ``total`` may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b)


def _logit_gradients(
    logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grad_log_probs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradients of this rank's scaled logits [T, V_local], which are overwritten; the other numbers are [T, 1], but for
    ``labels`` [T], of which the slice's first is ``first``. ``entropy``: the entropies and their gradients."""
    found = kernels.ready(logits)
    if found is not None and entropy is None:
        found.logit_gradients(logits, labels, first, log_z, grad_log_probs)
        return logits
    local = labels - first
    log_p = logits.sub_(log_z)
    if entropy is None:
        grad = log_p.exp_().neg_().mul_(grad_log_probs)
    else:
        grad = log_p.exp().neg_()
        grad *= log_p.add_(entropy[0]).mul_(entropy[1]).add_(grad_log_probs)
    inside = ((local >= 0) & (local < grad.shape[1]))[:, None]
    return grad.scatter_add_(1, local[:, None].masked_fill(~inside, 0), grad_log_probs.masked_fill(~inside, 0))


def _scaled(hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float) -> Tensor:
    return _tempered(_capped(_project(hidden, weight), softcap), temperature)


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
    Differentiable in ``hidden`` and the head's weight, mostly by recomputation, ``chunk_rows`` tokens at a time.
    Collective over tp: every rank of it must call, in program order, with equal hidden and labels.
    """
    _check_temperature(temperature)
    weight, keep = decoder.head_weight, torch.is_grad_enabled()
    if chunk_rows is None:
        chunk_rows = max(CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26) // weight.shape[0], 64)
    settings = (decoder.vocab_range[0], decoder.tp, float(temperature), decoder.spec.logit_softcap, entropy, chunk_rows, keep)
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, labels, *settings)
    return log_probs, entropies if entropy else None


def local_logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """This rank's slice of the logits [T, V_local] of hidden [T, hidden], fp32 (fp64 for fp64). No gradient: for generation."""
    with torch.no_grad():
        return _capped(_project(hidden, decoder.head_weight), decoder.spec.logit_softcap)


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


def log_probs_of(decoder: Decoder, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(labels [T]) [T] from this rank's logits [T, V_local] (:func:`local_logits`): :func:`token_log_probs`'s arithmetic.

    Collective over tp: every rank of it must call, in program order.
    """
    _check_temperature(temperature)
    with torch.no_grad():
        untouched = temperature == 1.0 and kernels.ready(logits) is not None
        scaled = logits if untouched else _tempered(logits.clone(), temperature)
        return _combine(_local_statistics(scaled, labels, decoder.vocab_range[0], False), decoder.tp)[0]


def values(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Value head: hidden [T, hidden] -> [T], fp32 (fp64 for fp64), the same on every tp rank; differentiable."""
    weight = decoder.value_weight[0]
    if hidden.dtype not in (torch.float32, torch.float64):
        hidden, weight = hidden.float(), weight.float()
    return (hidden * weight).sum(-1)  # not a matrix product: one column would not be exact


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0 for log-probs; greedy decoding reports them at 1")
