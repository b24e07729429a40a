"""Python programs, judged by running tests on them (``sandbox`` says what holds a program back).

| a row has | as | the program |
|---|---|---|
| ``test``, ``entry_point`` | HumanEval (arXiv 2107.03374) | continues the prompt, or defines the function |
| ``test_list``, and perhaps ``test_setup_code``, ``test_imports`` | MBPP (arXiv 2108.07732) | defines what the assertions call |
| an answer (JSON) with ``inputs``, ``outputs``, perhaps ``fn_name`` | verl's code data | reads standard input; or has ``fn_name`` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.rewards.sandbox import Limits, Outcome, run

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """What a row asks: ``before`` and the program run, then ``tests``; or for each of ``cases`` (standard input, output) the
    program."""

    before: str = ""
    tests: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()


def check(where: str, partial: bool = False, **limits: float) -> None:
    """Raises ValueError for limits that are not above 0."""
    for key, value in limits.items():
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{where}.{key}={value!r} must be above 0")


def extract(response: str) -> str:
    """The last fenced block, or the whole response where there is none."""
    blocks: list[str] = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def read_task(row: Mapping[str, Any], ground_truth: object) -> Task:
    """Raises ValueError for a row without tests."""
    if row.get("test") and row.get("entry_point"):
        return Task(tests=(f"{row['test']}\ncheck({row['entry_point']})\n",))
    if row.get("test_list"):
        before = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
        return Task(before, tuple(row["test_list"]))
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] == "{" else ground_truth
    if not isinstance(cases, Mapping) or not cases.get("inputs") or len(cases["inputs"]) != len(cases.get("outputs") or ()):
        raise ValueError("the row has no tests: test and entry_point, test_list, or an answer with inputs and outputs")
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
    if cases.get("fn_name"):
        call = "import json as _j\nassert _j.loads(_j.dumps({}(*_j.loads({!r})))) == _j.loads({!r})\n"
        return Task(tests=tuple(call.format(cases["fn_name"], json.dumps(given), json.dumps(out)) for given, out in pairs))
    return Task(cases=tuple((str(given), str(out)) for given, out in pairs))


def _program(response: str, row: Mapping[str, Any], before: str) -> str:
    code, name, prompt = extract(response), row.get("entry_point"), row.get("prompt") or ""
    if not name:
        return f"{before}\n{code}"
    try:
        compile(prompt, "prompt", "exec")
    except (SyntaxError, ValueError):  # chat, or prose
        return code
    return f"{prompt}\n{code}" if re.search(rf"^\s*def\s+{re.escape(str(name))}\b", code, re.MULTILINE) else prompt + code


def _same(output: str, expected: str) -> bool:
    """White space at the ends of lines and of the text aside."""
    return [line.rstrip() for line in output.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


def score(
    response: str,
    row: dict[str, Any],
    ground_truth: object = None,
    partial: bool = False,
    time_s: float = 5.0,
    memory_mb: int = 1024,
    processes: int = 16,
    file_mb: int = 16,
) -> dict[str, float]:
    """``score``: 1.0 if all tests pass, else 0.0; with ``partial`` the share that passes. ``passed``: that share. ``isolated``: 1.0
    where the program had namespaces of its own. Raises ValueError for a row without tests.

    ``time_s``: of one run; all cases of standard input together must end within ``reward.timeout_s``. See :class:`sandbox.Limits`.
    """
    task, limits = read_task(row, ground_truth), Limits(time_s, memory_mb, processes, file_mb)
    program, outcomes, passed = _program(response, row, task.before), list[Outcome](), 0
    if task.tests:
        outcomes.append(run(program, task.tests, limits=limits))
        passed = outcomes[0].passed
    for given, expected in task.cases:
        outcomes.append(run(program, stdin=given, limits=limits))
        right = outcomes[-1].exit_code == 0 and _same(outcomes[-1].output, expected)
        passed += right
        if not right and not partial:
            break
    share = passed / (len(task.tests) + len(task.cases))
    isolated = min(float(outcome.isolated) for outcome in outcomes)
    return {"score": share if partial else float(share == 1.0), "passed": share, "isolated": isolated}
