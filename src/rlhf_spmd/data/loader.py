"""Training order: a permutation per epoch that follows from (seed, epoch), and an integer cursor that a checkpoint stores."""

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
    """int64 [num_rows]. Sorts raw Philox words: numpy guarantees their stream, but not that of ``Generator.permutation``."""
    if not shuffle:
        return np.arange(num_rows)
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def mixture_order(sources: np.ndarray, weights: Sequence[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [rows]: of an epoch as long as all sources together, the i-th of which has its weight's share. Each source goes through all
    of its own rows before it repeats one, over the ends of epochs too. Without ``shuffle`` they take turns evenly.

    ``sources`` int64 [rows]: of each row. Follows from its arguments alone.
    """
    running = np.cumsum([0.0, *weights])
    number, bounds = len(sources), running / running[-1]  # the last is 1 to the bit, or an epoch would be a row short
    parts, places = [], []
    for source in range(len(weights)):
        own = np.flatnonzero(sources == source)
        begin, end = (int(at * number * bounds[source + 1]) - int(at * number * bounds[source]) for at in (epoch, epoch + 1))
        passes = range(begin // len(own), (end - 1) // len(own) + 1)
        rows = np.concatenate([own[epoch_order(len(own), seed + 1 + source, number, shuffle)] for number in passes])
        parts.append(rows[begin - passes.start * len(own) :][: end - begin])
        places.append((np.arange(end - begin) + 0.5) / (end - begin))
    order = np.concatenate(parts)
    assert len(order) == number, f"{len(order)} of {number} rows"
    return order[epoch_order(len(order), seed, epoch, True) if shuffle else np.argsort(np.concatenate(places), kind="stable")]


@dataclass
class Loader:
    """Full batches for ever; one that reaches the end of an epoch goes on with the first rows of the next.

    Row ids count samples over the whole run, so they never repeat. The same on every rank; nothing is communicated.
    ``weights``: of the data's sources; without them all rows come once in an epoch. ``curriculum``: so many epochs go by rank.
    Raises DataError where there are too few rows.
    """

    dataset: TokenDataset
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    weights: Mapping[str, float] | None = None
    curriculum: int = 0
    epoch: int = field(default=0, init=False)
    index: int = field(default=0, init=False)  # in the epoch
    samples: int = field(default=0, init=False)
    orders: dict[int, np.ndarray] = field(default_factory=dict, init=False)  # of the last two epochs

    def __post_init__(self) -> None:
        num_rows, weights = len(self.dataset), self.weights or {}
        if num_rows < self.batch_size:
            raise DataError(
                f"data.train_batch_size={self.batch_size}, but the data have only {num_rows} usable rows; lower it or give more data"
            )
        for number, (path, weight) in enumerate(weights.items()):
            usable, share = int((self.dataset.sources == number).sum()), weight / sum(weights.values()) * num_rows
            if not usable or share < 2:
                raise DataError(
                    f"data.path: {path!r} has {usable} usable rows and with its weight {weight} a share of {share:.2f} rows in an "
                    "epoch; it needs a row and a share of at least 2"
                )

    def next_batch(self, size: int | None = None) -> Batch:
        """``size`` rows, ``batch_size`` by default; moves the cursor."""
        size = self.batch_size if size is None else size
        indices: list[int] = []
        while len(indices) < size:
            if self.index == len(self.dataset):
                self.epoch, self.index = self.epoch + 1, 0
            taken = self._order(self.epoch)[self.index : self.index + size - len(indices)]
            indices += taken.tolist()
            self.index += len(taken)
        row_ids = range(self.samples, self.samples + size)
        self.samples += size
        return self.dataset.batch(indices, row_ids)

    def rows(self, row_ids: Sequence[int]) -> Batch:
        """Rows that were given before, by id: the i-th sample of the run lies at i modulo the data's length in its epoch."""
        places = (divmod(row_id, len(self.dataset)) for row_id in row_ids)
        return self.dataset.batch([int(self._order(epoch)[index]) for epoch, index in places], row_ids)

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
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
        """Go on where ``state`` stood, with its order. Warns if the data are not the same as then."""
        if state["fingerprint"] != self.dataset.fingerprint:
            warnings.warn(
                f"the training data changed since the checkpoint ({state['rows']} rows then, {len(self.dataset)} now); "
                f"going on at epoch {state['epoch']}, row {state['index']} of the new data",
                stacklevel=2,
            )
        self.epoch, self.index, self.samples = int(state["epoch"]), int(state["index"]), int(state["samples"])
        self.seed, self.orders = int(state["seed"]), {}
        self.index = min(self.index, len(self.dataset))

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self.orders:
            if self.weights:
                sources = self.dataset.sources.numpy()
                order = mixture_order(sources, list(self.weights.values()), self.seed, epoch, self.shuffle)
            else:
                order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
            if epoch < self.curriculum:
                order = order[np.argsort(self.dataset.ranks.numpy()[order], kind="stable")]
            self.orders = {**dict([*self.orders.items()][-1:]), epoch: order}
        return self.orders[epoch]


def build_loader(dataset: TokenDataset, config: DatasetConfig, run_seed: int) -> Loader:
    """The training order that the configuration asks for. Raises DataError if there are too few rows."""
    weights = config.path if isinstance(config.path, dict) else None
    curriculum = config.curriculum_epochs if config.curriculum_key is not None else 0
    seed = run_seed if config.seed is None else config.seed
    return Loader(dataset, config.train_batch_size, config.shuffle, seed, weights, curriculum)


def validation_batches(dataset: TokenDataset, batch_size: int | None = None) -> Iterator[Batch]:
    """Every row once, in order, the last batch smaller; row ids are positions in the data set."""
    size = len(dataset) if batch_size is None else batch_size
    for start in range(0, len(dataset), size):
        rows = range(len(dataset))[start : start + size]
        yield dataset.batch(rows, rows)
