"""Gives the rows of a data set in training order, or in their own order for validation.

The training order is a permutation per epoch that depends on (seed, epoch) only. An integer cursor, which a checkpoint
stores, says where it stands.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_spmd.data.batch import Batch
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.files import DataError


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of an epoch, int64 [num_rows].

    Sorts raw Philox words, because numpy guarantees their stream, but not that of ``Generator.permutation``.
    """
    if not shuffle:
        return np.arange(num_rows)
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def mixture_order(sources: np.ndarray, weights: Sequence[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of an epoch of weighted sources, int64 [rows]; it has as many rows as all sources together.

    The i-th source gets the share of its weight. A source goes through all its rows before it repeats one, across
    epochs too. Without ``shuffle`` the sources alternate evenly. ``sources`` int64 [rows] is the source of each row.
    The result depends on the arguments only.
    """
    cumulative = np.cumsum([0.0, *weights])
    bounds = cumulative / cumulative[-1]  # the last is 1 to the bit, or an epoch would be a row short
    num_rows = len(sources)
    parts, positions = [], []
    for source in range(len(weights)):
        source_rows = np.flatnonzero(sources == source)
        size = len(source_rows)
        # rows of the source before this epoch, and before the next one
        begin, end = (int(n * num_rows * bounds[source + 1]) - int(n * num_rows * bounds[source]) for n in (epoch, epoch + 1))
        passes = range(begin // size, (end - 1) // size + 1)
        rows = np.concatenate([source_rows[epoch_order(size, seed + 1 + source, number, shuffle)] for number in passes])
        parts.append(rows[begin - passes.start * size :][: end - begin])
        positions.append((np.arange(end - begin) + 0.5) / (end - begin))
    order = np.concatenate(parts)
    assert len(order) == num_rows, f"{len(order)} of {num_rows} rows"
    return order[epoch_order(num_rows, seed, epoch, True) if shuffle else np.argsort(np.concatenate(positions), kind="stable")]


@dataclass
class Loader:
    """Yields full batches for ever; a batch that reaches the end of an epoch goes on with the next one.

    Row ids count samples over the whole run, so they never repeat. Every rank has the same loader; nothing is
    communicated. Raises DataError if there are too few rows.

    - weights: weight of each source; without them every row comes once per epoch
    - curriculum_epochs: number of epochs in the order of the rows' rank
    - index: number of rows of ``epoch`` that have been given
    - samples: number of rows that have been given
    """

    dataset: TokenDataset
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    weights: Mapping[str, float] | None = None
    curriculum_epochs: int = 0
    epoch: int = field(default=0, init=False)
    index: int = field(default=0, init=False)
    samples: int = field(default=0, init=False)
    orders: dict[int, np.ndarray] = field(default_factory=dict, init=False)  # of the last two epochs

    def __post_init__(self) -> None:
        num_rows = len(self.dataset)
        weights = self.weights or {}
        if num_rows < self.batch_size:
            raise DataError(
                f"data.train_batch_size={self.batch_size}, but the data have only {num_rows} usable rows; lower it or give more data"
            )
        for number, (path, weight) in enumerate(weights.items()):
            usable = int((self.dataset.sources == number).sum())
            share = weight / sum(weights.values()) * num_rows
            if not usable or share < 2:
                raise DataError(
                    f"data.path: {path!r} has {usable} usable rows and with its weight {weight} a share of {share:.2f} rows in an "
                    "epoch; it needs a row and a share of at least 2"
                )

    def next_batch(self, size: int | None = None) -> Batch:
        """Return ``size`` rows (default ``batch_size``) and move the cursor."""
        size = self.batch_size if size is None else size
        indices: list[int] = []
        while len(indices) < size:
            if self.index == len(self.dataset):
                self.epoch += 1
                self.index = 0
            order = self._order(self.epoch)[self.index : self.index + size - len(indices)]
            indices += order.tolist()
            self.index += len(order)
        row_ids = range(self.samples, self.samples + size)
        self.samples += size
        return self.dataset.batch(indices, row_ids)

    def rows(self, row_ids: Sequence[int]) -> Batch:
        """Return rows that were given before, by id: id i stands at place i modulo the number of rows in the order of its epoch."""
        cursors = (divmod(row_id, len(self.dataset)) for row_id in row_ids)
        return self.dataset.batch([int(self._order(epoch)[index]) for epoch, index in cursors], row_ids)

    @property
    def epochs(self) -> float:
        """Return the passes over the data so far."""
        return self.epoch + self.index / len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "index": self.index,
            "samples": self.samples,
            "rows": len(self.dataset),
            "seed": self.seed,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, with its order. Warns if the data have changed since."""
        if state["fingerprint"] != self.dataset.fingerprint:
            warnings.warn(
                f"the training data changed since the checkpoint ({state['rows']} rows then, {len(self.dataset)} now); "
                f"going on at epoch {state['epoch']}, row {state['index']} of the new data",
                stacklevel=2,
            )
        self.epoch = int(state["epoch"])
        self.index = min(int(state["index"]), len(self.dataset))
        self.samples = int(state["samples"])
        self.seed = int(state["seed"])
        self.orders = {}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self.orders:
            if self.weights:
                sources = self.dataset.sources.numpy()
                order = mixture_order(sources, list(self.weights.values()), self.seed, epoch, self.shuffle)
            else:
                order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
            if epoch < self.curriculum_epochs:
                order = order[np.argsort(self.dataset.ranks.numpy()[order], kind="stable")]
            self.orders = {**dict([*self.orders.items()][-1:]), epoch: order}
        return self.orders[epoch]


def build_loader(dataset: TokenDataset, config: DatasetConfig, run_seed: int) -> Loader:
    """Return the training order of the configuration. Raises DataError if there are too few rows."""
    weights = config.path if isinstance(config.path, dict) else None
    curriculum_epochs = config.curriculum_epochs if config.curriculum_key is not None else 0
    seed = run_seed if config.seed is None else config.seed
    return Loader(dataset, config.train_batch_size, config.shuffle, seed, weights, curriculum_epochs)


def validation_batches(dataset: TokenDataset, batch_size: int | None = None) -> Iterator[Batch]:
    """Yield every row once, in order; the last batch may be smaller. Row ids are positions in the data set."""
    size = len(dataset) if batch_size is None else batch_size
    for start in range(0, len(dataset), size):
        rows = range(len(dataset))[start : start + size]
        yield dataset.batch(rows, rows)
