"""Verdicts of the built-in graders: right answers in other writings, wrong ones that look right, and answers of real data sets."""

# ruff: noqa: RUF001

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest

from answer_styles import BOXED, CHOICES, STATED, responses
from places import SHARED
from rlhf_spmd.rewards import aime, auto, exact_match, format, gsm8k, happy_words, length, math, multiple_choice, regex
from rlhf_spmd.rewards.answers import Verdict, alternatives, boxed, plain
from rlhf_spmd.rewards.config import RewardConfig

MATH500 = SHARED / "data" / "math500" / "test.jsonl"
SOLUTIONS = SHARED / "data" / "gsm8k" / "model_solutions.jsonl.gz"
LEXICON = SHARED / "data" / "tinystories-pref" / "lexicon.json"

# -- math

COLUMN = "\\begin{pmatrix} -1/3 \\\\ 2 \\end{pmatrix}"
SQUARE = "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"
TERSE = "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"
WRITINGS = [  # an answer, the same in other writings, and other answers
    ("\\frac{3}{4}", ["\\dfrac{3}{4}", "\\frac34", "0.75", "¾", "3 ÷ 4", "(3)/(4)"], ["\\frac{4}{3}"]),
    ("-\\frac{1}{2}", ["-0.5", "\\frac{-1}{2}", "\\frac{1}{-2}", "-\\frac12"], ["\\frac12"]),
    ("5", ["\\(5\\)", "x = 5", "+5", "(5)", "**5**", "5^{\\circ}", "{5}"], ["\\(5\\) or \\(6\\)", "-5", "5\\mathrm{i}", "5m"]),
    ("\\frac{3}{2}", ["3/2", "1\\frac{1}{2}", "1 1/2", "1½"], ["\\frac{11}{2}"]),
    ("1234", ["1,234", "1,\\!234", "1{,}234"], []),
    ("12345", ["12{,}345"], []),
    ("1234567", ["1,234,567", "1{,}234{,}567"], []),
    ("11111111100", ["11,\\! 111,\\! 111,\\! 100"], []),
    ("12500", ["12\u202f500", "12 500", "12,\\!500"], []),
    ("1000, 2000", ["1,000, 2,000"], []),
    ("\\$18.90", ["18.90 dollars", "18.9"], []),
    ("50\\%", ["50", "50 percent"], []),
    ("90^\\circ", ["90", "90°"], []),
    ("10\\text{ inches}", ["10"], []),
    ("15\\mbox{ cm}^2", ["15", "15 cm²", "15 \\text{ square centimeters}."], ["15\\text{ cm}^3"]),
    ("15\\text{ cm}", [], ["15 inches"]),
    ("60\\text{ miles per hour}", ["60"], ["60 km / h"]),
    ("9 gallons / miles per hour", [], ["9 cups"]),
    ("2 mi", ["2", "2 miles"], ["2mi", "2 km"]),
    ("\\sqrt[3]{2}", ["\\sqrt[3]2", "2^{1/3}", "∛2"], ["\\sqrt{2}", "\\sqrt[3]{3}"]),
    ("\\log_2 3", ["\\log_{2}3", "\\frac{\\ln 3}{\\ln 2}"], ["\\log_3 2", "\\log 3"]),
    ("x^2-1", ["(x-1)(x+1)", "-1+x^2"], ["x^2+1", "(x-1)^2"]),
    ("2^{10}", ["1024", "4^5", "2^9 + 2^9"], ["2^{11}", "210"]),
    ("\\frac{1}{3}", [], ["0.33"]),
    ("1011_2", [], ["1011_3"]),
    (".0000672", ["6.72 \\times 10^{-5}"], [".0000673"]),
    ("1 - 2^{-2^{2001}}", [], ["1"]),  # not computed: it would take minutes
    ("10^{-30}", ["1 \\times 10^{-30}"], ["10^{-31}", "0"]),
    ("12345678", [], ["12345679"]),
    ("18", [], ["18 × 2", "18½", "18 \\text{ million}", "18 or 7"]),
    ("3\\pi", ["3\\pi\\text{ cm}^2"], []),
    ("3", [], ["3\\mathrm{e}", "3\\textbf{x}"]),
    ("\\text{Evelyn}", ["Evelyn"], []),
    ("\\text{(C)}", ["(C)", "C"], []),
    ("\\text{even}", ["Even"], []),
    ("x^2", ["f(x) = x^2", "x^{2}"], ["x^3"]),
    ("x^{23}", [], ["x^{2}3"]),
    ("10^3", ["10^{3}"], []),
    ("1011_2", ["1011_{2}"], []),
    ("2000", ["2 \\times 10^{3}"], []),
    ("3.4 \\times 10^{-31}", [], ["3.4 \\times 10^{-3}1"]),
    ("7", ["7.", "7\\,", "7\\ ", "7\\;.", "7~", "7\\quad", "\\(7\\,\\)", "$7\\!$"], ["7!", "7\\,7"]),
    ("12\\,", ["12"], []),
    ("\\$20", ["20 dollars", "20"], ["20 cents", "20 euros"]),
    ("20^\\circ", ["20 degrees", "20"], ["20 cm", "20 radians"]),
    ("12 h", ["12 hours"], ["12 minutes", "12"]),
    ("5 m", ["5 meters"], ["5 miles"]),
    ("5cm", ["5 cm", "5", "5\\;cm"], ["5 m", "5mm"]),
    ("12\\,\\text{cm}", ["12", "12~\\text{cm}"], ["12\\, \\text{m}"]),
    ("(1,2)\\,", ["(1,2)", "(1,\\,2)"], []),
    ("\\frac{1}{2}\\;", ["0.5"], []),
    ("-72", ["−72", "–72"], []),
    ("72", ["７２", "\u200b72\u00a0"], ["−72", "7 2", "72²"]),
    ("23", [], ["2 3", "2\\cdot 3"]),
    ("57", [], ["5 \\text{ or } 7"]),
    ("1/2", [], ["2 ÷ 1"]),
    ("1", [], ["1/0"]),
    ("", [], [""]),
    ("9" * 5000, [], ["9" * 4999]),
    ("2+3i", ["2+3\\mathrm{i}"], []),
    ("\\sqrt{2}", ["\\sqrt2"], []),
    ("√12", [], ["√1 2"]),
    ("\\frac{\\sqrt{3}}{2}", ["√3/2"], []),
    ("16\\sqrt{3}", ["16*sqrt(3)"], ["16\\sqrt{13}"]),
    ("16\\sqrt{13}", ["16 \\cdot √13"], []),
    ("12\\pi", ["12 × π"], []),
    ("-\\frac{\\pi}{6}", ["\\frac{-π}{6}"], []),
    ("\\frac{\\pi}{2}", ["\\frac\\pi2"], []),
    ("\\frac{11+9a}{20}", ["(11+9a)/20"], []),
    ("5x^{10}", ["5x¹⁰"], []),
    ("2\\alpha", ["2α"], []),
    ("\\mathbb{R}", ["ℝ"], []),
    ("(a+5)(b+2)", [], ["a+5)(b+2"]),
    ("X", [], ["x"]),
    ("xy", ["x \\cdot y", "yx"], ["x+y"]),
    ("Yes", ["yes", "\\text{Yes}"], ["No"]),
    ("(3,\\frac{\\pi}{2})", ["\\left( 3, \\frac{\\pi}{2} \\right)"], []),
    ("(1, \\frac12)", ["(1, 0.5)"], []),
    ("(1,2)", [], ["(2,1)", "[1,2]", "(1,2]"]),
    ("(1,-2)", ["(x, y) = (1, −2)"], []),
    ("(3100)", [], ["(3,100)"]),
    ("1,2", ["2, 1", "1 \\text{ or } 2"], ["x=2,y=1", "12"]),
    ("1/3, 0.5", ["\\frac12, 1/3"], []),
    ("\\{1,3\\}", ["\\{3, 1\\}"], ["\\{1,2,3\\}"]),
    ("1,2,3", ["x=3, x=1, x=2"], []),
    ("3, 5, 7", ["7; 5 and 3", "x \\in \\lbrace 3, 5, 7 \\rbrace"], []),
    ("y=2,x=1", ["x=1,y=2"], []),
    ("1 \\pm \\sqrt{19}", ["1-\\sqrt{19}, 1+\\sqrt{19}"], ["1+\\sqrt{19}"]),
    ("\\{1\\pm\\sqrt{5},-2\\}", ["-2, 1+√5, 1-√5"], []),
    ("[-2,7]", ["x \\in [-2,7]"], []),
    ("(2,\\infty)", ["(2, +∞)"], []),
    ("(-\\infty, 2)", [], ["(\\infty, 2)"]),
    ("(0,9)", [], ["(0,9", "\\{0,9\\}"]),
    ("(0,9) \\cup (9,36)", ["(9,36)∪(0,9)", "x \\in (0,9) U (9,36)"], ["(0,9) \\cap (9,36)", "(0,9) \\cup [9,36)"]),
    ("x \\leq 5", ["5 ≥ x"], ["x ≥ 5", "x < 5"]),
    ("y=2x+1", [], ["x=2x+1"]),
    (
        COLUMN,
        ["\\begin{pmatrix}-1/3\\\\2\\end{pmatrix}", "\\begin{bmatrix} -\\frac{1}{3} \\\\[4pt] 2.0 \\\\ \\end{bmatrix}"],
        [],
    ),
    (COLUMN, ["\\left(\\begin{array}{c} -\\dfrac13 \\\\\n 2 \\end{array}\\right)"], ["(-1/3, 2)"]),
    (COLUMN, [], ["\\begin{pmatrix} 2 \\\\ -1/3 \\end{pmatrix}", "\\begin{pmatrix} -1/3 & 2 \\end{pmatrix}"]),
    (SQUARE, [TERSE, f"B = {SQUARE}"], ["\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}"]),
    (SQUARE, [], ["\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}", "\\begin{pmatrix} 1 & 2 & 3 & 4 \\end{pmatrix}"]),
    ("\\begin{pmatrix} 1 & 234 \\end{pmatrix}", [], ["\\begin{pmatrix} 1234 \\end{pmatrix}"]),
]


@pytest.mark.parametrize(("answer", "same", "other"), WRITINGS, ids=[row[0][:40] for row in WRITINGS])
def test_math_takes_an_answer_in_other_writings_and_no_other_answer(answer, same, other):
    assert [text for text in same if not (math.equal(answer, text) and math.equal(text, answer))] == []
    assert [text for text in same if math.score(f"so \\boxed{{{text}}}", answer) != 1.0] == []
    assert [text for text in other if math.equal(answer, text) or math.equal(text, answer)] == []
    assert [text for text in other if math.score(f"so \\boxed{{{text}}}", answer) != 0.0] == []


def test_math_reads_the_last_complete_box_and_boxes_that_are_joined_as_one_list():
    assert math.score("\\boxed{1}, no: \\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt2}") == 1.0
    assert math.score("\\boxed{2} and \\boxed{\\frac{1}{2", "2") == 0.0  # cut off
    assert math.score("the answer is 2", "2") == 0.0 and math.flexible("So the answer is **2**", "2") == 1.0
    assert math.score("\\boxed 5", "... so \\boxed{5}.") == 1.0
    assert math.flexible("Answer: 3\nAnswer: $4$", "4") == 1.0 and math.flexible("4", "4") == 0.0
    assert math.score("$x = \\boxed{1}$ and $x = \\boxed{-2}$", "-2") == 1.0  # not joined: more stands between
    assert math.score("\\boxed{1}, \\boxed{-2}", "-2, 1") == math.score("\\boxed{1} \\text{ and } \\boxed{-2}", "-2, 1") == 1.0
    assert math.score("\\boxed{1} or \\boxed{-2}", "-2") == 0.0
    assert math.score("\\boxed{0}", "(DN)^k = 0") == 0.0 and math.score("\\boxed{2+3=5}", "5") == 1.0
    assert math.exact("\\boxed{ 1 /2}", "1/2") == 1.0 and math.exact("\\boxed{0.5}", "1/2") == 0.0
    assert boxed("\\boxed{\\left\\{ 1 \\right.}") == "\\left\\{ 1 \\right."


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Final Answer: the answer is 5", True),
        ("My answer: I think the answer is 5", True),
        ("Final Answer: The final answer is $5$. I hope it is correct.", True),
        ("The answer is \\(5\\).", True),
        ("The answer is\n\\[\n5\n\\]", True),
        ("The answer is **5**. That is my final answer.", True),
        ("**Answer**: 5", True),
        ("The answer is 5.5. That is it.", False),
        ("Answer: 5 or 6", False),
        ("Answer: $5$ or $6$", False),
        ("Answer: 5 million", False),
        ("Answer: 5, and the answer is 6", False),
        ("The answer is not 5", False),
        ("Answer: 5\n\nTo check the answer, plug it in.", True),
        ("The answer is 5. I am confident that this answer is correct.", True),
        ("The answer is 5. This answer is 100% right. The answer is correct.", True),
        ("The answer is $5$, because 2 + 3 = 5.", True),
        ("The answer is **5** million", False),
        ("**Final Answer**\n\n5", True),
        ("So 2 + 3.\nAnswer\n5", True),
        ("final answer\n\n5", True),
        ("Answer: 7\n\nAnswer: 5", True),
        ("The answer is 5. Wait, no: the answer is 6.", False),
        ("The answer is $5$ times 2", False),
        ("answer" + "\n" * 4_000, False),  # not in their cube
    ],
)
def test_what_is_said_is_one_answer_of_its_sentence(response, right):
    assert math.flexible(response, "5") == aime.score(response, "5") == right


@pytest.mark.skipif(not MATH500.exists(), reason="needs the data set that lies beside the repository")
def test_math_on_the_answers_of_math500():
    rows = [json.loads(line) for line in MATH500.read_text().splitlines()]
    assert len(rows) == 500
    assert [row["answer"] for row in rows if math.score(row["solution"], row["answer"]) != 1.0] == []
    assert [row["answer"] for row in rows if math.score(f"\\boxed{{ {row['answer']} }}.", row["solution"]) != 1.0] == []
    answers = sorted({row["answer"] for row in rows})[::4]
    assert [pair for pair in pairwise(answers) if math.equal(*pair)] == []
    # another number in place of the last digit
    digits = {a: max((i for i, character in enumerate(a) if character in "0123456789"), default=-1) for a in answers}
    perturbed = [(a, a[:i] + str((int(a[i]) + 1) % 10) + a[i + 1 :]) for a, i in digits.items() if i >= 0]
    assert len(perturbed) > 55 and [pair for pair in perturbed if math.equal(*pair)] == []
    changes = ("×2", "÷2", "²", "½", " + 1", ", 1", " or 7", " \\text{ million}")
    assert [
        a + change for a in answers[::2] if a not in ("0", "1", "-1") for change in changes if math.equal(a, a + change)
    ] == []


ROWS = [
    ("5", "6"),
    ("\\frac{3}{4}", "\\frac{4}{3}"),
    ("x^2-1", "x^2+1"),
    ("\\left(1,-2\\right)", "\\left(2,-1\\right)"),
    ("12,500", "12,501"),
    ("2\\sqrt{3}", "2\\sqrt{2}"),
]


@pytest.mark.parametrize(
    ("reward", "forms", "rows"),
    [
        (math.score, BOXED, ROWS),
        (math.flexible, STATED, ROWS),
        (aime.score, (*BOXED, *STATED), [("25", "52")]),
        (multiple_choice.score, CHOICES, [("B", "C"), ("A", "D")]),
        (multiple_choice.sentences, CHOICES, [("A", "B")]),
    ],
)
def test_sentences_around_an_answer_change_no_verdict(reward, forms, rows):
    """In the ten styles of ``answer_styles``: no right answer is missed, and no wrong one has a point."""
    for answer, other in rows:
        assert [text for text in responses(answer, forms) if reward(text, answer) != 1.0] == []
        assert [text for text in responses(other, forms) if reward(text, answer) != 0.0] == []


@pytest.mark.parametrize(
    ("reward", "truth", "texts", "answers"),
    [
        (math.score, "5", ["\\boxed{5}", "\\boxed{x=5}", "5", "\\boxed{1/2}", "\\boxed{0.5}"], ["5", "5", None, "0.5", "0.5"]),
        (math.exact, "5", ["\\boxed{ 5 }", "\\boxed{x=5}"], ["5", "x=5"]),
        (gsm8k.score, "5", ["#### 5", "#### 5.0", "#### 10", "5"], ["5", "5", "10", None]),
        (aime.score, "5", ["\\boxed{005}", "\\boxed{x+1}", ""], ["5", "x+1", None]),
        (multiple_choice.score, "B", ["Answer: B", "(b)", "The answer is B."], ["B", "B", None]),
        (exact_match.score, "5", [" 5", "5.", ""], ["5", "5.", None]),
    ],
)
def test_a_verdict_has_the_answer_that_was_read(reward, truth, texts, answers):
    verdicts = [reward(text, truth) for text in texts]
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert [verdict.answer for verdict in verdicts] == answers


@pytest.mark.parametrize(
    "part", ["\\", "{", "(", "1,", "ab", " ", "\\alpha", "\\frac{-", "\\begin{pmatrix}", "\\text{and ", "5 cm ", "\\cup"]
)
def test_no_answer_takes_time_that_grows_beyond_its_length(part):
    """A regular expression that backtracks over 20,000 characters would take minutes, beyond a reward's time limit."""
    for size in (390, 20_000):
        assert math.flexible("answer: " + part * (size // len(part)) + "x", "5") == 0.0


# -- aime and gsm8k


def test_aime():
    right = [
        "\\boxed{m+n=25}",
        "The answer is $m+n=25$.",
        "\\boxed{25 cm}",
        "\\boxed{25\\text{ cm}}",
        "The answer is 25 degrees.",
    ]
    right += ["\\boxed{25}", "Answer: 25.", "\\boxed{n = 25}", "Answer：２５", "\\boxed{(25)}"]
    assert [text for text in right if aime.score(text, "025") != 1.0 or aime.score(text, 25) != 1.0] == []
    assert [
        text
        for text in ("\\boxed{26}", "25", "\\boxed{25 × 2}", "\\boxed{25 million}", "\\boxed{2=25}", "\\boxed{−25}")
        if aime.score(text, "025") != 0.0
    ] == []
    with pytest.raises(ValueError, match="is not a whole number"):
        aime.score("\\boxed{1}", "x+1")


@pytest.mark.parametrize(
    ("strict", "flexible", "responses"),
    [  # the marked number, and the last one
        (72, 72, ["so 70 + 2 = 72\n#### 72", "#### 71\nno, wait\n#### 72.", "####72.0", "#### $72", "#### ７２", "#### \\$72"]),
        (
            72,
            72,
            ["#### **72**", "#### €72", "#### 72 apples, all red", "#### 72 apples - fewer", "#### 72 (in cm²)", "#### 72%"],
        ),
        (-72, -72, ["#### -72", "#### −72"]),
        (71, 71, ["#### 72\n#### 71"]),
        (1072, 1072, ["#### $1,072", "#### 1\u202f072"]),
        (1234567.5, 1234567.5, ["#### 1,234,567.50"]),
        (2.5, 2.5, ["#### 2½"]),
        (None, 72, ["the answer is 72", "72 #### none", "so 5-72", "takes 10–72 hours", "#### 72 million"]),
        (None, 2, ["#### 72 × 2", "#### 72 x 2", "#### 72 \\times 2", "#### 72÷2", "#### 72/2", "#### 72–2", "#### 7,2"]),
        (None, 3, ["#### 72-3", "#### 72 - 3"]),
        (None, 73, ["#### 72 or 73", "#### 72, 73"]),
        (None, None, ["", ".,."]),
    ],
)
def test_gsm8k_reads_numbers_and_not_formulas(strict, flexible, responses):
    wanted = [None if value is None else Decimal(str(value)) for value in (strict, flexible)]
    assert [text for text in responses if [gsm8k.marked_number(text), gsm8k.last_number(text)] != wanted] == []
    for answer in ("72", 72, "He has 36*2 = <<36*2=72>>72.\n#### 72"):
        assert {gsm8k.score(text, answer) for text in responses} == {float(strict == 72)}
        assert {gsm8k.flexible(text, answer) for text in responses} == {float(flexible == 72)}


def test_gsm8k_on_numbers_that_go_on_and_on_other_answers():
    more = ["#### 5:30", "#### 5 & 6", "#### 5; 6", "#### 5²", "#### 5!", "#### 5 dozen", "#### 5√2", "#### 5k", "#### 5e3"]
    assert [text for text in more if gsm8k.score(text, "5") != 0.0] == [] and gsm8k.score("#### 5.", "5") == 1.0
    assert gsm8k.score("#### 1,234,000", "#### 1234000") == gsm8k.score("#### -5", "#### -5") == 1.0
    for answer in (None, "no number"):
        with pytest.raises(ValueError, match="answer"):
            gsm8k.score("#### 5", answer)


@pytest.mark.skipif(not SOLUTIONS.exists(), reason="needs the data set that lies beside the repository")
def test_gsm8k_agrees_with_the_published_judgement_of_real_model_output():
    with gzip.open(SOLUTIONS, "rt") as file:
        solutions = [json.loads(line) for line in file]
    wrong = []
    for item in solutions:
        answer = "####".join(item["ground_truth"].rsplit("A:", 1))
        response = "####".join(item["solution"].rsplit("A:", 1))
        if bool(gsm8k.score(response, answer)) != item["is_correct"]:
            wrong.append((item["solution"][-40:], item["ground_truth"][-20:]))
    assert len(solutions) == 5276 and not wrong, wrong[:5]


# -- multiple choice

FORMS = [  # the letter that a form states, or none
    ("B", ["B", "b", "**B**", "B) Paris", "B. Paris", "(B) Paris", "[[B]]", "\\boxed{B) Rome}", "\\boxed{\\text{B. Rome}}"]),
    ("B", ["Answer: b", "Answer:\n\n**B**", "Answer：（B）", "The correct answer is:\n\n**B) Rome**", '{"answer": "B"}']),
    (
        "C",
        ["Answer: C", "Answer: C\n\nOption A: wrong.\nOption D: wrong.", "Answer: C. Option B would be correct if x were 2."],
    ),
    (
        "D",
        ["**Answer:** D", "(D)", "Answer: D\n\nExplanation: Option A is correct for gases.", "I take A.\n\nFinal answer: (D)."],
    ),
    (
        "B",
        [
            "Answer: B because of x",
            "Answer: B, because",
            "Answer: B - Paris",
            "Answer: B \u2014 Paris",
            "Answer: B, as A is wrong",
        ],
    ),
    (None, ["A) is increasing", "Answer: A) is wrong"]),
    ("A", ["I think \\boxed{\\text{A}}", "Answer: A", "Answer: a"]),
    (None, ["Answer: B and D", "Answer: B, D", "\\boxed{B, D}", "(A) or (B)", "Answer: **A** or **B**", "A. red\nB. blue"]),
    (None, ["Answer: A\nAnswer: B", "\\boxed{A}\n\nAnswer: B", "[[A]] [[B]]", "\\boxed{5}\nAnswer: A", "Answer: Z"]),
    (None, ["Answer: a good one", "A good question", "Answer: A normal one", "Answer: A good choice would be B"]),
]
LETTERS = [  # what sentences say; for forms alone they have no answer
    ("B", ["A: The answer is B.", "Answer: A) is wrong, B) is right", "A) Rome is too far, so the answer is B."]),
    ("C", ["A) is too small, so the answer is C."]),
    ("B", ["The answer is (B).", "The answer is 'B'.", "The answer is “B”.", "The answer is option B."]),
    (
        "B",
        [
            "I choose B.",
            "B is the correct answer.",
            "**B** is correct.",
            "Therefore B is correct.",
            "So B is the correct answer.",
        ],
    ),
    ("B", ["Rome fell in 476. Therefore, B is the answer.", "First choice (A). No, the answer is B"]),
    ("B", ["A is wrong, so the answer must be B", "The answer is A. Wait, actually option B is correct."]),
    ("C", ["The answer is C and not B", "The answer is C. Option B is wrong.", "Option B is wrong, so the answer is C"]),
    ("C", ["The answer is C.\nOption B has too many electrons.", "The correct answer is C. Choice A is not correct."]),
    ("C", ["Choice B is wrong; choice C is right", "Option C is right and B is wrong. Option A is long."]),
    ("C", ["The answer is C. Option A is right about the color but wrong about the size."]),
    ("D", ["The correct answer is D. Choice B is the second best answer.", "Option C is incorrect. Option D is correct."]),
    ("A", ["The answer is A because of that"]),
    (None, ["The answer is 'B', or perhaps 'D'.", "The answer could be A or B", "I don't choose B", "It is not (A)"]),
    (None, ["The answer is anything but B.", "The answer is not A", "I doubt the answer is B.", "Option A cannot be right"]),
    (None, ["The answer cannot be B", "The answer is never B.", "The answer is unlikely to be B."]),
    (None, ["The answer is Z", "the answer is a number"]),
]


@pytest.mark.parametrize(("read", "table"), [("stated", FORMS), ("letter", FORMS), ("letter", LETTERS)])
def test_multiple_choice_reads_forms_and_if_asked_sentences(read, table):
    found = [(getattr(multiple_choice, read)(text), letter, text) for letter, texts in table for text in texts]
    assert [row for row in found if row[0] != row[1]] == []
    assert {multiple_choice.stated(text) for _, texts in LETTERS for text in texts} == {None}
    reward = multiple_choice.score if read == "stated" else multiple_choice.sentences
    for letter, texts in table:
        assert {reward(text, f"({letter or 'B'})") for text in texts} == {float(letter is not None)}
        assert {reward(text, "E") for text in texts} == {0.0}
    with pytest.raises(ValueError, match="is not one of the choices ABCD"):
        reward("A", "E", choices="ABCD")
    assert multiple_choice.right_letters(["B) is increasing"]) == ["B"]


# -- other graders


def test_form_pattern_and_length():
    assert format.score("<think>a\nb</think>\n<answer>7</answer>") == 1.0
    wrong = ["<think>a</think><answer>7</answer> more", "<think>a<think>b</think></think><answer>7</answer>", "7"]
    wrong += ["<answer>7</answer><think>a</think>", "<think></think><answer>7</answer>"]
    assert [text for text in wrong if format.score(text) != 0.0] == []
    assert regex.score("a=1; a=2.0", "2", pattern=r"a=([\d.]+)") == 1.0
    assert regex.score("a=2; a=1", "2", pattern=r"a=(\d)") == 0.0 and regex.score("", "2", pattern="a") == 0.0
    ids = [[0] * n for n in (0, 2, 80, 90, 95, 100, 130)]
    assert length.score(ids, max_length=95, min_length=2) == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    # DAPO's equation 13 with L_max = 100 and L_cache = 20
    expected = [0.0 if n <= 80 else (80 - n) / 20 if n <= 100 else -1.0 for n in map(len, ids)]
    assert length.overlong(ids, max_length=100, buffer=20) == expected


def test_happy_words_are_the_lexicons():
    texts = {"": 0.0, "She smiled.": 1 / 3, "Happy HAPPY happy happy!": 1.0, "sad, mad; and glad": -1 / 3, "unhappy": 0.0}
    scores = {text: happy_words.score("happy happy happy", text, {}) for text in texts}
    assert scores == pytest.approx(texts)
    if LEXICON.exists():
        lexicon = json.loads(LEXICON.read_text())
        assert set(lexicon["happy"]) == happy_words.HAPPY and set(lexicon["sad"]) == happy_words.SAD


# -- answers


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
    assert exact_match.score(" 1 2 3\n", "1 2 3") == 1.0 and exact_match.score("1 2 33", "1 2 3") == 0.0
    assert exact_match.score('["a"]', '["a"]') == 1.0 and exact_match.score("a", '["a"]') == 0.0
    assert exact_match.score("72.0", 72.0) == exact_match.score(" 72 ", 72.0) == 1.0 and exact_match.score("7", 72.0) == 0.0


# -- answers that are refused before a run


@pytest.mark.parametrize(
    "function", ["math", "math:flexible", "exact_match", "gsm8k", "gsm8k:flexible", "aime", "multiple_choice", "auto"]
)
def test_an_answer_that_is_a_dict_ends_the_run_before_its_start(function):
    config = RewardConfig(function=function)
    answers = ["B" if function == "multiple_choice" else "5", {"value": "5"}]
    rows = [{"answer": answer, "data_source": "math"} for answer in answers]
    config.check_rows("reward", rows[:1], ["a.jsonl, row 0"])
    message = r"\Aa.jsonl, row 1: reward.function: the answer \{'value': '5'\} is [^\n]*a dict; [^\n]*\Z"
    with pytest.raises(ValueError, match=message):
        config.check_rows("reward", rows, ["a.jsonl, row 0", "a.jsonl, row 1"])


@pytest.mark.parametrize(
    ("function", "answer"), [("gsm8k", "many"), ("aime", "x+1"), ("multiple_choice", 2), ("multiple_choice", "Rome")]
)
def test_answers_that_a_reward_can_read_in_no_row_end_the_run_before_its_start(function, answer):
    config, rows = RewardConfig(function=function), [{"answer": answer}, {"answer": answer}, {"answer": None}]
    with pytest.raises(ValueError, match=r"\Aa, row 0: reward.function: [^\n]*; all rows are like this [^\n]*\Z"):
        config.check_rows("reward", rows, ["a, row 0", "a, row 1", "a, row 2"])
    rows.append({"answer": "B" if function == "multiple_choice" else 5})
    config.check_rows("reward", rows, [f"a, row {i}" for i in range(4)])


def test_auto_checks_the_answers_of_each_data_source_by_its_reward():
    rows = [{"data_source": "aime24", "answer": "25"}, {"data_source": "cais/mmlu", "answer": 1}]
    with pytest.raises(ValueError, match=r"\Ab: reward.function: the row's answer '1' is not a letter"):
        auto.check_rows("reward", rows, ["a", "b"])
    assert auto.score("#### 34", {}, "gsm8k", ["33", 34.0]) == 1.0
