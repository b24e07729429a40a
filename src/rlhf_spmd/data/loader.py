"""Training order: a permutation per epoch that follows from (seed, epoch), and an integer cursor that a checkpoint stores."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlhf_spmd.data.batch import Batch
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.files import DataError


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [num_rows]. Sorts raw Philox words: numpy guarantees their stream, but not that of ``Generator.permutation``."""
    if not shuffle:
        return np.arange(num_rows)
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable")


class Loader:
    """Full batches for ever; one that reaches the end of an epoch goes on with the first rows of the next.

    Row ids count samples over the whole run, so they never repeat. The same on every rank; nothing is communicated.
    """

    def __init__(self, dataset: TokenDataset, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size}, but the data have only {len(dataset)} usable rows; "
                f"lower it or give more data"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.index = 0
        self.samples = 0

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
        self.seed = int(state["seed"])
        self.index = min(self.index, len(self.dataset))

    def _order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)


def build_loader(dataset: TokenDataset, config: DatasetConfig, run_seed: int) -> Loader:
    """The training order that the configuration asks for. Raises DataError if there are too few rows."""
    return Loader(dataset, config.train_batch_size, config.shuffle, run_seed if config.seed is None else config.seed)


def validation_batches(dataset: TokenDataset, batch_size: int | None = None) -> Iterator[Batch]:
    """Every row once, in order, the last batch smaller; row ids are positions in the data set."""
    size = len(dataset) if batch_size is None else batch_size
    for start in range(0, len(dataset), size):
        rows = range(len(dataset))[start : start + size]
        yield dataset.batch(rows, rows)
