"""Rows of prompts that agents answer: how many ids each episode has, and what its rows begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.data.batch import Batch, ragged


class AgentRows(NamedTuple):
    """The form of an episode's rows. A conversation may branch, so an episode has row ids for several.

    - per_episode: row ids of each episode, of which its rows use the first
    - first_ids: the tokens with which every conversation begins, which are the prompt of each row
    """

    per_episode: int
    first_ids: list[int]

    def with_prompts(self, rows: Batch) -> Batch:
        """Return ``rows`` with the first ids as their prompts."""
        prompts = ragged([torch.tensor(self.first_ids, dtype=torch.int64)] * len(rows))
        return Batch(rows.row_ids, rows.group_ids, {**rows.fields, "prompt_ids": prompts})

    def used(self, row_ids: np.ndarray, reports: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return those of ``row_ids`` that episodes have filled.

        ``reports``: the values of the generate call, which say it. A trace has none; it has one row for each episode.
        """
        if not reports:
            return row_ids[row_ids % self.per_episode == 0]
        return row_ids[np.isin(row_ids, [row for report in reports for row in report["rows"]])]
