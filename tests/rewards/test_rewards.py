"""What may be a reward: names, settings, functions whose arguments are bound by name, built-in rewards and their data, HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from rlhf_spmd import reward_server
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.registry import available
from rlhf_spmd.rewards import auto, gsm8k, http, json_schema, results
from rlhf_spmd.rewards.binding import bind_reward
from rlhf_spmd.rewards.config import RewardConfig, resolve_reward
from rlhf_spmd.rewards.results import RewardError, check_failures
from rlhf_spmd.rewards.runner import RewardRunner

FUNCTIONS = "reward_functions:"


def scores(function: str, rows: list[Any], **settings: Any) -> list[Any]:
    """What a worker would get of the function for all rows together."""
    return RewardConfig(function=function, **settings).bind("reward").instantiate().call(rows, 20.0)


def test_names() -> None:
    assert available("rlhf_spmd.rewards", "score") == [
        *("aime", "auto", "code", "exact_match", "format", "gsm8k", "happy_words", "http", "json_schema", "length", "math"),
        *("multiple_choice", "regex"),
    ]
    for name in ("gsm8k", "rlhf_spmd.rewards.gsm8k:score", "rlhf_spmd.rewards.gsm8k"):
        assert resolve_reward(name) is gsm8k.score
    assert resolve_reward("gsm8k:flexible") is gsm8k.flexible
    assert resolve_reward("outside.verl_reward").__name__ == "compute_score"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "gsm8"}, r"unknown reward.function 'gsm8'; did you mean 'gsm8k'\? available: aime, auto, code"),
        ({"function": "no.such.module:f"}, r"reward.function 'no.such.module' cannot be imported"),
        ({"function": "reward_functions:by_rwo"}, r"no function 'by_rwo'; did you mean 'by_row'\?"),
        ({"function": "reward_functions:NOT_A_FUNCTION"}, r"NOT_A_FUNCTION is a int, not a function"),
        ({"kwargs": {"a": 1}}, r"reward.kwargs=\{'a': 1\} does nothing without reward.function"),
        ({"function": f"{FUNCTIONS}Scaled"}, r"its constructor, with kwargs=\{\}: missing a required argument: 'scale'"),
        ({"function": f"{FUNCTIONS}Scaled", "kwargs": {"scale": 1, "scal": 2}}, r"its constructor, .*keyword argument 'scal'"),
        ({"function": f"{FUNCTIONS}NoCall"}, r"it is a class without __call__"),
        ({"function": f"{FUNCTIONS}generator"}, r"it is a generator"),
        (
            {"function": f"{FUNCTIONS}positional"},
            r"positional' takes \(prompt, response, row\): prompt cannot be given by name",
        ),
        ({"function": f"{FUNCTIONS}with_settings", "kwargs": {"bonsu": 1}}, r"kwargs.bonsu is not .*; did you mean 'bonus'\?"),
        (
            {"function": f"{FUNCTIONS}with_settings", "kwargs": {"response": "a"}},
            r"kwargs.response is not one of its settings; its settings are answer, bonus, malus",
        ),
        ({"function": f"{FUNCTIONS}with_settings", "by_group": True}, r"with reward.by_group it must take lists over rows"),
        ({"function": "format", "kwargs": {"pattern": "("}}, r"reward.kwargs.pattern='\(' is not a regular expression"),
        (
            {"function": "length:overlong", "kwargs": {"max_length": 5, "buffer": -1}},
            r"reward.kwargs.buffer=-1: must be at least 0",
        ),
        *(
            ({"function": "multiple_choice", "kwargs": {"choices": value}}, rf"reward.kwargs.choices='{value}' must be capital")
            for value in ("0123456", "abcd", "")
        ),
        ({"function": "code", "kwargs": {"time_s": 0}}, r"reward.kwargs.time_s=0.0: must be above 0"),
        ({"function": "regex"}, r"reward.function='regex' needs reward.kwargs.pattern; give a value"),
        ({"function": "length:overlong"}, r"needs reward.kwargs.max_length, reward.kwargs.buffer; give a value"),
        ({"function": "math", "kwargs": {"x": 1}}, r"kwargs.x is not one of its settings"),
        ({"function": "http"}, r"needs reward.kwargs.url; give a value"),
        ({"function": "http", "kwargs": {"url": "ftp://x"}}, r"reward.kwargs.url must be http:// or https://"),
        ({"function": "http", "kwargs": {"url": "http://x", "token_env": "NONE"}}, r"token_env='NONE': there is no such var"),
        ({"function": "http", "kwargs": {"url": "http://x", "batch_size": "many"}}, r"batch_size='many' must be an integer"),
    ],
)
def test_settings_that_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        check_tree(RewardConfig(**settings), "reward")
    assert "\n" not in str(refused.value)


def test_a_constructor_that_raises_and_a_runner_without_a_function() -> None:
    for name, kwargs, message in (("Scaled", {"scale": 0}, "ValueError: a scale of 0"), ("Ends", {}, "SystemExit: 0")):
        config = RewardConfig(function=f"{FUNCTIONS}{name}", kwargs=kwargs)
        with pytest.raises(RewardError, match=f"its constructor failed: {message}"), RewardRunner(config) as runner:
            runner.score([("p", "1", {})])
    with pytest.raises(ValueError, match=r"reward.function is not set"):
        RewardRunner(RewardConfig())


# -- arguments

VERL_ROW = {"answer": None, "data_source": "sums", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "answer": None}
BEGUN = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "h"}]}
BOX = {"role": "assistant", "content": "\\boxed{"}
CONTENTS = [("assistant", "7"), ("tool", "it is 9"), ("assistant", "8"), ("tool", "9")]
TURNS = {"completion_messages": [{"role": role, "content": content} for role, content in CONTENTS]}
ANSWERED = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]}  # not the prompt
SEVEN, NINE = ({"answer": answer, "data_source": None} for answer in "79")


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("by_name", [("p", "7", {"answer": "7"}), ("p", "8", {"answer": "7", "weight": 2.0})], [0.5, 0.0]),
        ("by_columns", [("p", "7", {"answer": "7"}), ("p", "8", {"answer": "7"})], [1.0, 0.0]),
        ("verl", [("p", "7", VERL_ROW), ("p", "8", VERL_ROW)], [{"score": 1.0, "index": 3}, {"score": 0.0, "index": 3}]),
        ("verl", [("p", "7", SEVEN), ("p", "7", NINE)], [{"score": 1.0, "index": -1}, {"score": 0.0, "index": -1}]),
        ("trl", [("p", "7", SEVEN), ("q", "7", NINE)], [1.0, 0.0]),
        (
            "trl_columns",
            [("p", "pq", {"solution": "q", "completion_ids": [1, 2]}), ("p", "r", {"solution": None, "completion_ids": [1]})],
            [3.0, None],
        ),
        ("trl_chat", [("<hi>", "hi", CHAT), ("<hi>", "ho", CHAT)], [1.0, 0.0]),
        ("trl_chat", [("<hi>h", "i", BEGUN)], [1.0]),
        ("trl_chat", [("<hi>h", "all", BEGUN | {"completion_messages": [{"role": "assistant", "content": "i"}]})], [1.0]),
        ("trl_one_bad", [("p", "5", ANSWERED)], [5.0]),
        ("trl_turns", [("<hi>", "all", CHAT | TURNS), ("p", "all", TURNS)], [1.0, 1.0]),
        ("by_columns", [("p", "all", {"answer": "7\n8"} | TURNS)], [1.0]),
        ("verl", [("p", "all", VERL_ROW | {"reward_model": {"ground_truth": "7\n8"}} | TURNS)], [{"score": 1.0, "index": 3}]),
        ("scaled", [("p", "4", {})], [{"score": 8.0, "made": 1}]),
        ("later", [("p", "1", {}), ("p", "2", {})], [1.0, 2.0]),
        ("later_batched", [("p", "1", {}), ("p", "2", {})], [1.0, 2.0]),
        ("AsyncScaled", [("p", "1", {}), ("p", "2", {})], [1.0, 2.0]),
        ("in_a_list", [("p", "1", {})], [[1.0]]),
    ],
)
def test_arguments_are_bound_by_name(name: str, rows: list[Any], expected: list[Any]) -> None:
    assert scores(f"{FUNCTIONS}{name}", rows) == expected


@pytest.mark.parametrize("function", ["math", "math:flexible", "math:exact", "aime", "auto"])
def test_mathematical_rewards_read_what_the_prompt_has_begun(function: str) -> None:
    row = {"messages": [*CHAT["messages"], BOX], "answer": "7", "data_source": "aime"}
    assert scores(function, [("<hi>\\boxed{", "7}", row), ("<hi>\\boxed{", "8}", row)]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("by_name", [("p", "7", {"answer": None})], "the row has no 'answer', which the function takes"),
        ("trl_short", [("p", "a", {})] * 2, "1 scores were returned for 2 completions"),
        ("trl_dict", [("p", "a", {})] * 2, "one dict was returned for 2 completions"),  # list() would take its keys
        ("trl_scalar", [("p", "a", {})] * 2, "one float was returned for 2 completions; return a list"),
    ],
)
def test_rows_and_results_that_do_not_fit_the_arguments(name: str, rows: list[Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        scores(f"{FUNCTIONS}{name}", rows)


def test_arguments_of_a_class_and_of_a_function_from_the_configuration() -> None:
    bound = RewardConfig(function=f"{FUNCTIONS}Scaled", kwargs={"scale": 3.0, "shift": 1.0}).bind("reward").instantiate()
    first, second = (bound.call([("p", response, {})], 20.0)[0] for response in "12")
    assert (first["score"], second["score"]) == (4.0, 7.0) and first["made"] == second["made"], "one object for all calls"
    rows = [("p", "a", {"answer": "a", "bonus": 5.0}), ("p", "b", {"answer": "a"})]
    for function, expected in (("with_settings", [2.0, -0.5]), ("any_columns", [2.0, 2.0])):
        settings = {"kwargs": {"bonus": 2.0}}
        assert scores(f"{FUNCTIONS}{function}", rows, **settings) == expected, "before a column of that name"
    with pytest.raises(ValueError, match="no row has bonus"):
        RewardConfig(function=f"{FUNCTIONS}with_settings").check_rows("reward", [{"answer": "a"}])
    with pytest.raises(ValueError, match="log_metric, which TRL passes, does not exist here; give it a default"):
        bind_reward(lambda completions, log_metric: [0.0], "f").check_rows([{"answer": "a"}])
    RewardConfig(function=f"{FUNCTIONS}with_settings", kwargs={"bonus": 1}).check_rows("reward", [{"answer": "a"}])


def test_columns_that_no_row_has_are_refused_in_one_line() -> None:
    rows = [{"answer": "7", "data_source": "sums"}, {"answer": "7", "data_source": "sums", "y": 1}]
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refused:
        RewardConfig(function=f"{FUNCTIONS}of_numbers").check_rows("rewards.cost", rows)
    line = "rewards.cost.function='reward_functions:of_numbers' takes (x, y, z): no row has x, z; the columns are answer, "
    allowed = "Arguments may be prompt, response, row; or verl's data_source, solution_str, ground_truth, extra_info; or TRL's"
    assert str(refused.value).startswith(f"{line}data_source, y. {allowed}")
    for name in ("verl", "by_name", "by_columns", "trl", "trl_chat"):
        RewardConfig(function=f"{FUNCTIONS}{name}", data_sources=["sums"]).check_rows("reward", rows)
    unanswered = [{"answer": None, "data_source": None, "id": 0}]
    for function, argument in ((f"{FUNCTIONS}verl", "ground_truth"), (f"{FUNCTIONS}by_name", "answer")):
        with pytest.raises(ValueError, match=f"no row has .*{argument}.*; the columns are id"):
            RewardConfig(function=function).check_rows("reward", unanswered)
    places = ["data.path, row 0", "data.val_path, row 0"]  # each by itself: answers of the first do not help the second
    with pytest.raises(ValueError, match=r"no row of data\.path has ground_truth"):
        RewardConfig(function="exact_match").check_rows("reward", [*unanswered, {"answer": "7", "id": 0}], places)
    with pytest.raises(ValueError, match=r"reward.data_sources: no row has the data_source 'smus'; there are sums$"):
        RewardConfig(data_sources=["sums", "smus"]).check_rows("reward", rows)


def test_numbers_are_told_from_look_alikes() -> None:
    import torch

    assert results.read_result(torch.tensor(0.5)) == (0.5, {})
    assert results.read_result(True) == (1.0, {})
    for bad in ("1.0", None, [1.0], b"1"):
        line = f"{bad!r}, a {type(bad).__name__}, is not a number: a score is a float, an int or a bool, or None where there is none"
        hint = "; a function with an argument completions takes and returns lists" if isinstance(bad, list) else ""
        with pytest.raises(TypeError, match=f"^{re.escape(line + hint)}$"):
            results.read_result(bad)


@pytest.mark.parametrize(
    ("settings", "failed", "first_step", "again", "message"),
    [
        ({"max_failure_rate": 0.25}, 1, False, False, None),
        ({"max_failure_rate": 0.25}, 2, False, False, r"of this step, more than reward.max_failure_rate = 0.25; first"),
        ({}, 4, False, False, None),
        ({}, 3, False, True, None),
        ({}, 4, False, True, r"of this step, as of the step before; first"),
        ({}, 3, True, False, None),
        ({}, 4, True, False, r"of the first step; first"),
    ],
)
def test_too_many_failures_end_the_run(
    settings: dict[str, Any], failed: int, first_step: bool, again: bool, message: str | None
) -> None:
    config = RewardConfig(function="gsm8k", **settings)
    if message is None:
        check_failures(config, "reward", failed, 4, "row 0: x", first_step, again)
        return
    with pytest.raises(RewardError, match=rf"reward.function 'gsm8k' failed in {failed} of 4 calls {message} error: row 0: x"):
        check_failures(config, "reward", failed, 4, "row 0: x", first_step, again)


# -- built-in rewards

ROUTED = [
    ("openai/gsm8k", "#### 72", "72"),
    ("HuggingFaceH4/MATH-500", "\\boxed{\\frac12}", "0.5"),
    ("math_dapo", "Answer: 5", "5"),
    ("aime2024", "\\boxed{25}", "025"),
    ("numina_olympiads", "\\boxed{x}", "x"),
    ("Idavidrein/gpqa", "Answer: B", "B"),
]


def test_rows_find_their_reward_by_data_source() -> None:
    rows = [("", right, {"data_source": source, "reward_model": {"ground_truth": truth}}) for source, right, truth in ROUTED]
    rows += [("", "\\boxed{999}", row) for _, _, row in rows]
    assert scores("auto", rows) == [1.0] * 6 + [0.0] * 6
    config, columns = RewardConfig(function="auto"), [row for _, _, row in rows]
    config.check_rows("reward", columns)
    unknown = [*columns, {"data_source": "mine", "answer": "1"}]
    message = r"row 12: reward.function=auto has no reward for the data_source 'mine'; it knows openai/gsm8k, "
    with pytest.raises(ValueError, match=message):
        config.check_rows("reward", unknown)
    with pytest.raises(ValueError, match=r"a.parquet:3: reward.function=auto has no reward for the data_source 'mine'"):
        config.check_rows("reward", unknown[-2:], ["a.parquet:2", "a.parquet:3"])
    RewardConfig(function="auto", data_sources=[source for source, *_ in ROUTED]).check_rows("reward", unknown)
    assert {"lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "codecontests", "taco"} <= auto.SOURCES.keys()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("gsm8k", r"no row has ground_truth \(data.answer_key .*; the columns are data_source, question"),
        ("code", r"a.jsonl:1: reward.function=code: the row has no tests: .*; the columns are data_source, question"),
        ("auto", r"a.jsonl:1: .*no row of the data_source 'gsm8k' has an answer .*; the columns are data_source, question"),
    ],
)
def test_rows_without_answers_are_refused_before_the_start(function: str, message: str) -> None:
    rows = [{"question": "1+1", "answer": None, "data_source": "gsm8k"}] * 2
    with pytest.raises(ValueError, match=message):
        RewardConfig(function=function).check_rows("reward", rows, ["a.jsonl:1", "a.jsonl:2"])


def test_a_library_that_is_absent_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the library: pip install jsonschema"):
        json_schema.check("reward.kwargs")


def test_answers_come_back_with_the_scores() -> None:
    """A built-in reward's, and verl's ``pred``; a row whose call fails has none. Math is imported before the first call's time."""
    texts = ("\\boxed{(x-1)(x+1)}", "\\boxed{3}", "no", "\\boxed{x^2-1}")
    rows = [("", text, {"answer": "x^2-1"}) for text in texts] + [("", "5", {"answer": {"a": 1}})]
    with RewardRunner(RewardConfig(function="math", timeout_s=5.0)) as runner:
        result = runner.score(rows)
    assert result.scores == [1.0, 0.0, 0.0, 1.0, None] and result.failures == 1
    assert result.answers == {0: "x^2-1", 1: "3", 2: None, 3: "x^2-1"}
    assert [results.read_answer(value) for value in ({"score": 1, "pred": 5}, {"score": 0, "pred": None}, 1.0)] == [
        results.ReadAnswer("5"),
        results.ReadAnswer(None),
        None,
    ]


def test_json_schema() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    rows = [("", text, {}) for text in ('{"a": 1}', '```json\n{"a": 2}\n```', '{"a": "1"}', "{", "[" * 100_000)]
    assert scores("json_schema", rows, kwargs={"schema": schema}) == [1.0, 1.0, 0.0, 0.0, 0.0]
    numbers = [("", text, {}) for text in ("NaN", "```JSON\n5\n```")]
    assert scores("json_schema", numbers, kwargs={"schema": {"type": "number"}}) == [0.0, 1.0]
    assert scores("json_schema", [("", "5", {"schema": '{"type": "integer"}'})]) == [1.0]
    with pytest.raises(ValueError, match="schema"):
        scores("json_schema", [("", "5", {})])
    for bad, message in (
        ({"type": "no such"}, r"\Areward.kwargs.schema is not a JSON schema: [^\n]*\Z"),
        ('{"a": ', "is not a JSON schema: Expecting value"),
        ("[" * 200 + "]" * 200, "nested more than 100 levels"),
    ):
        with pytest.raises(ValueError, match=message):
            json_schema.check("reward.kwargs", bad)


# -- http


def test_a_server_scores_in_batches_and_its_token_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "a-secret")
    rows = [("p", f"it is {i % 7}", {"answer": "3"}) for i in range(50)]
    rows.append(("p", "3", {"messages": [{"role": "user", "content": "p"}], "answer": "3"}))
    begun = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "1"}]
    rows.append(("p1", "3", {"prompt": "p1", "messages": begun, "answer": "13"}))  # not 113
    with reward_server.serve(RewardConfig(function="gsm8k:flexible").bind("reward").instantiate(), 0, "a-secret") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/score"
        settings = {"url": url, "token_env": "SCORER_TOKEN", "batch_size": 8}
        with RewardRunner(RewardConfig(function="http", kwargs=settings, num_workers=2)) as runner:
            assert runner.score(rows).scores == [float(i % 7 == 3) for i in range(50)] + [1.0, 1.0]
        refused = scores("http", rows[:3], kwargs={"url": url})  # no token: refused at once, not tried again
        assert all("401" in str(score) and "a-secret" not in str(score) for score in refused) and len(refused) == 3
        server.shutdown()


class Flaky(BaseHTTPRequestHandler):
    """Fails as the path says, then answers."""

    tries: ClassVar[dict[str, int]] = {}
    leaked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
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
        body = {"/garbage": b"no json", "/deep": b"[" * 9000 + b"]" * 9000}.get(self.path)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body or json.dumps({"scores": [1.0] * (number - (self.path == "/short"))}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_fails_is_asked_again_and_then_its_rows_get_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "a-secret")
    tries = {"late": 3, "down": 3, "short": 1, "garbage": 1, "deep": 1, "redirect": 1, "hang": 3, "cut": 3}
    with ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"token_env": "SCORER_TOKEN", "backoff_s": 0.01, "retries": 2, "request_timeout_s": 0.5}
        for path, times in tries.items():
            url = f"http://127.0.0.1:{server.server_port}/{path}"
            results = http.score(["p"] * 2, ["c"] * 2, [{}] * 2, url=url, **settings)
            assert Flaky.tries[f"/{path}"] == times
            assert [result == 1.0 for result in results] == [path == "late"] * 2, (path, results)
            assert "a-secret" not in str(results)
        server.shutdown()
    assert Flaky.leaked == [] and os.environ["SCORER_TOKEN"] == "a-secret"
