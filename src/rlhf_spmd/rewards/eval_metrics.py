"""Metrics of several responses to each prompt of a set: mean@k, pass@k, maj@k and an interval. Pure.

- ``mean@k``: the mean score of all k responses to a prompt, over prompts.
- ``pass@k``: the chance that one of k responses passes, ``1 - C(n - c, k) / C(n, k)`` if c of a prompt's n pass:
  unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1).
- ``maj@k``: the score of the answer that most of the k responses give, as the reward reads it in them; of ties the answer
  that came first; 0 if none gives an answer. A reward that reads no answers has no such measure.
- ``ci95``: a 95 % interval of ``mean@k`` over prompts. If all scores are 0 or 1 it is Wilson's with the effective
  number of samples (Korn and Graubard 1998: a prompt's responses are not independent), which is not too narrow if all
  are right. Otherwise it is Student's t of the prompts' means; if these are all equal, or there is one prompt, there is
  none.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import source_metric

NORMAL_95 = 1.959963984540054
STUDENT_95 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)  # by degrees of freedom


def answer_code(answer: str | None) -> float:
    """Return a number for an answer that a reward has read, equal for equal answers: 48 bits of a hash; -1 for none."""
    return -1.0 if answer is None else float(int.from_bytes(hashlib.sha256(answer.encode()).digest()[:6]))


def majority(answers: Sequence[Hashable | None]) -> int | None:
    """Return the position of the first response with the most frequent answer, or None without answers."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return None
    largest = max(counts.values())
    return next(i for i, answer in enumerate(answers) if answer is not None and counts[answer] == largest)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the chance that one of ``k`` responses, drawn without replacement, passes; ``num_right`` of all pass."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def interval(scores: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of ``scores`` [prompts, k], see ``ci95`` above, or None."""
    num_prompts, k = scores.shape
    means = scores.mean(1)
    mean = float(means.mean())
    variance = float(means.var(ddof=1)) if num_prompts > 1 else 0.0
    if np.isin(scores, (0.0, 1.0)).all():
        independent = num_prompts * mean * (1 - mean) / variance if variance else num_prompts
        size = float(min(max(independent, num_prompts), num_prompts * k))
        shrink = 1 + NORMAL_95**2 / size
        middle = (mean + NORMAL_95**2 / (2 * size)) / shrink
        half = NORMAL_95 / shrink * math.sqrt(mean * (1 - mean) / size + NORMAL_95**2 / (4 * size**2))
        return max(0.0, round(middle - half, 12)), min(1.0, round(middle + half, 12))
    if (means == means[0]).all():  # t would say a point
        return None
    half = student_95(num_prompts - 1) * math.sqrt(variance / num_prompts)
    return mean - half, mean + half


def student_95(degrees: int) -> float:
    """Return the 97.5 % point of Student's t; from 11 degrees of freedom by Fisher's expansion, to 2e-4."""
    if degrees <= len(STUDENT_95):
        return STUDENT_95[degrees - 1]
    z = NORMAL_95
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))


Votes = Sequence[Hashable | None]  # the answer in each response to a prompt, None for none


def measure_sets(scores: np.ndarray, answers: Sequence[Votes | None], sets: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return validation metrics beyond the overall mean, each number once.

    If there are several ``sets`` (positions of prompts) each has its mean. With k > 1 responses per prompt each has also
    pass@2, ... pass@k and maj@k. Other arguments and names are those of :func:`measure`.
    """
    k = scores.shape[1]
    metrics: dict[str, float] = {}
    for name, prompts in sets.items():
        measured = measure(scores[prompts], [answers[i] for i in prompts]) if len(prompts) else {}
        for key, value in measured.items():
            kind, _, size = key.partition("@")
            if len(sets) > 1 if kind == "mean" else int(size) > 1:
                metrics[f"{name}/" * (len(sets) > 1) + (key if k > 1 else kind)] = value
    return metrics


def repeated_means(rewards: Mapping[str, RewardConfig], groups: Sequence[Sequence[Mapping[str, Any]]]) -> frozenset[str]:
    """Return names of data source means that repeat another mean: that of all rows, or of a group.

    ``groups``: example rows of each group, at least one per data source.
    """
    names: set[str] = set()
    for name, reward in rewards.items():
        sources = [{row.get("data_source") for row in rows if reward.applies_to(row)} for rows in groups]
        for source in filter(None, set().union(*sources)):
            with_source = [group for group in sources if source in group]
            if all(group <= {source} for group in (with_source if len(with_source) == 1 else sources)):
                names.add(source_metric(name, str(source)))
    return frozenset(names)


def measure(scores: np.ndarray, answers: Sequence[Votes | None], pass_score: float = 1.0) -> dict[str, float]:
    """Return ``mean@k``, ``pass@1``, ``pass@2``, ``pass@4``, ... ``pass@k`` and ``maj@k``.

    - scores: float64 [prompts, k]
    - answers: the answers in the responses to each prompt; None for a prompt whose reward reads no answers. If all are None
      there is no ``maj@k``; otherwise such a prompt counts 0
    - pass_score: the least score of a response that passes
    """
    k = scores.shape[1]
    num_right = (scores >= pass_score).sum(1).tolist()
    metrics = {f"mean@{k}": float(scores.mean())}
    for size in sorted({*(2**power for power in range(k.bit_length())), k}):
        metrics[f"pass@{size}"] = float(np.mean([pass_at_k(k, count, size) for count in num_right]))
    if all(votes is None for votes in answers):
        return metrics
    winners = [majority(votes or ()) for votes in answers]
    metrics[f"maj@{k}"] = float(np.mean([0.0 if i is None else row[i] for i, row in zip(winners, scores, strict=True)]))
    return metrics
