"""Objectives: what a loss is computed from, the rows it sees, and what it takes from a model's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.kernels import on_device
from rlhf_spmd.models.context_parallel import at_tokens
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs, values

MASK = "response_mask"  # bool, ragged: false for the tokens of an environment, which were not drawn
LEARNT = "learnt_tokens"  # bool, ragged: false for tokens of weights older than ``rollout.max_staleness``
ROW_INPUTS = ("prompt_ids", "response_ids", f"{MASK}?")  # what a model reads of a row
ROUTED_EXPERTS = "routed_experts"  # a field of rows, see ``router_replay``


@dataclass(frozen=True)
class Totals:
    """Counts of a mini-batch over all data-parallel ranks, by which its loss is divided. ``tokens``: the tokens of responses."""

    tokens: int
    rows: int


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that an objective or a function works on. Tensors are int64 [rows] on the CPU.

    - lengths: number of response tokens of the model. Tokens of environments are left out as if they were not there. Fields per token
      are packed likewise, [sum(lengths)]
    - mask: bool, ragged: false for the tokens of environments; None without environments
    """

    row_ids: Tensor
    group_ids: Tensor
    lengths: Tensor
    mask: Ragged | None = None

    @staticmethod
    def of(batch: Batch) -> Rows:
        """Return the rows of a batch."""
        has_tokens = len(batch) > 0 and "response_ids" in batch
        lengths = num_model_tokens(batch) if has_tokens else torch.zeros(len(batch), dtype=torch.int64)
        return Rows(batch.row_ids, batch.group_ids, lengths, batch[MASK] if has_tokens and MASK in batch else None)

    def __len__(self) -> int:
        return len(self.row_ids)

    def per_token(self, values: Tensor) -> Ragged:
        """Return ``values`` [sum(lengths)] as a field of responses, in which the tokens of environments get 0."""
        ragged_values = Ragged(values, self.lengths)
        return ragged_values if self.mask is None else ragged_values.unmasked(self.mask)

    @property
    def turns_behind(self) -> Tensor:
        """Return how many of its row's turns of the model follow the turn of each token: int64 [sum(lengths)]."""
        if self.mask is None:
            return torch.zeros(int(self.lengths.sum()), dtype=torch.int64)
        mask, lengths = self.mask.values, self.mask.lengths
        # over all rows; where a row's first turn has the number of the last row's, differences within the row stay
        turn = (mask & ~mask.roll(1)).cumsum(0)
        last_turn = torch.cat([turn.new_zeros(1), turn])[lengths.cumsum(0)]
        return (torch.repeat_interleave(last_turn, lengths) - turn)[mask]

    def spread(self, per_row: Tensor) -> Tensor:
        """Return a number of each row [rows] for each of its tokens: [sum(lengths)]."""
        return torch.repeat_interleave(per_row, on_device(self.lengths, per_row.device), output_size=int(self.lengths.sum()))


# (fields by name, [tokens] or [rows] each; rows; counts) -> loss and statistics, to be summed over micro-batches and ranks
RowsLoss = Callable[[dict[str, Tensor], Rows, Totals], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Objective:
    """A loss, and what it is computed from.

    - inputs: fields of the batch, per token or per row
    - model_outputs: results of the forward pass at ``temperature``: ``log_probs``, ``entropy``, ``values`` [tokens], and
      ``row_values`` [rows], the value head at a row's last token
    - keep_groups: all rows of a group are in one micro-batch
    - weight: factor of this loss among several
    - on_cpu: those of the ``inputs`` that stay on the CPU
    - reports_loss_itself: the loss is already a statistic, so an update does not report it again as ``<role>/loss``
    - learn_if: a field, bool [rows], that marks the rows to learn. An update counts no tokens of other rows
    """

    loss: RowsLoss
    inputs: tuple[str, ...] = ()
    model_outputs: tuple[str, ...] = ("log_probs",)
    temperature: float = 1.0
    keep_groups: bool = False
    weight: float = 1.0
    on_cpu: tuple[str, ...] = ()
    reports_loss_itself: bool = False
    learn_if: str | None = None

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """Return all fields of a row that an update needs."""
        return (*ROW_INPUTS, f"{LEARNT}?", *self.inputs, *([] if self.learn_if is None else [self.learn_if]))

    def evaluate(self, fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its statistics. Raises TypeError if ``loss`` returns something else."""
        result = self.loss(fields, rows, totals)
        if not (isinstance(result, tuple) and len(result) == 2):
            description = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(
                f"the loss {getattr(self.loss, '__name__', self.loss)} returned a {description}, not (loss, statistics by name)"
            )
        return result


def as_objectives(objectives: Objective | Sequence[Objective]) -> list[Objective]:
    """Return one or several objectives as a list."""
    return [objectives] if isinstance(objectives, Objective) else list(objectives)


def joint(*objectives: Objective) -> Objective:
    """Return one objective for several on the same rows: one forward pass, and the sum of their weighted losses."""
    first = objectives[0]
    passes = {(objective.temperature, objective.keep_groups, objective.learn_if) for objective in objectives}
    assert len(passes) == 1, "joint objectives need the same temperature, groups and learnt rows"

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        results = [objective.evaluate(fields, rows, totals) for objective in objectives]
        statistics = {name: value for _, stats in results for name, value in stats.items()}
        losses = [objective.weight * value for objective, (value, _) in zip(objectives, results, strict=True)]
        return torch.stack(losses).sum(), statistics

    def union(fields: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for names in fields for name in names))

    return Objective(
        loss,
        inputs=union(objective.inputs for objective in objectives),
        model_outputs=union(objective.model_outputs for objective in objectives),
        temperature=first.temperature,
        keep_groups=first.keep_groups,
        on_cpu=union(objective.on_cpu for objective in objectives),
        learn_if=first.learn_if,
    )


# The tokens of rows


def sequence_lengths(batch: Batch) -> list[int]:
    """Return the tokens of prompt and response of each row."""
    if not len(batch):
        return []
    total: Tensor = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    return total.tolist()


def num_model_tokens(batch: Batch) -> Tensor:
    """Return the number of response tokens that the model drew, int64 [rows]: all, or those of the mask if there is an environment."""
    counts: Tensor = batch[MASK].counts() if MASK in batch else batch["response_ids"].lengths
    return counts


def model_token_values(batch: Batch, name: str) -> Tensor:
    """Return the entries of a ragged field for the model's response tokens, packed; empty without rows."""
    if not len(batch):
        return torch.empty(0)
    field: Ragged = batch[name]
    return (field.masked(batch[MASK]) if MASK in batch else field).values


def take_field(batch: Batch, name: str, device: torch.device) -> Tensor:
    """Return a field for objectives on ``device``: per row, or packed over the model's response tokens."""
    if not len(batch):
        return torch.empty(0, device=device)
    values = batch[name]
    return on_device(model_token_values(batch, name) if isinstance(values, Ragged) else values, device)


def keep_learnt_tokens(batch: Batch, learn_if: str | None) -> Batch:
    """Return ``batch`` with those response tokens of the model only that an update learns.

    They are those of the field ``learnt_tokens``, if there is one, in rows where the field ``learn_if``, bool [rows], is true.
    """
    if not len(batch):
        return batch
    lengths = batch["response_ids"].lengths
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    if learn_if is not None:
        mask &= torch.repeat_interleave(batch[learn_if].bool(), lengths)
    if LEARNT in batch:
        mask &= batch[LEARNT].values
    if mask.all():
        return batch
    if MASK in batch:
        mask = mask & batch[MASK].values
    return batch.union(batch.with_fields(**{MASK: Ragged(mask, lengths)}))


# Rows as micro-batches


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch of whole sequences, packed one after the other. It may have no rows.

    - tokens: int64 [T] on the device
    - lengths: int64 [rows] on the CPU: tokens of each sequence, which sum to T
    - fields: the fields of these rows that heads and losses use
    - token_index: None unless sequences share tokens, so that lengths sum to more than T; see
      :class:`~rlhf_spmd.models.attention.PackedAttention`
    """

    tokens: Tensor
    lengths: Tensor
    fields: Batch = field(
        default_factory=lambda: Batch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {})
    )
    token_index: Tensor | None = None

    @property
    def experts(self) -> Tensor | None:
        """Return the experts that each token of the rows has to take, see ``router_replay``; None: they choose for themselves."""
        return self.fields[ROUTED_EXPERTS].values if ROUTED_EXPERTS in self.fields else None


def pack_rows(batch: Batch, device: torch.device, min_saving: float = 0.0) -> MicroBatch:
    """Return prompt and response of each row, packed one after the other on ``device``; the other fields stay with the rows.

    Rows of one prompt share its tokens except the last one: the hidden states that are read, from there on, are each row's own. They
    share a prompt only if that saves more than the part ``min_saving`` of all tokens. Rows that have experts share it only if their
    experts are the same.
    """
    if not len(batch):
        return MicroBatch(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64), batch)
    parts: list[Tensor] = []
    token_index: list[Tensor] = []
    num_tokens = 0
    start_of_prompt: dict[bytes, int] = {}
    experts = batch[ROUTED_EXPERTS].rows() if ROUTED_EXPERTS in batch else [torch.empty(0)] * len(batch)
    columns = batch["prompt_ids"].rows(), batch["response_ids"].rows(), experts
    for prompt, response, row_experts in zip(*columns, strict=True):
        shared = prompt[:-1]
        key = shared.numpy().tobytes() + row_experts[: len(shared)].numpy().tobytes()
        start = start_of_prompt.setdefault(key, num_tokens)
        if start == num_tokens:  # a new prompt
            parts.append(shared)
            num_tokens += len(shared)
        num_unshared = len(prompt) - len(shared) + len(response)
        parts += [prompt[-1:], response]
        token_index += [torch.arange(start, start + len(shared)), torch.arange(num_tokens, num_tokens + num_unshared)]
        num_tokens += num_unshared
    lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    tokens = ragged(parts, torch.int64).values
    index = torch.cat(token_index)
    if len(index) - num_tokens > min_saving * len(index):
        return MicroBatch(on_device(tokens, device), lengths, batch, index)
    return MicroBatch(on_device(tokens[index], device), lengths, batch)


# What objectives and calls take from a forward pass


def compute_model_outputs(objective: Objective, decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
    """Return the results of a forward pass that ``objective.model_outputs`` names."""
    outputs: dict[str, Tensor] = {}
    if "log_probs" in objective.model_outputs or "entropy" in objective.model_outputs:
        log_probs, entropy = response_log_probs(
            decoder, hidden, micro, objective.temperature, "entropy" in objective.model_outputs
        )
        outputs = {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy})
    if "values" in objective.model_outputs:
        outputs["values"] = response_values(decoder, hidden, micro)
    if "row_values" in objective.model_outputs:
        outputs["row_values"] = last_token_value(decoder, hidden, micro)
    return outputs


def response_positions(micro: MicroBatch) -> Tensor:
    """Return the packed token whose hidden state predicts each response token of the model, int64 [response tokens] on the CPU."""
    if not len(micro.lengths):
        return torch.empty(0, dtype=torch.int64)
    responses: Tensor = micro.fields["response_ids"].lengths
    ends = micro.lengths.cumsum(0)
    first = ends - responses - 1
    within = torch.arange(int(responses.sum())) - torch.repeat_interleave(responses.cumsum(0) - responses, responses)
    positions = torch.repeat_interleave(first, responses) + within
    positions = positions[micro.fields[MASK].values] if MASK in micro.fields else positions
    return positions if micro.token_index is None else micro.token_index[positions]


def response_log_probs(
    decoder: Decoder, hidden: Tensor, micro: MicroBatch, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of every response token of the model, and the entropy of its distribution: [response tokens] each."""
    labels = on_device(model_token_values(micro.fields, "response_ids").long(), hidden.device)

    def compute(states: Tensor, index: Tensor) -> list[Tensor]:
        results = token_log_probs(decoder, states, labels[index], temperature, entropy)
        return [part for part in results if part is not None]

    log_probs, *entropies = at_tokens(hidden, response_positions(micro), decoder.cp, compute)
    return log_probs, entropies[0] if entropy else None


def response_values(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """Return the value of the state before each response token of the model, [response tokens]."""
    return _values_of(decoder, hidden, response_positions(micro))


def last_token_value(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """Return the value head on each row's last token, [rows]."""
    ends = micro.lengths.cumsum(0) - 1
    return _values_of(decoder, hidden, ends if micro.token_index is None else micro.token_index[ends])


def _values_of(decoder: Decoder, hidden: Tensor, positions: Tensor) -> Tensor:
    (values_of_positions,) = at_tokens(hidden, positions, decoder.cp, lambda states, _: [values(decoder, states)])
    return values_of_positions


def log_prob_metrics(difference: Tensor) -> dict[str, Any]:
    """Return metrics of |generation's log-prob - training's log-prob| [tokens] of this rank's rows."""
    if not len(difference):
        return {}
    mean = [float(difference.double().sum()), len(difference)]
    return {"rollout/log_prob_diff_max": float(difference.max()), "rollout/log_prob_diff_mean": mean}
