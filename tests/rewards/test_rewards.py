"""Built-in rewards, names, and the worker processes: order, time limits, crashes, clean ends."""

import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from places import SHARED
from rlhf_spmd.config.registry import available
from rlhf_spmd.config.schema import check_section
from rlhf_spmd.rewards import exact_match, gsm8k, happy_words, sandbox, worker
from rlhf_spmd.rewards.config import RewardConfig, resolve_reward
from rlhf_spmd.rewards.results import check_failures
from rlhf_spmd.rewards.runner import RewardError, RewardRunner

BY_ROW = "reward_functions:by_row"
SOLUTIONS = SHARED / "data" / "gsm8k" / "model_solutions.jsonl.gz"
LEXICON = SHARED / "data" / "tinystories-pref" / "lexicon.json"


def rows(*actions):
    """One row per action: a number to return, the name of an action, or a whole row."""
    made = []
    for action in actions:
        row = {"value": action} if isinstance(action, int | float) else {"do": action} if isinstance(action, str) else action
        made.append(("prompt", "response", row))
    return made


def runner(**settings):
    return RewardRunner(RewardConfig(function=BY_ROW, **{"timeout_s": 20.0, "default": -9.0, **settings}))


@pytest.fixture(scope="module")
def patient():
    """Workers shared by the tests that neither time out nor count processes."""
    with runner(num_workers=2) as shared:
        yield shared


def test_results_come_in_the_order_of_the_rows(patient):
    values = [float(i) for i in range(300)]
    slow_first = [{"value": v, "sleep": 0.2 if i == 0 else 0} for i, v in enumerate(values)]
    result = patient.score(rows(*slow_first))
    assert result.scores == values
    assert (result.failures, result.timeouts, result.first_error) == (0, 0, None)
    assert patient.score([]).scores == []


def test_a_call_that_fails_gets_the_default_and_is_counted(patient):
    result = patient.score(rows(1, "raise", "nan", "none", "exit", 2, {"do": "return", "value": "5"}))
    assert result.scores == [1.0, -9.0, -9.0, None, -9.0, 2.0, -9.0], "None: the function does not apply, as in a list"
    assert RewardConfig(function=BY_ROW).default is None, "unless a score is given, such rows have none"
    assert (result.failures, result.timeouts) == (4, 0)
    assert re.fullmatch(r"row 1: RuntimeError: broken on purpose \(\S*/reward_functions.py:\d+ in by_row\)", result.first_error)
    named = [(prompt, response, row | {"id": f"aime-{i}"}) for i, (prompt, response, row) in enumerate(rows(1, 2, "raise"))]
    assert patient.score(named[1:], keys=[8, 9]).first_error.startswith("row aime-2: RuntimeError"), "as the data call it"


@pytest.mark.parametrize(("action", "how"), [("die", "exit code 7"), ("kill", "signal 9")])
def test_a_worker_that_dies_costs_one_call(patient, action, how):
    result = patient.score(rows(*range(10), action, *range(10)))
    assert result.scores == [*map(float, range(10)), -9.0, *map(float, range(10))]
    assert (result.failures, result.timeouts) == (1, 0)
    assert result.first_error == f"row 10: the worker process ended during the call ({how})"


def test_dicts_need_a_score_and_their_other_numbers_are_extras(patient):
    returned = [{"score": 1, "length": 4, "note": "text", "ok": True}, {"length": 3}, {"score": 0.5, "length": math.inf}]
    result = patient.score(rows(*[{"do": "return", "value": value} for value in returned]))
    assert result.scores == [1.0, -9.0, 0.5]
    assert result.extras == [{"length": 4.0, "ok": 1.0}, {}, {}]
    assert result.extra_sums() == {"length": (4.0, 1), "ok": (1.0, 1)}
    assert "no 'score', only ['length']" in result.first_error


def test_what_a_function_prints_or_reads_does_not_disturb(patient):
    assert patient.score(rows("print", "read", 3)).scores == [-9.0, 0.0, 3.0]


def test_workers_are_small_and_hash_alike(patient):
    result = patient.score(rows(*["modules", "hash"] * 8))
    assert all(extra == {"torch": 0.0, "main": 0.0} for extra in result.extras[::2])
    assert len(set(result.scores[1::2])) == 1


def test_large_rows_do_not_block_on_full_pipes(patient):
    text = "x" * 200_000
    assert patient.score([(text, text, {"value": i}) for i in range(12)]).scores == [float(i) for i in range(12)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_calls_that_overrun_are_killed_and_the_others_go_on(num_workers):
    with runner(timeout_s=1.5, num_workers=num_workers) as limited:
        limited.score(rows(1))
        before = set(limited.worker_pids)
        start = time.monotonic()
        result = limited.score(rows(*range(20), "sleep", *range(20), "hang", 5))
        seconds = time.monotonic() - start
        assert result.scores == [*map(float, range(20)), -9.0, *map(float, range(20)), -9.0, 5.0]
        assert (result.failures, result.timeouts) == (0, 2)
        assert result.first_error == "row 20: no score within reward.timeout_s = 1.5"
        assert 1.5 < seconds < 100  # the calls would take an hour
        assert len(limited.worker_pids) == num_workers and set(limited.worker_pids) != before
        assert all(_gone(pid) for pid in before - set(limited.worker_pids))
        # A call of its own: the time limit is not that of the step.
        patience = limited.score(rows(*[{"value": 1, "sleep": 0.2}] * 10))
        assert patience.timeouts == 0 and patience.scores == [1.0] * 10


def test_a_hanging_worker_that_does_not_read_cannot_block_the_rank():
    with runner(timeout_s=1.5) as limited:
        big = "y" * 500_000
        result = limited.score([("p", big, {"do": "sleep"}), *[("p", big, {"value": 1})] * 4])
        assert result.scores == [-9.0, 1.0, 1.0, 1.0, 1.0] and result.timeouts == 1


def test_a_worker_killed_between_steps_is_no_calls_failure():
    with runner() as shared:
        shared.score(rows(1))
        keeper = shared.worker_pids[0]
        (worker,) = sandbox.descendants(keeper, 10)
        os.kill(worker, signal.SIGKILL)
        _wait_until(lambda: _state(shared.worker_pids[0]) == "Z")
        result = shared.score(rows(1, 2, 3))
        assert result.scores == [1.0, 2.0, 3.0] and result.failures == 0


def test_a_scheduler_signal_does_not_end_the_workers():
    with runner() as shared:
        shared.score(rows(1))
        pids = shared.worker_pids
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert shared.score(rows(1, 2)).failures == 0 and shared.worker_pids == pids


def test_workers_end_with_close():
    shared = runner(num_workers=2)
    pids = shared.worker_pids
    shared.close()
    shared.close()
    assert all(_gone(pid) for pid in pids)
    with pytest.raises(AssertionError, match="closed"):
        shared.score(rows(1))


def test_workers_die_with_the_rank_even_in_a_call_that_hangs(tmp_path):
    program = (
        "from rlhf_spmd.rewards.runner import RewardConfig, RewardRunner\n"
        f"runner = RewardRunner(RewardConfig(function={BY_ROW!r}, num_workers=2, timeout_s=600.0))\n"
        "runner.score([('p', 'r', {'value': 1})])\n"
        "print(*runner.worker_pids, flush=True)\n"
        "runner.score([('p', 'r', {'do': 'hang'}), ('p', 'r', {'do': 'sleep'})])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True)
    assert rank.stdout is not None
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 2 and not any(_gone(pid) for pid in pids)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    _wait_until(lambda: all(_gone(pid) for pid in pids))


def test_a_row_that_is_not_json_is_named():
    with (
        runner() as shared,
        pytest.raises(ValueError, match=r"row 1 for reward.function 'reward_functions:by_row' is not JSON"),
    ):
        shared.score([("p", "r", {"value": 1}), ("p", "r", {"value": object()})])


def test_too_many_failures_end_the_run():
    config = RewardConfig(function=BY_ROW, max_failure_rate=0.25)
    check_failures(config, "reward", 1, 4, "row 0: x", first_step=True)
    message = r"reward.function .* failed in 2 of 4 calls of this step.*reward.max_failure_rate = 0.25; first error: row 0: x"
    with pytest.raises(RewardError, match=message):
        check_failures(config, "reward", 2, 4, "row 0: x", first_step=False)
    patient = RewardConfig(function=BY_ROW)
    check_failures(patient, "reward", 4, 4, "row 0: x", first_step=False)
    check_failures(patient, "reward", 3, 4, "row 0: x", first_step=False, again=True)
    with pytest.raises(RewardError, match=r"failed in 4 of 4 calls of this step, as of the step before; first error: row 0"):
        check_failures(patient, "reward", 4, 4, "row 0: x", first_step=False, again=True)
    check_failures(patient, "reward", 3, 4, "row 0: x", first_step=True)
    with pytest.raises(
        RewardError, match=r"rewards.cost.function .* failed in 4 of 4 calls of the first step; first error: row 0"
    ):
        check_failures(patient, "rewards.cost", 4, 4, "row 0: x", first_step=True)


VERL_ROW = {"answer": None, "data_source": "sums", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "answer": None}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("by_name", [("p", "7", {"answer": "7"}), ("p", "8", {"answer": "7", "weight": 2.0})], [0.5, 0.0]),
        ("by_columns", [("p", "7", {"answer": "7"}), ("p", "8", {"answer": "7"})], [1.0, 0.0]),
        ("verl", [("p", "7", VERL_ROW), ("p", "8", VERL_ROW)], [1.0, 0.0]),
        (
            "verl",
            [("p", "7", {"answer": "7", "data_source": None}), ("p", "7", {"answer": "9", "data_source": None})],
            [1.0, 0.0],
        ),
        (
            "trl",
            [("p", "7", {"answer": "7", "data_source": None}), ("q", "7", {"answer": "9", "data_source": None})],
            [1.0, 0.0],
        ),
        (
            "trl_columns",
            [("p", "pq", {"solution": "q", "completion_ids": [1, 2]}), ("p", "r", {"solution": None, "completion_ids": [1]})],
            [3.0, None],
        ),
        ("trl_chat", [("<hi>", "hi", CHAT), ("<hi>", "ho", CHAT)], [1.0, 0.0]),
        # messages that end in an answer are a column of the data, not the prompt
        (
            "trl_one_bad",
            [("p", "5", {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]})],
            [5.0],
        ),
        ("trl_short", [("p", "a", {}), ("p", "b", {})], [-9.0, -9.0]),
        ("trl_one_bad", [("p", "a", {}), ("p", "5", {})], [-9.0, 5.0]),
    ],
)
def test_arguments_are_bound_by_name(name, given, expected):
    with RewardRunner(RewardConfig(function=f"reward_functions:{name}", default=-9.0)) as shared:
        result = shared.score(given)
    assert result.scores == expected, result.first_error
    assert result.failures == expected.count(-9.0)
    if given[0][2] is VERL_ROW:
        assert result.extras == [{"index": 3.0}] * 2


def test_a_batched_function_gets_a_share_of_the_rows_from_each_worker():
    with RewardRunner(RewardConfig(function="reward_functions:trl_one_bad", num_workers=2)) as shared:
        result = shared.score([("p", str(i), {}) for i in range(7)])
        assert result.scores == [float(i) for i in range(7)]
        assert shared.score([]).scores == []
    config = RewardConfig(function="reward_functions:trl_short", num_workers=2)
    with RewardRunner(config) as shared:
        assert "1 scores were returned for 2 completions" in shared.score([("p", "a", {})] * 4).first_error
    with RewardRunner(
        RewardConfig(function="reward_functions:trl_dict", num_workers=1)
    ) as shared:  # list() would take its keys
        assert "one dict was returned for 2 completions" in shared.score([("p", "a", {})] * 2).first_error
    with RewardRunner(RewardConfig(function="reward_functions:trl_scalar", num_workers=1)) as shared:
        assert "one float was returned for 2 completions; return a list" in shared.score([("p", "a", {})] * 2).first_error
    with RewardRunner(RewardConfig(function="reward_functions:in_a_list", num_workers=1)) as shared:
        assert "with an argument completions takes and returns lists" in shared.score([("p", "a", {})]).first_error


def test_what_cannot_be_bound_is_refused_in_one_line():
    allowed = "Arguments may be prompt, response, row; or verl's data_source, solution_str, ground_truth, extra_info; or TRL's"
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refused:
        check_section(RewardConfig(function="reward_functions:positional"), "reward")
    line = "reward.function='reward_functions:positional' takes (prompt, response, row): prompt cannot be given by name. "
    assert str(refused.value).startswith(line + allowed)
    rows = [{"answer": "7", "data_source": "sums"}, {"answer": "7", "data_source": "sums", "y": 1}]
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refused:
        RewardConfig(function="reward_functions:of_numbers").check_rows("rewards.cost", rows)
    line = "rewards.cost.function='reward_functions:of_numbers' takes (x, y, z): no row has x, z; the columns are answer, "
    assert str(refused.value).startswith(line + "data_source, y. " + allowed)
    for name in ("verl", "by_name", "by_columns", "trl", "trl_chat"):
        RewardConfig(function=f"reward_functions:{name}", data_sources=["sums"]).check_rows("reward", rows)
    unanswered = [{"answer": None, "data_source": None, "id": 0}]
    for name, argument in (("verl", "ground_truth"), ("by_name", "answer")):
        with pytest.raises(ValueError, match=f"no row has {argument}.*; the columns are id"):
            RewardConfig(function=f"reward_functions:{name}").check_rows("reward", unanswered)
    places = ["data.path, row 0", "data.val_path, row 0"]  # each by itself: answers of the one do not help the other
    with pytest.raises(ValueError, match="no row has ground_truth"):
        RewardConfig(function="exact_match").check_rows("reward", [*unanswered, {"answer": "7", "id": 0}], places)
    with pytest.raises(ValueError, match=r"reward.data_sources: no row has the data_source 'smus'; there are sums$"):
        RewardConfig(data_sources=["sums", "smus"]).check_rows("reward", rows)


def test_a_row_lacks_a_column_that_others_have(patient):
    with RewardRunner(RewardConfig(function="reward_functions:by_name", default=-9.0)) as shared:
        result = shared.score([("p", "7", {"answer": "7"}), ("p", "7", {"answer": None})])
    assert (
        result.scores == [0.5, -9.0]
        and result.first_error == "row 1: ValueError: the row has no 'answer', which the function takes"
    )


def test_numbers_beyond_float32(patient):
    powers = [{"do": "power", "value": exponent} for exponent in (39, 400, 38)]
    result = patient.score(rows(*powers, "huge"))
    assert result.scores == [-9.0, -9.0, 1e38, 1.0] and result.failures == 2
    assert result.first_error == "row 0: ValueError: 1e+39 is not finite in float32"
    assert result.extras[3] == {"small": 2.0}


def test_a_call_that_forks_and_dies_fails_at_once(patient):
    started = time.monotonic()
    result = patient.score(rows(1, "fork", 2, "twice", "twice", 3))
    assert time.monotonic() - started < patient.config.timeout_s / 2
    assert result.scores == [1.0, -9.0, 2.0, 1.0, 1.0, 3.0] and (result.failures, result.timeouts) == (1, 0)
    assert result.first_error == "row 1: the worker process ended during the call (exit code 7)"


def test_a_function_that_no_longer_imports_ends_the_run(tmp_path, monkeypatch):
    module = tmp_path / "fleeting_reward.py"
    module.write_text("def score(prompt, response, row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(function="fleeting_reward:score")
    check_section(config, "reward")
    module.write_text("raise ImportError('gone')\n")
    with pytest.raises(RewardError, match="gone"), RewardRunner(config) as shared:
        shared.score(rows(1))


def test_names():
    assert available("rlhf_spmd.rewards", "score") == [
        *("aime", "auto", "code", "exact_match", "format", "gsm8k", "happy_words", "http", "json_schema", "length", "math"),
        *("math_verify", "multiple_choice", "regex"),
    ]
    assert resolve_reward("gsm8k") is gsm8k.score
    assert resolve_reward("gsm8k:flexible") is gsm8k.flexible
    assert resolve_reward("rlhf_spmd.rewards.gsm8k:score") is gsm8k.score
    assert resolve_reward("rlhf_spmd.rewards.gsm8k") is gsm8k.score
    assert resolve_reward("outside.verl_reward").__name__ == "compute_score"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": "gsm8"}, r"unknown reward.function 'gsm8'; did you mean 'gsm8k'\? available: aime, auto, code"),
        ({"function": "no.such.module:f"}, r"reward.function 'no.such.module' cannot be imported"),
        ({"function": "reward_functions:by_rwo"}, r"no function 'by_rwo'; did you mean 'by_row'\?"),
        ({"function": "reward_functions:NOT_A_FUNCTION"}, r"NOT_A_FUNCTION is a int, not a function"),
        ({"timeout_s": 0.0}, r"reward.timeout_s=0.0: must be above 0"),
        ({"timeout_s": math.inf}, r"reward.timeout_s=inf"),
        ({"num_workers": 0}, r"reward.num_workers=0"),
        ({"default": math.nan}, r"reward.default=nan: must be a finite number"),
        ({"weight": math.inf}, r"reward.weight=inf"),
        ({"default": 1e39}, r"reward.default=1e\+39: must be at least -3.4\d*e\+38 and at most 3.4"),
        ({"data_sources": []}, r"reward.data_sources=\[\] scores no row"),
        ({"max_failure_rate": 1.5}, r"reward.max_failure_rate=1.5: must be at least 0 and at most 1"),
    ],
)
def test_impossible_config(change, message):
    with pytest.raises(ValueError, match=message):
        check_section(RewardConfig(**change), "reward")


def test_runner_without_a_function():
    with pytest.raises(ValueError, match=r"reward.function is not set"):
        RewardRunner(RewardConfig())


def test_numbers_are_told_from_look_alikes():
    import torch

    assert worker.read_result(torch.tensor(0.5)) == (0.5, {})
    assert worker.read_result(True) == (1.0, {})
    for bad in ("1.0", None, [1.0], b"1"):
        said = f"{bad!r}, a {type(bad).__name__}, is not a number: a score is a float, an int or a bool, or None where there is none"
        with pytest.raises(TypeError, match=re.escape(said)):
            worker.read_result(bad)


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("so 70 + 2 = 72\n#### 72", 1.0, 1.0),
        ("#### $1,072", 0.0, 0.0),
        ("the answer is 72", 0.0, 1.0),
        ("#### 71\nno, wait\n#### 72.", 1.0, 1.0),
        ("#### 72\n#### 71", 0.0, 0.0),
        ("####72.0", 1.0, 1.0),
        ("#### -72", 0.0, 0.0),
        ("#### $72", 1.0, 1.0),
        ("#### 72/2", 0.0, 0.0),
        ("#### 72-3", 0.0, 0.0),
        ("#### 72e3", 0.0, 0.0),
        ("#### 72 - 3", 0.0, 0.0),
        ("#### 72 apples - fewer", 1.0, 1.0),
        ("72 #### none", 0.0, 1.0),
        ("", 0.0, 0.0),
        (".,.", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("answer", ["72", 72, "He has 36*2 = <<36*2=72>>72.\n#### 72"])
def test_gsm8k(response, strict, flexible, answer):
    assert gsm8k.score(response, answer) == strict
    assert gsm8k.flexible(response, answer) == flexible


def test_gsm8k_answers_with_commas_and_without_numbers():
    assert gsm8k.score("#### 1,234,000", "#### 1234000") == 1.0
    assert gsm8k.score("#### -5", "#### -5") == 1.0
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


def test_exact_match():
    assert exact_match.score(" 1 2 3\n", "1 2 3") == 1.0
    assert exact_match.score("1 2 33", "1 2 3") == 0.0
    config = RewardConfig(function="exact_match")
    with pytest.raises(
        ValueError, match=r"no row has ground_truth .data.answer_key names the answer's column.; the columns are anwser"
    ):
        config.check_rows("reward", [{"anwser": "1"}])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0.0), ("She smiled.", 1 / 3), ("Happy HAPPY happy happy!", 1.0), ("sad, mad; and glad", -1 / 3), ("unhappy", 0.0)],
)
def test_happy_words(text, expected):
    assert happy_words.score("happy happy happy", text, {}) == pytest.approx(expected)


@pytest.mark.skipif(not LEXICON.exists(), reason="needs the data set that lies beside the repository")
def test_happy_words_are_the_lexicons():
    lexicon = json.loads(LEXICON.read_text())
    assert set(lexicon["happy"]) == happy_words.HAPPY and set(lexicon["sad"]) == happy_words.SAD


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _gone(pid):
    return _state(pid) in ("", "Z")


def _wait_until(condition, seconds=60.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "still waiting after the limit"
        time.sleep(0.01)
