"""Reward functions that behave badly on purpose; the row says how. Worker processes import this module: no torch here."""

import os
import re
import sys
import time


def by_row(prompt, response, row):
    time.sleep(row.get("sleep", 0))
    action = row.get("do")
    if action == "raise":
        raise RuntimeError("broken on purpose")
    if action == "exit":
        sys.exit(3)
    if action == "die":
        os._exit(7)
    if action == "kill":
        os.kill(os.getpid(), 9)
    if action == "hang":
        re.match(r"(a+)+$", "a" * 60 + "b")  # inside C code, deaf to signals' Python handlers
    if action == "sleep":
        time.sleep(3600)
    if action == "print":
        print("noise on standard output", flush=True)
    if action == "read":
        return float(len(sys.stdin.read()))
    if action == "return":
        return row["value"]
    if action == "power":
        return 10 ** row["value"]
    if action == "huge":
        return {"score": 1.0, "small": 2, "huge": 10**400, "large": 1e300, "list": [1]}
    if action == "nan":
        return float("nan")
    if action == "none":
        return None
    if action == "fork":  # the child lives on with copies of all pipes
        if os.fork():
            os._exit(7)
        time.sleep(3600)
    if action == "twice":  # parent and child both return
        return float(bool(os.fork()))
    if action == "modules":
        return {"score": 0, "torch": "torch" in sys.modules, "main": "__mp_main__" in sys.modules}
    if action == "pid":
        return {"score": 0.0, "pid": os.getpid()}
    if action == "hash":
        return float(hash("a string") % 1000003)
    return float(row["value"])


NOT_A_FUNCTION = 3


def by_name(response, answer, weight=0.5):
    return weight * (response == answer)


def by_columns(row, **columns):
    return float(columns["response"] == row["answer"] == columns["answer"])


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("sums", None)
    return {"score": float(solution_str == ground_truth), "index": extra_info.get("index", -1)}


def trl(completions, **kwargs):
    """Says what it was called with, in the form that TRL gives it."""
    assert {"prompts", "completions", "answer", "data_source"} <= kwargs.keys() | {"completions"}
    return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]


def trl_columns(prompts, completions, completion_ids, solution, **kwargs):
    rows = zip(prompts, completions, completion_ids, solution, strict=True)
    return [None if tail is None else float(text == prompt + tail) + len(ids) for prompt, text, ids, tail in rows]


def trl_chat(prompts, completions):
    """Both are lists of messages."""
    rows = zip(prompts, completions, strict=True)
    return [float(said[0] == {"role": "assistant", "content": prompt[-1]["content"]}) for prompt, said in rows]


def trl_short(completions):
    return [0.0]


def trl_one_bad(completions):
    return [float(c) if c.isdigit() else c for c in completions]


def of_numbers(x, y, z):
    return x + y + z


def positional(prompt, response, row, /):
    return 1.0
