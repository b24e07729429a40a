"""Scores Python programs by running tests on them, in a ``sandbox``.

| a row has | as | the program |
|---|---|---|
| ``test``, ``entry_point`` | HumanEval (arXiv 2107.03374) | continues the prompt, or defines the function |
| ``test_list``, and perhaps ``test_setup_code``, ``test_imports`` | MBPP (arXiv 2108.07732) | defines what the assertions call |
| an answer (JSON) with ``inputs``, ``outputs``, perhaps ``fn_name`` | verl's code data | reads standard input; or has ``fn_name`` |

verl's inputs and outputs for standard input are texts, or lists of lines. For a function each is a text with one JSON
value per line (an argument; the result), or a list of arguments and the result. A result may be wrapped in a list
(APPS, arXiv 2105.09938).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.config.constraints import PositiveFloat, PositiveInt
from rlhf_spmd.rewards.row_values import right_answer
from rlhf_spmd.rewards.sandbox import Outcome, SandboxLimits, run

_FENCE = re.compile(r"^[ \t]*(`{3,})[ \t]*(\w*)[^`\n]*\n(.*?)(?:^[ \t]*\1`*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")
WALL_SECONDS_PER_CPU_SECOND = 10.0  # limits of a run
# imported for a program that is called as a function, as on the sites that the tasks come from
_IMPORTED = "".join(
    f"import {name}\nfrom {name} import *\n"
    for name in ("collections", "heapq", "bisect", "math", "itertools", "functools", "string", "typing", "builtins")
)
_SAME = """import json
from math import inf, nan
def same(output, expected, wrapped):
    output = json.loads(json.dumps(output))
    return output == expected or (wrapped and output == expected[0])
"""


@dataclass(frozen=True)
class CodeTask:
    """The tests of a row: ``tests``, or ``cases``.

    - before, after: code that runs as one with the program, around it
    - set_up: code that runs before the tests
    - tests: code of each test
    - cases: (standard input, output) of each run of the program
    - names: names of the program that the tests call
    """

    before: str = ""
    after: str = ""
    tests: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    set_up: str = ""


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raise ValueError if no row has readable tests."""
    errors: list[ValueError] = []
    for row in rows:
        try:
            read_task(row, right_answer(row))
            return
        except ValueError as error:
            errors.append(error)
    if errors:
        columns = ", ".join(sorted(key for key, value in rows[0].items() if value is not None))
        line = f"{places[0]}: {where}.function=code: {errors[0]}; all rows are like this; the columns are {columns}"
        raise ValueError(line) from errors[0]


def extract(response: str) -> str:
    """Return the last fenced Python block, else the last without a language; without fences the whole response."""
    blocks = [(language.lower(), block) for _, language, block in _FENCE.findall(response)]
    python, plain = ([block for language, block in blocks if language in kind] for kind in (_PYTHON, ("",)))
    return (python or plain or [""])[-1] if blocks else response


def read_task(row: Mapping[str, Any], ground_truth: object) -> CodeTask:
    """Return the row's tests. Raises ValueError if its tests are missing or unreadable."""
    if row.get("test") and row.get("entry_point"):
        task = CodeTask(tests=(f"{row['test']}\ncheck({row['entry_point']})\n",), names=(str(row["entry_point"]),))
    elif row.get("test_list"):
        before = "\n".join(row.get("test_imports") or ())
        # the set-up uses the program's classes
        task = CodeTask(before, row.get("test_setup_code") or "", tuple(row["test_list"]), set_up=before)
    else:
        task = _read_cases(ground_truth)
    for test in (*task.tests, task.set_up):
        try:
            ast.parse(test)
        except SyntaxError as error:
            raise ValueError(f"the row's test {test[:80]!r} is not Python: {error}") from error
    return task


def _read_cases(ground_truth: object) -> CodeTask:
    """Read verl's code data."""
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] == "{" else ground_truth
    if not isinstance(cases, Mapping) or not cases.get("inputs") or len(cases["inputs"]) != len(cases.get("outputs") or ()):
        raise ValueError("the row has no tests: test and entry_point, test_list, or an answer with inputs and outputs")
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
    name = cases.get("fn_name")
    if not name:
        return CodeTask(cases=tuple((_lines(inputs), _lines(outputs)) for inputs, outputs in pairs))
    calls = [_call(inputs, outputs) for inputs, outputs in pairs]
    wrapped = all(isinstance(outputs, list) and len(outputs) == 1 for _, outputs in calls)
    tests = tuple(f"assert same({name}(*{inputs!r}), {outputs!r}, {wrapped})\n" for inputs, outputs in calls)
    return CodeTask(_IMPORTED, tests=tests, names=(str(name),), set_up=_SAME)


def _lines(text: object) -> str:
    """Return standard input or output as text. Raises ValueError for anything but text or lines."""
    if isinstance(text, list) and all(isinstance(line, str | int | float) for line in text):
        return "\n".join(map(str, text))
    if isinstance(text, str | int | float):
        return str(text)
    raise ValueError(f"the row's test {str(text)[:80]!r} is neither a text nor a list of lines")


def _call(inputs: object, result: Any) -> tuple[list[Any], Any]:
    """Return the arguments and the result. Keys that JSON turned from integers to text become integers again."""
    try:
        arguments = [json.loads(line) for line in inputs.split("\n") if line.strip()] if isinstance(inputs, str) else inputs
        result = json.loads(result) if isinstance(inputs, str) and isinstance(result, str) else result
    except ValueError as error:
        raise ValueError(
            f"the row's test {str(inputs)[:80]!r} -> {str(result)[:80]!r} is not a JSON value per line: {error}"
        ) from error
    if not isinstance(arguments, list):
        raise ValueError(f"the row's test {str(inputs)[:80]!r} is neither a list of arguments nor a text with one in each line")
    return [
        {int(key): value for key, value in argument.items()}
        if isinstance(argument, Mapping) and all(re.fullmatch(r"-?\d+", key) for key in argument)
        else argument
        for argument in arguments
    ], result


def _program(response: str, row: Mapping[str, Any], task: CodeTask) -> list[str]:
    """Return the parts of the program: its code, with the code of the task around it."""
    code = extract(response)
    name = row.get("entry_point")
    prompt = row.get("prompt") or ""
    if not name:
        return [task.before, code, task.after]
    try:
        compile(prompt, "prompt", "exec")
    except (SyntaxError, ValueError):  # chat, or prose
        return [code]
    # parts, since the code may begin with an import of __future__
    return [prompt, code] if re.search(rf"^\s*def\s+{re.escape(str(name))}\b", code, re.MULTILINE) else [prompt + code]


def _same(output: str, expected: str) -> bool:
    """Return True if outputs are equal, white space at the ends of lines and of the text aside."""
    lines, expected_lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return lines == expected_lines


def score(
    response: str,
    row: dict[str, Any],
    ground_truth: object = None,
    partial: bool = False,
    time_s: PositiveFloat = 5.0,
    memory_mb: PositiveInt = 1024,
    processes: PositiveInt = 16,
    file_mb: PositiveInt = 16,
) -> dict[str, float]:
    """Return ``score``: 1.0 if all tests pass, else 0.0; with ``partial`` the share that passes.

    Also return ``passed`` (that share) and ``isolated`` (1.0 if the program had its own namespaces). ``time_s`` limits the
    CPU time of one run; its wall time is at most ``WALL_SECONDS_PER_CPU_SECOND`` times as long, and ``reward.timeout_s``
    for all runs. Beyond that the call fails, because the machine may be at fault. See :class:`sandbox.SandboxLimits`.
    Raises ValueError for a row without tests.
    """
    task = read_task(row, ground_truth)
    limits = SandboxLimits(time_s, WALL_SECONDS_PER_CPU_SECOND * time_s, memory_mb, processes, file_mb)
    program = _program(response, row, task)
    outcomes: list[Outcome] = []
    passed = 0
    if task.tests:
        outcomes.append(run(program, task.tests, limits=limits, names=task.names, set_up=task.set_up))
        passed = outcomes[0].passed
    for stdin, expected in task.cases:
        outcomes.append(run(program, stdin=stdin, limits=limits))
        is_right = outcomes[-1].exit_code == 0 and _same(outcomes[-1].output, expected)
        passed += is_right
        if not is_right and not partial:
            break
    share = min(1.0, passed / (len(task.tests) + len(task.cases)))
    isolated = min(float(outcome.isolated) for outcome in outcomes)
    return {"score": share if partial else float(share == 1.0), "passed": share, "isolated": isolated}
