"""mean@k, pass@k, maj@k and their interval against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rlhf_spmd.rewards import math, multiple_choice
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.eval_metrics import (
    answer_code,
    interval,
    majority,
    measure,
    measure_sets,
    pass_at_k,
    repeated_means,
    student_95,
)


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_choices_with_one_that_passes(num_right: int, k: int) -> None:
    right = [i < num_right for i in range(6)]
    chosen = [any(right[i] for i in its) for its in combinations(range(6), k)]
    assert pass_at_k(6, num_right, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_measures_of_a_set() -> None:
    scores = np.array([[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.5]])
    answers = [["7", "8", "8", "7", None], [None] * 5, ["a", "a", "b", "a", "c"]]
    found = measure(scores, answers)
    assert list(found) == ["mean@5", "pass@1", "pass@2", "pass@4", "pass@5", "maj@5"]
    assert found["mean@5"] == pytest.approx((2 + 0 + 4.5) / 15)
    assert found["pass@1"] == pytest.approx((2 / 5 + 0 + 4 / 5) / 3)
    assert found["pass@2"] == pytest.approx(((1 - 3 / 10) + 0 + 1) / 3)  # of 10 pairs, 3 without a right one
    assert found["pass@5"] == pytest.approx(2 / 3)
    assert found["maj@5"] == pytest.approx((1 + 0 + 1) / 3)  # "7" and "8" come twice, "7" first; nobody answers; "a"
    assert measure(scores, answers, pass_score=0.5)["pass@1"] == pytest.approx((2 / 5 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("k", "sets", "names"),
    [
        (1, ["val"], []),
        (1, ["gsm8k", "sums"], ["gsm8k/mean", "sums/mean"]),
        (4, ["val"], ["pass@2", "pass@4", "maj@4"]),
        (2, ["a", "b"], ["a/mean@2", "a/pass@2", "a/maj@2", "b/mean@2", "b/pass@2", "b/maj@2"]),
    ],
)
def test_validation_says_every_number_of_its_sets_once(k: int, sets: list[str], names: list[str]) -> None:
    scores, answers = np.eye(4, k), [["x"] * k] * 4
    chosen = {name: np.arange(i, 4, len(sets)) for i, name in enumerate(sets)}
    found = measure_sets(scores, answers, chosen)
    assert list(found) == names
    for name, value in found.items():
        its, _, key = name.rpartition("/")
        key = key if "@" in key else f"{key}@1"
        assert value == measure(scores[chosen[its or sets[0]]], answers[:2])[key] if its else measure(scores, answers)[key]


@pytest.mark.parametrize(
    ("groups", "repeated"),
    [
        (["aa"], {"a"}),  # letters: the data_source of each row; a dash: a row without one
        (["ab"], set()),
        (["a-"], set()),
        (["--"], set()),
        (["aa", "bb"], {"a", "b"}),
        (["ab", "b"], set()),
        (["ab", "c"], {"c"}),
        (["a", "a"], {"a"}),
        (["a", "a", "b"], {"b"}),
    ],
)
def test_the_mean_of_a_source_is_left_out_where_another_mean_says_it(groups: list[str], repeated: set[str]) -> None:
    rows = [[{"data_source": None if letter == "-" else letter} for letter in group] for group in groups]
    assert repeated_means({"reward": RewardConfig()}, rows) == {f"reward/{source}/mean" for source in repeated}
    chosen = repeated_means({"cost": RewardConfig(data_sources=["b"])}, rows)
    assert ("cost/b/mean" in chosen) is ("b" in "".join(groups)), "all rows that it scores are of this source"


def test_the_majority_is_the_first_of_the_most_frequent() -> None:
    assert majority([None, "x", "y", "y"]) == 2
    assert majority(["x", "y", "y", "x"]) == 0
    assert majority([None, None]) is None


def test_votes_are_for_the_answers_that_the_reward_reads() -> None:
    sentences = ["So the answer is A.", "After a check, the answer is B.", "I say: the answer is B.", "Answer: B"]
    boxes = [f"\\boxed{{{text}}}" for text in ("7", "x=5", "5", "7 ", "x = 5")]
    halves = [f"\\boxed{{{text}}}" for text in ("3", "3", "3.0", "\\frac{1}{2}", "\\dfrac12", "0.5", " 1/2 ")]
    for reward, answer, responses, score in (
        (multiple_choice.sentences, "B", sentences, 1.0),
        (multiple_choice.sentences, "A", sentences, 0.0),
        (math.score, "5", boxes, 1.0),
        (math.score, "\\frac{1}{2}", halves, 1.0),
        (math.score, "3", halves, 0.0),  # wrong ones in other writings are one answer too
        (math.score, "1", [*halves, "none", "none"], 0.0),
    ):
        verdicts = [reward(response, answer) for response in responses]
        measured = measure(np.array([verdicts]), [[verdict.answer for verdict in verdicts]])
        assert measured[f"maj@{len(responses)}"] == score
    assert "maj@2" not in measure(np.eye(2), [None, None]), "a reward that reads no answers"
    assert measure(np.ones((2, 2)), [None, ["a", "a"]])["maj@2"] == 0.5
    assert answer_code(None) == -1 and answer_code("5") == answer_code("5") != answer_code("6")


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for draw, mean in (
        (lambda: generator.normal(0.3, 1.0, (6, 2)), 0.3),  # few prompts, any scores
        (lambda: (generator.random((40, 1)) < 0.9).astype(float), 0.9),
        # a prompt's responses go together: 8 of them are not 8 samples
        (lambda: (generator.random((30, 8)) < generator.beta(0.5, 0.5, (30, 1))).astype(float), 0.5),
    ):
        inside = [low <= mean <= high for low, high in (interval(draw()) for _ in range(2000))]  # type: ignore[misc]
        assert 0.925 <= np.mean(inside) <= 0.98


def test_the_interval_of_few_prompts() -> None:
    low, high = interval(np.ones((10, 4)))  # type: ignore[misc]
    assert high == pytest.approx(1.0, abs=1e-12)
    assert low == pytest.approx(10 / (10 + 1.959964**2), abs=1e-6)  # Wilson's at p = 1, of 10 prompts
    assert interval(np.zeros((7, 2)))[0] == 0.0 and interval(np.ones((10, 4)))[1] == 1.0  # type: ignore[index]
    assert interval(np.array([[0.3, 0.4]])) is None and interval(np.full((5, 2), 0.3)) is None  # no point
    low, high = interval(np.array([[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]))  # type: ignore[misc]
    assert (low, high) == pytest.approx((2 - 4.30265 * 2 / 3**0.5, 2 + 4.30265 * 2 / 3**0.5), abs=1e-4)
    # tables: 2.2010 for 11, 2.0423 for 30
    assert student_95(11) == pytest.approx(2.2010, abs=2e-4) and student_95(30) == pytest.approx(2.0423, abs=1e-4)
