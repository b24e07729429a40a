"""Right answers written in other ways, wrong ones that look right, and answers that are lists, floats or dicts."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
import time
from decimal import Decimal

import numpy as np
import pytest

from places import ROOT
from rlhf_spmd.rewards import aime, auto, exact_match, gsm8k, json_schema, math, multiple_choice, regex
from rlhf_spmd.rewards.answers import alternatives, plain
from rlhf_spmd.rewards.config import RewardConfig

MATH500 = ROOT.parent / "shared" / "data" / "math500" / "test.jsonl"
COLUMN = "\\begin{pmatrix} -1/3 \\\\ 2 \\end{pmatrix}"
SQUARE = "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        (COLUMN, "\\begin{pmatrix}-1/3\\\\2\\end{pmatrix}"),
        (COLUMN, "\\begin{bmatrix} -\\frac{1}{3} \\\\[4pt] 2.0 \\\\ \\end{bmatrix}"),
        (COLUMN, "\\left(\\begin{array}{c} -\\dfrac13 \\\\\n 2 \\end{array}\\right)"),
        (SQUARE, "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        (f"B = {SQUARE}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        ("-72", "−72"),
        ("-72", "–72"),
        ("72", "７２"),
        ("72", "\u200b72\u00a0"),
        ("12500", "12\u202f500"),
        ("12500", "12 500"),
        ("12500", "12,\\!500"),
        ("1000, 2000", "1,000, 2,000"),
        ("1.5", "1½"),
        ("\\frac{3}{4}", "¾"),
        ("\\frac{3}{4}", "3 ÷ 4"),
        ("\\frac{3}{4}", "(3)/(4)"),
        ("-\\frac{\\pi}{6}", "\\frac{-π}{6}"),
        ("\\frac{\\sqrt{3}}{2}", "√3/2"),
        ("\\frac{11+9a}{20}", "(11+9a)/20"),
        ("\\frac{\\pi}{2}", "\\frac\\pi2"),
        ("16\\sqrt{3}", "16*sqrt(3)"),
        ("16\\sqrt{13}", "16 \\cdot √13"),
        ("12\\pi", "12 × π"),
        ("5x^{10}", "5x¹⁰"),
        ("90^\\circ", "90°"),
        ("{5}", "5^{\\circ}"),
        ("\\$18.90", "18.90 dollars"),
        ("50\\%", "50 percent"),
        ("15\\mbox{ cm}^2", "15 cm²"),
        ("15\\mbox{ cm}^2", "15 \\text{ square centimeters}."),
        ("5", "+5"),
        ("5", "(5)"),
        ("5", "**5**"),
        ("(2,\\infty)", "(2, +∞)"),
        ("(0,9) \\cup (9,36)", "(9,36)∪(0,9)"),
        ("(0,9) \\cup (9,36)", "x \\in (0,9) U (9,36)"),
        ("1 \\pm \\sqrt{19}", "1-\\sqrt{19}, 1+\\sqrt{19}"),
        ("\\{1\\pm\\sqrt{5},-2\\}", "-2, 1+√5, 1-√5"),
        ("3, 5, 7", "7; 5 and 3"),
        ("3, 5, 7", "x \\in \\lbrace 3, 5, 7 \\rbrace"),
        ("(1,-2)", "(x, y) = (1, −2)"),
        ("x \\leq 5", "5 ≥ x"),
        ("\\text{(B)}", "B"),
        ("\\text{even}", "Even"),
        ("2\\alpha", "2α"),
        ("\\mathbb{R}", "ℝ"),
    ],
)
def test_math_takes_an_answer_that_is_written_in_another_way(answer, written):
    assert math.score(f"so \\boxed{{{written}}}", answer) == 1.0
    assert math.equal(answer, written)


@pytest.mark.parametrize(
    ("answer", "other"),
    [
        (COLUMN, "\\begin{pmatrix} 2 \\\\ -1/3 \\end{pmatrix}"),
        (COLUMN, "\\begin{pmatrix} -1/3 & 2 \\end{pmatrix}"),
        (COLUMN, "(-1/3, 2)"),
        (SQUARE, "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}"),
        (SQUARE, "\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}"),
        (SQUARE, "\\begin{pmatrix} 1 & 2 & 3 & 4 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 234 \\end{pmatrix}", "\\begin{pmatrix} 1234 \\end{pmatrix}"),
        ("72", "−72"),
        ("72", "7 2"),
        ("72", "72²"),
        ("18", "18 × 2"),
        ("18", "18½"),
        ("18", "18 \\text{ million}"),
        ("18", "18 or 7"),
        ("1/2", "2 ÷ 1"),
        ("15\\text{ cm}^2", "15\\text{ cm}^3"),
        ("15\\text{ cm}", "15 inches"),
        ("60\\text{ miles per hour}", "60 km / h"),
        ("9 gallons / miles per hour", "9 cups"),
        ("5m", "5"),
        ("2 mi", "2"),
        ("16\\sqrt{3}", "16\\sqrt{13}"),
        ("√12", "√1 2"),
        ("(0,9) \\cup (9,36)", "(0,9) \\cap (9,36)"),
        ("(0,9) \\cup (9,36)", "(0,9) \\cup [9,36)"),
        ("(0,9)", "(0,9"),
        ("(0,9)", "\\{0,9\\}"),
        ("(-\\infty, 2)", "(\\infty, 2)"),
        ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}"),
        ("\\{1,2\\}", "\\{1,2,3\\}"),
        ("x \\leq 5", "x ≥ 5"),
        ("x \\leq 5", "x < 5"),
        ("(a+5)(b+2)", "a+5)(b+2"),
        ("X", "x"),
        ("2\\cdot 3", "23"),
        ("3.4 \\times 10^{-31}", "3.4 \\times 10^{-3}1"),
    ],
)
def test_math_does_not_take_another_answer(answer, other):
    assert math.score(f"so \\boxed{{{other}}}", answer) == 0.0
    assert not math.equal(answer, other)


def test_boxes_that_are_joined_are_one_list():
    assert math.score("$x = \\boxed{1}$ and $x = \\boxed{-2}$", "-2") == 1.0  # not joined: more stands between
    assert math.score("\\boxed{1}, \\boxed{-2}", "-2, 1") == math.score("\\boxed{1} \\text{ and } \\boxed{-2}", "-2, 1") == 1.0
    assert math.score("\\boxed{1} or \\boxed{-2}", "-2") == 0.0
    assert math.score("\\boxed{\\frac12}, or $\\boxed{0.5}$", "0.5") == 1.0
    assert math.boxed("\\boxed{\\left\\{ 1 \\right.}") == "\\left\\{ 1 \\right."


@pytest.mark.skipif(not MATH500.exists(), reason="needs the data set that lies beside the repository")
def test_every_answer_of_math500_counts_in_other_spellings_and_not_when_it_is_changed():
    answers = sorted({json.loads(line)["answer"] for line in MATH500.read_text().splitlines()})
    same = [
        (answer, written)
        for answer in answers
        for written in (
            answer.replace("-", "−"),
            answer.replace("\\frac", "\\dfrac"),
            f"{{{answer}}}",
            f"$ {answer} $.",
            f"\u200b{answer}",
        )
    ]
    assert [pair for pair in same if not math.equal(*pair)] == []
    changes = ("×2", "÷2", "²", "½", " + 1", "!", "i", ", 1", " or 7", " \\text{ million}")
    changed = [(answer, answer + change) for answer in answers for change in changes if answer != "0"]
    assert [pair for pair in changed if math.equal(*pair)] == []


@pytest.mark.parametrize(
    "part", ["\\", "{", "(", "1,", "ab", " ", "\\alpha", "\\frac{-", "\\begin{pmatrix}", "\\text{and ", "5 cm ", "\\cup"]
)
def test_no_answer_takes_long_to_compare(part):
    for size in (900, 20_000):
        start = time.process_time()
        assert math.flexible("answer: " + part * (size // len(part)) + "x", "5") == 0.0
        assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("#### −72", -72, -72),
        ("#### ７２", 72, 72),
        ("#### 1\u202f072", 1072, 1072),
        ("#### \\$72", 72, 72),
        ("#### **72**", 72, 72),
        ("#### €72", 72, 72),
        ("#### 1,234,567.50", 1234567.5, 1234567.5),
        ("#### 2½", 2.5, 2.5),
        ("so 5-72", None, 72),
        ("takes 10–72 hours", None, 72),
        ("#### 72 × 2", None, 2),
        ("#### 72 x 2", None, 2),
        ("#### 72 \\times 2", None, 2),
        ("#### 72÷2", None, 2),
        ("#### 72–2", None, 2),
        ("#### 72 or 73", None, 73),
        ("#### 72, 73", None, 73),
        ("#### 7,2", None, 2),
        ("#### 72 million", None, 72),
        ("#### 72 apples, all red", 72, 72),
        ("#### 72 (in cm²)", 72, 72),
        ("#### 72%", 72, 72),
    ],
)
def test_gsm8k_reads_numbers_and_not_formulas(response, strict, flexible):
    assert gsm8k.marked_number(response) == (None if strict is None else Decimal(str(strict)))
    assert gsm8k.last_number(response) == Decimal(str(flexible))
    assert gsm8k.score(response, 72) == float(strict == 72)


@pytest.mark.parametrize(
    ("response", "right"),
    [("\\boxed{n = 25}", 1.0), ("Answer：２５", 1.0), ("\\boxed{(25)}", 1.0), ("\\boxed{25 × 2}", 0.0), ("\\boxed{−25}", 0.0)],
)
def test_aime_takes_a_name_and_other_characters(response, right):
    assert aime.score(response, "025") == right


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("The answer is 'B'.", "B"),
        ("The answer is “B”.", "B"),
        ("The correct answer is:\n\n**B) Rome**", "B"),
        ("Answer:\n\n**B**", "B"),
        ("\\boxed{B) Rome}", "B"),
        ("\\boxed{\\text{B. Rome}}", "B"),
        ("[[B]]", "B"),
        ("The answer is (b).", "B"),
        ("Answer: b", "B"),
        ("b", "B"),
        ("I choose B.", "B"),
        ("The correct statement is B.", "B"),
        ("Answer：（B）", "B"),
        ("Answer: B and D", None),
        ("Answer: B, D", None),
        ("The answer is 'B', or perhaps 'D'.", None),
        ("The answer is anything but B.", None),
        ("I don't choose B", None),
        ("\\boxed{B, D}", None),
        ("The answer is B, and D is wrong", "B"),
        ("Answer: a good one", None),
    ],
)
def test_multiple_choice_in_other_marks(response, found):
    assert multiple_choice.letter(response) == found


def test_plain_characters():
    assert plain("−１２\u2009500 ‘x’ （a） ٣") == "-12500 'x' (a) 3"


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (["34", 35], ["34", "35"]),
        (np.array(["34"]), ["34"]),
        (np.float64(72.0), ["72", "72.0"]),
        ('["34", "\\\\frac{1}{2}"]', ["34", "\\frac{1}{2}"]),
        ("['34']", ["34"]),
        ("[34]", ["34"]),
        ("[1, 2]", ["[1, 2]"]),  # an interval
        ("[x]", ["[x]"]),
        (72.0, ["72", "72.0"]),
        (0.5, ["0.5"]),
        (True, ["True", "true"]),
        (Decimal("7.50"), ["7.50"]),
        ([None, 3], ["3"]),
    ],
)
def test_an_answer_may_be_a_list_of_which_any_is_right(answer, texts):
    assert alternatives(answer) == texts


@pytest.mark.parametrize(
    ("function", "response"),
    [
        (math.score, "\\boxed{34}"),
        (math.flexible, "The answer is 34."),
        (gsm8k.score, "#### 34"),
        (gsm8k.flexible, "34"),
        (aime.score, "\\boxed{34}"),
        (exact_match.score, "34"),
        (lambda response, answer: regex.score(response, answer, r"\d+"), "it is 34"),
    ],
)
def test_every_reward_with_an_answer_takes_lists_and_floats(function, response):
    for right in (34, 34.0, "34", [33, 34.0], ["33", "34"], np.array([33, 34])):
        assert function(response, right) == 1.0
    for wrong in (33, 33.0, [33, 35], ["33"]):
        assert function(response, wrong) == 0.0
    if function is not exact_match.score:
        assert function(response, '["33", "34"]') == 1.0
    for bad in ({"value": 34}, [], [{"value": 34}], [["34"]], float("nan")):
        with pytest.raises(ValueError, match="of which any is right"):
            function(response, bad)


def test_exact_match_takes_a_text_as_it_stands():
    assert exact_match.score('["a"]', '["a"]') == 1.0 and exact_match.score("a", '["a"]') == 0.0
    assert exact_match.score("72.0", 72.0) == exact_match.score(" 72 ", 72.0) == 1.0 and exact_match.score("7", 72.0) == 0.0


@pytest.mark.parametrize(
    "function", ["math", "math:flexible", "exact_match", "gsm8k", "gsm8k:flexible", "aime", "multiple_choice", "auto"]
)
def test_an_answer_that_is_a_dict_ends_the_run_before_its_start(function):
    config = RewardConfig(function=function)
    rows = [{"answer": answer, "data_source": "math"} for answer in ("5", {"value": "5"})]
    if function == "multiple_choice":
        rows[0]["answer"] = "B"
    config.check_rows("reward", rows[:1], ["a.jsonl, row 0"])
    with pytest.raises(
        ValueError, match=r"\Aa.jsonl, row 1: reward.function: the answer \{'value': '5'\} is [^\n]*a dict; [^\n]*\Z"
    ):
        config.check_rows("reward", rows, ["a.jsonl, row 0", "a.jsonl, row 1"])


@pytest.mark.parametrize(
    ("function", "answer"), [("gsm8k", "many"), ("aime", "x+1"), ("multiple_choice", 2), ("multiple_choice", "Rome")]
)
def test_answers_that_a_reward_can_read_in_no_row_end_the_run_before_its_start(function, answer):
    config, rows = RewardConfig(function=function), [{"answer": answer}, {"answer": answer}, {"answer": None}]
    with pytest.raises(ValueError, match=r"\Aa, row 0: reward.function: [^\n]*; all rows are like this [^\n]*\Z"):
        config.check_rows("reward", rows, ["a, row 0", "a, row 1", "a, row 2"])
    config.check_rows(
        "reward", [*rows, {"answer": "B" if function == "multiple_choice" else 5}], [f"a, row {i}" for i in range(4)]
    )


def test_auto_checks_the_answers_of_each_data_source_by_its_reward():
    rows = [{"data_source": "aime24", "answer": "25"}, {"data_source": "cais/mmlu", "answer": 1}]
    with pytest.raises(ValueError, match=r"\Ab: reward.function: the row's answer '1' is not a letter"):
        auto.check_rows("reward", rows, ["a", "b"])
    assert auto.score("#### 34", {}, "gsm8k", ["33", 34.0]) == 1.0


def test_math_verify_takes_lists_and_other_characters():
    pytest.importorskip("math_verify")
    from rlhf_spmd.rewards import math_verify

    assert math_verify.score("\\boxed{−5}", ["4", "-5"]) == 1.0 and math_verify.score("\\boxed{5}", ["4", "-5"]) == 0.0


def test_json_schema_takes_no_numbers_that_json_does_not_have():
    pytest.importorskip("jsonschema")
    assert (
        json_schema.score("NaN", {}, {"type": "number"}) == 0.0
        and json_schema.score("```JSON\n5\n```", {}, {"type": "number"}) == 1.0
    )


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("B is the correct answer.", 1.0),
        ("Rome fell in 476. Therefore, B is the answer.", 1.0),
        ("**B** is correct.", 1.0),
        ("The answer is not A but B.", 1.0),
        ("I doubt the answer is B.", 0.0),
        ("The answer is unlikely to be B.", 0.0),
        ("C is the correct answer.", 0.0),
    ],
)
def test_a_letter_that_is_called_the_answer(response: str, right: float) -> None:
    assert multiple_choice.score(response, "B") == right


@pytest.mark.parametrize(
    "response", ["#### 5:30", "#### 5 & 6", "#### 5; 6", "#### 5²", "#### 5!", "#### 5 dozen", "#### 5√2", "#### 5k"]
)
def test_a_marked_number_that_goes_on_is_no_answer(response: str) -> None:
    assert gsm8k.score(response, "5") == 0.0 and gsm8k.score("#### 5.", "5") == 1.0


def test_a_schema_given_as_text_is_refused_in_one_line():
    pytest.importorskip("jsonschema")
    for text, why in (
        ('{"a": ', "is not a JSON schema: Expecting value"),
        ("[" * 200 + "]" * 200, "nested more than 100 levels"),
    ):
        with pytest.raises(ValueError, match=why):
            json_schema.check("reward.kwargs", text)
