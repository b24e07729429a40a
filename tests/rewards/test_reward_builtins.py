"""Built-in rewards: verdicts on answers written by hand and on real ones, settings, routing by ``data_source``, the HTTP reward."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from places import ROOT
from rlhf_spmd import reward_server
from rlhf_spmd.rewards import aime, auto, format, http, length, math, multiple_choice, regex
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.runner import RewardRunner

MATH500 = ROOT.parent / "shared" / "data" / "math500" / "test.jsonl"


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("\\dfrac{3}{4}", "\\frac34", True),
        ("0.75", "\\frac{3}{4}", True),
        ("-\\frac{1}{2}", "-0.5", True),
        ("\\frac{-1}{2}", "-\\frac12", True),
        ("\\frac{1}{-2}", "-\\frac12", True),
        ("\\frac{1}{-2}", "\\frac12", False),
        ("\\(5\\)", "5", True),
        ("\\(5\\) or \\(6\\)", "5", False),
        ("1\\frac{1}{2}", "3/2", True),
        ("1,234", "1234", True),
        ("12{,}345", "12345", True),
        ("\\$32.50", "32.5", True),
        ("50\\%", "50", True),
        ("90^\\circ", "90", True),
        ("10\\text{ inches}", "10", True),
        ("15\\mbox{ cm}^2", "15", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\text{(C)}", "(C)", True),
        ("x = 5", "5", True),
        ("f(x) = x^2", "x^2", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("(1, 0.5)", "(1, \\frac12)", True),
        ("2, 1", "1,2", True),
        ("\\frac12, 1/3", "1/3, 0.5", True),
        ("1 \\text{ or } 2", "1, 2", True),
        ("\\{3, 1\\}", "\\{1,3\\}", True),
        ("\\sqrt2", "\\sqrt{2}", True),
        ("2 \\times 10^{3}", "2000", True),
        ("7.", "7", True),
        ("1,234,567", "1234567", True),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100", True),
        ("1{,}234{,}567", "1234567", True),
        ("1,\\!234", "1{,}234", True),
        ("2+3\\mathrm{i}", "2+3i", True),
        ("1 1/2", "\\frac{3}{2}", True),
        ("3\\pi\\text{ cm}^2", "3\\pi", True),
        ("60\\text{ miles per hour}", "60", True),
        ("x^{2}", "x^2", True),
        ("1011_{2}", "1011_2", True),
        ("10^{3}", "10^3", True),
        ("x=3, x=1, x=2", "1,2,3", True),
        ("x=1,y=2", "y=2,x=1", True),
        ("x \\in [-2,7]", "[-2,7]", True),
        ("x=2,y=1", "1,2", False),
        ("5\\mathrm{i}", "5", False),
        ("5\\text{ million}", "5", False),
        ("3\\mathrm{e}", "3", False),
        ("3\\textbf{x}", "3", False),
        ("1 1/2", "\\frac{11}{2}", False),
        ("2 3", "23", False),
        ("(3,100)", "(3100)", False),
        ("y=2x+1", "x=2x+1", False),
        ("x^{2}3", "x^{23}", False),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "[1,2]", False),
        ("(1,2]", "(1,2)", False),
        ("1,2", "12", False),
        ("5 \\text{ or } 7", "57", False),
        ("\\frac{3}{4}", "\\frac{4}{3}", False),
        ("-5", "5", False),
        ("x^2", "x^3", False),
        ("1/0", "1", False),
        ("", "", False),
        ("9" * 5000, "9" * 4999, False),
    ],
)
def test_math_answers(given, answer, same):
    assert math.equal(given, answer) is same and math.equal(answer, given) is same


def test_math_takes_the_last_whole_box():
    assert math.score("\\boxed{1}, no: \\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt2}") == 1.0
    assert math.score("\\boxed{2} and \\boxed{\\frac{1}{2", "2") == 0.0  # cut off
    assert math.score("the answer is 2", "2") == 0.0 and math.flexible("So the answer is **2**", "2") == 1.0
    assert math.score("\\boxed 5", "... so \\boxed{5}.") == 1.0
    assert math.flexible("Answer: 3\nAnswer: $4$", "4") == 1.0 and math.flexible("4", "4") == 0.0


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
    # every answer against all the others: equal are those that differ in their writing only
    answers = sorted({row["answer"] for row in rows})
    pairs = [(a, b) for i, a in enumerate(answers) for b in answers[i + 1 :] if math.equal(a, b)]
    assert len(answers) == 301 and len(pairs) == 12, pairs
    # another number in place of the last digit
    perturbed = [(a, a[:i] + str((int(a[i]) + 1) % 10) + a[i + 1 :]) for a in answers for i in [_last_digit(a)] if i >= 0]
    assert len(perturbed) > 230 and [pair for pair in perturbed if math.equal(*pair)] == []


def _last_digit(text):
    return max((i for i, character in enumerate(text) if character in "0123456789"), default=-1)


def test_aime():
    assert aime.score("\\boxed{25}", "025") == 1.0 and aime.score("Answer: 25.", 25) == 1.0
    assert aime.score("\\boxed{26}", "025") == 0.0 and aime.score("25", "025") == 0.0
    with pytest.raises(ValueError, match="is not a whole number"):
        aime.score("\\boxed{1}", "x+1")


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("The answer is (B).", "B"),
        ("Answer: C", "C"),
        ("**Answer:** D", "D"),
        ("I think \\boxed{\\text{A}}", "A"),
        ("B", "B"),
        ("(D)", "D"),
        ("First choice (A). No, the answer is B", "B"),
        ("It is (C), as (C) says", "C"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        ("(B) Paris", "B"),
        ("The answer is I think B", "B"),
        ("The answer is A because of that", "A"),
        ("Answer: A good choice would be B", "B"),
        ("A is wrong, so the answer must be B", "B"),
        ("The answer is option B.", "B"),
        ("It is not (A) but (B)", "B"),
        ("It is not (A)", None),
        ("The answer is not A", None),
        ("A. red\nB. blue", None),
        ("(A) or (B)", None),
        ("A good question", None),
        ("The answer is Z", None),
        ("the answer is a number", None),
        ("The answer is C. Option B is wrong.", "C"),
        ("The answer is C.\nOption B has too many electrons.", "C"),
        ("The correct answer is C. Choice A is not correct.", "C"),
        ("Answer: C\n\nOption A: wrong.\nOption D: wrong.", "C"),
        ("The answer is C and not B", "C"),
        ("Choice B is wrong; choice C is right", "C"),
        ("Option B is wrong, so the answer is C", "C"),
        ("Option C is right and B is wrong. Option A is long.", "C"),
        ("It is not option A but option C", "C"),
        ("Option A cannot be right", None),
        ("The answer cannot be B", None),
        ("The answer is never B.", None),
        ("The answer could be A or B", None),
        ("Answer: **A** or **B**", None),
        ("Answer: A normal one", None),
    ],
)
def test_multiple_choice(response, found):
    assert multiple_choice.letter(response) == found
    if found:
        assert multiple_choice.score(response, f"({found})") == 1.0
        assert multiple_choice.score(response, "E") == 0.0


def test_multiple_choice_of_other_answers():
    with pytest.raises(ValueError, match="is not one of the choices ABCD"):
        multiple_choice.score("A", "E", choices="ABCD")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>", 1.0),
        ("<think>a</think><answer>7</answer> more", 0.0),
        ("<think>a<think>b</think></think><answer>7</answer>", 0.0),
        ("<answer>7</answer><think>a</think>", 0.0),
        ("<think></think><answer>7</answer>", 0.0),
        ("7", 0.0),
    ],
)
def test_format(response, expected):
    assert format.score(response) == expected


def test_regex_and_length():
    assert regex.score("a=1; a=2.0", "2", pattern=r"a=([\d.]+)") == 1.0
    assert regex.score("a=2; a=1", "2", pattern=r"a=(\d)") == 0.0 and regex.score("", "2", pattern="a") == 0.0
    ids = [[0] * n for n in (0, 2, 80, 90, 95, 100, 130)]
    assert length.score(ids, max_length=95, min_length=2) == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    # DAPO's equation 13 with L_max = 100 and L_cache = 20
    expected = [0.0 if n <= 80 else (80 - n) / 20 if n <= 100 else -1.0 for n in map(len, ids)]
    assert length.overlong(ids, max_length=100, buffer=20) == expected


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("format", {"pattern": "("}, r"reward.kwargs.pattern='\(' is not a regular expression"),
        ("regex", {}, None),
        (
            "length",
            {"max_length": 5, "min_length": 6},
            r"reward.kwargs.min_length=6 must be a whole number from 0 to max_length=5",
        ),
        ("length:overlong", {"max_length": 5, "buffer": -1}, r"reward.kwargs.buffer=-1"),
        ("http", {"url": "ftp://x"}, r"reward.kwargs.url must be http:// or https://"),
        ("http", {"url": "http://x", "token_env": "NO_SUCH_TOKEN"}, r"token_env='NO_SUCH_TOKEN': there is no such variable"),
        ("code", {"time_s": 0}, r"reward.kwargs.time_s=0 must be above 0"),
        ("http", {}, r"reward.function='http' takes .*missing 1 required positional argument: 'url'"),
        ("http", {"url": "http://x", "batch_size": "many"}, r"reward.function='http' takes .*not supported between"),
        ("math", {"x": 1}, r"kwargs.x is not one of its settings"),
    ],
)
def test_settings_are_checked_before_the_run(function, kwargs, message):
    config = RewardConfig(function=function, kwargs=kwargs)
    rows = [{"answer": "1", "data_source": None}]
    with pytest.raises(ValueError, match=message or "no row has pattern"):
        config.check_rows("reward", rows) if message is None else config.check()


def test_a_library_that_is_absent_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from rlhf_spmd.rewards import json_schema, math_verify

    for module in (math_verify, json_schema):
        with pytest.raises(ValueError, match=r"needs the library: pip install 'rlhf_spmd\[rewards\]'"):
            module.check("reward.kwargs")


def test_math_verify():
    pytest.importorskip("math_verify")
    rows = [("", "\\boxed{(x-1)(x+1)}", {"answer": "x^2-1"}), ("", "\\boxed{3}", {"answer": "4"}), ("", "no", {"answer": "1"})]
    with RewardRunner(RewardConfig(function="math_verify", timeout_s=60.0)) as runner:
        assert runner.score(rows).scores == [1.0, 0.0, 0.0]


def test_json_schema():
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    rows = [("", text, {}) for text in ('{"a": 1}', '```json\n{"a": 2}\n```', '{"a": "1"}', "{", "[" * 100_000)]
    rows.append(("", "5", {"schema": '{"type": "integer"}'}))
    with RewardRunner(RewardConfig(function="json_schema", kwargs={"schema": schema}, timeout_s=60.0)) as runner:
        assert runner.score(rows[:-1]).scores == [1.0, 1.0, 0.0, 0.0, 0.0]
    with RewardRunner(RewardConfig(function="json_schema", default=-9.0, timeout_s=60.0)) as runner:
        assert runner.score([rows[-1], ("", "5", {})]).scores == [1.0, -9.0]
    with pytest.raises(ValueError, match=r"\Areward.kwargs.schema is not a JSON schema: [^\n]*\Z"):
        RewardConfig(function="json_schema", kwargs={"schema": {"type": "no such"}}).check()


ROUTED = [
    ("openai/gsm8k", "#### 72", "72"),
    ("HuggingFaceH4/MATH-500", "\\boxed{\\frac12}", "0.5"),
    ("math_dapo", "Answer: 5", "5"),
    ("aime2024", "\\boxed{25}", "025"),
    ("numina_olympiads", "\\boxed{x}", "x"),
    ("Idavidrein/gpqa", "The answer is B", "B"),
]


def test_rows_find_their_reward_by_data_source():
    rows = [("", right, {"data_source": source, "reward_model": {"ground_truth": truth}}) for source, right, truth in ROUTED]
    rows += [("", "\\boxed{999}", row) for _, _, row in rows]
    with RewardRunner(RewardConfig(function="auto")) as runner:
        assert runner.score(rows).scores == [1.0] * 6 + [0.0] * 6
    RewardConfig(function="auto").check_rows("reward", [row for _, _, row in rows])
    unknown = [*(row for _, _, row in rows), {"data_source": "mine", "answer": "1"}]
    with pytest.raises(
        ValueError, match=r"row 12: reward.function=auto has no reward for the data_source 'mine'; it knows openai/gsm8k, "
    ):
        RewardConfig(function="auto").check_rows("reward", unknown)
    with pytest.raises(ValueError, match=r"a.parquet:3: reward.function=auto has no reward for the data_source 'mine'"):
        RewardConfig(function="auto").check_rows("reward", unknown[-2:], ["a.parquet:2", "a.parquet:3"])
    RewardConfig(function="auto", data_sources=[source for source, *_ in ROUTED]).check_rows("reward", unknown)
    assert {"lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "codecontests", "taco"} <= auto.SOURCES.keys()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "gsm8k",
            r"no row has ground_truth \(data.answer_key .*; the columns are data_source, question",
        ),
        ("code", r"a.jsonl:1: reward.function=code: the row has no tests: .*; the columns are data_source, question"),
        ("math", r"no row has ground_truth \(data.answer_key .*; the columns are data_source, question\."),
        ("auto", r"a.jsonl:1: .*no row of the data_source 'gsm8k' has an answer .*; the columns are data_source, question"),
    ],
)
def test_rows_without_answers_are_refused_before_the_start(function, message):
    rows = [{"question": "1+1", "answer": None, "data_source": "gsm8k"}] * 2
    with pytest.raises(ValueError, match=message):
        RewardConfig(function=function).check_rows("reward", rows, ["a.jsonl:1", "a.jsonl:2"])


@pytest.fixture
def reference_server(monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "a-secret")
    config = RewardConfig(function="gsm8k:flexible")
    with reward_server.serve(config.bind("reward").ready(), 0, "a-secret") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


def test_a_server_scores_in_batches_and_its_token_is_not_told(reference_server):
    rows = [("p", f"it is {i % 7}", {"answer": "3"}) for i in range(50)]
    chat = {"messages": [{"role": "user", "content": "p"}], "answer": "3"}
    settings = {"url": reference_server, "token_env": "SCORER_TOKEN", "batch_size": 8}
    with RewardRunner(RewardConfig(function="http", kwargs=settings, num_workers=2)) as runner:
        result = runner.score([*rows, ("p", "3", chat)])
        assert result.scores == [float(i % 7 == 3) for i in range(50)] + [1.0]
    with RewardRunner(RewardConfig(function="http", kwargs={"url": reference_server}, default=-9.0)) as runner:
        result = runner.score(rows[:3])  # no token: refused at once, not tried again
        assert result.scores == [-9.0] * 3 and result.failures == 3
        assert "401" in result.first_error and "a-secret" not in result.first_error


class Flaky(BaseHTTPRequestHandler):
    """Fails as the path says, then answers."""

    tries: ClassVar[dict[str, int]] = {}
    leaked: ClassVar[list[str]] = []

    def do_POST(self):
        tried = Flaky.tries[self.path] = Flaky.tries.get(self.path, 0) + 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(request["completions"])
        if self.path == "/leak":
            Flaky.leaked.append(self.headers.get("Authorization", ""))
        if self.path == "/redirect":
            self.send_response(307)
            self.send_header("Location", "/leak")
            self.end_headers()
            return
        if self.path == "/hang":
            threading.Event().wait(3)
        if self.path == "/cut":  # more is said to come than comes
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
            return
        code = 503 if self.path == "/down" or (self.path == "/late" and tried < 3) else 200
        scores = [1.0] * (number - (self.path == "/short"))
        body = {"/garbage": b"no json", "/deep": b"[" * 9000 + b"]" * 9000}.get(
            self.path, json.dumps({"scores": scores}).encode()
        )
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_server_that_fails_is_asked_again_and_then_its_rows_get_the_default(monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "a-secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        common = {"token_env": "SCORER_TOKEN", "backoff_s": 0.01, "retries": 2, "request_timeout_s": 0.5}
        for path, tries, works in (
            ("late", 3, True),
            ("down", 3, False),
            ("short", 1, False),
            ("garbage", 1, False),
            ("deep", 1, False),
            ("redirect", 1, False),
            ("hang", 3, False),
            ("cut", 3, False),
        ):
            scores = http.score(["p"] * 2, ["c"] * 2, [{}] * 2, url=f"{place}/{path}", **common)
            assert Flaky.tries[f"/{path}"] == tries
            assert [score == 1.0 for score in scores] == [works] * 2, (path, scores)
            assert "a-secret" not in str(scores)
        server.shutdown()
    assert Flaky.leaked == [] and os.environ["SCORER_TOKEN"] == "a-secret"
