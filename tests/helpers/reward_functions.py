"""Reward functions for tests, most of which behave badly on purpose. Worker processes import this module: no torch here."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
import threading
import time

HANGS = r"(a+)+$"


def even_length(prompt, response, row):
    return {"score": float(len(response) % 2 == 0), "pred": response or None}


def length(prompt, response, row):
    return len(response) / 10


def nothing(response):
    return 0.0


def by_row(prompt, response, row):
    """What ``row["do"]`` says."""
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
        re.match(HANGS, "a" * 60 + "b")  # inside C code, deaf to signals' Python handlers
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


def any_columns(**columns):
    return columns["bonus"]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("sums", None)
    return {"score": float(solution_str == ground_truth), "index": extra_info.get("index", -1)}


def trl(completions, **kwargs):
    """Says what it was called with, in the form that TRL gives it."""
    assert {"prompts", "completions", "answer", "data_source"} <= kwargs.keys() | {"completions"}
    return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]


def large_answers(completions, **kwargs):
    return [{"score": 1.0, "pred": "x" * 400} for _ in completions]


def trl_columns(prompts, completions, completion_ids, solution, **kwargs):
    rows = zip(prompts, completions, completion_ids, solution, strict=True)
    return [None if tail is None else float(text == prompt + tail) + len(ids) for prompt, text, ids, tail in rows]


def trl_chat(prompts, completions):
    """Both are lists of messages."""
    rows = zip(prompts, completions, strict=True)
    return [float(said[0] == {"role": "assistant", "content": prompt[-1]["content"]}) for prompt, said in rows]


def trl_turns(prompts, completions):
    """Completions are the turns of the episode, with their roles."""
    return [
        float([turn["role"] for turn in turns] == ["assistant", "tool"] * 2 and turns[1]["content"] == "it is 9")
        for turns in completions
    ]


def trl_short(completions):
    return [0.0]


def trl_one_bad(completions):
    return [float(c) if c.isdigit() else c for c in completions]


def of_numbers(x, y, z):
    return x + y + z


def positional(prompt, response, row, /):
    return 1.0


BEGUN = []


async def later(response, row):
    """Waits without a thread; some rows raise, never end, or block the loop that all share."""
    action = row.get("do")
    await asyncio.sleep(row.get("sleep", 0.05))
    if "together" in row:  # ends when so many rows have begun
        BEGUN.append(response)
        while len(BEGUN) < row["together"]:
            await asyncio.sleep(0.01)
    if action == "raise":
        raise RuntimeError("broken on purpose")
    if action == "exit":
        sys.exit(0)
    if action == "cancel":
        raise asyncio.CancelledError
    if action == "forever":
        await asyncio.sleep(3600)
    if action == "block":
        time.sleep(3600)
    if action == "stubborn":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
    return float(response)


async def later_batched(completions):
    await asyncio.sleep(0.01)
    return [float(c) for c in completions]


class Scaled:
    made = 0

    def __init__(self, scale, shift=0.0):
        if scale == 0:
            raise ValueError("a scale of 0")
        self.scale, self.shift = scale, shift
        Scaled.made += 1

    def __call__(self, response):
        return {"score": self.scale * float(response) + self.shift, "made": Scaled.made}


class Ends:
    def __init__(self):
        sys.exit(0)

    def __call__(self, response):
        return 1.0


class AsyncScaled:
    async def __call__(self, response):
        return float(response)


class NoCall:
    def __init__(self, x=1):
        pass


scaled = Scaled(2.0)


def with_settings(response, answer, bonus, malus=0.5):
    return bonus if response == answer else -malus


def generator(response):
    yield 1.0


def best_of_group(prompts, completions):
    """1 for the longest response of a prompt's: needs the group together, and alone."""
    assert len(set(prompts)) == 1
    return [float(len(c) == max(map(len, completions))) for c in completions]


def attack(response, row):
    """What a hostile function can do to its process."""
    action = row["do"]
    if action == "fill disk":
        with open(row["path"], "wb") as file:
            for _ in range(100):
                file.write(b"x" * 2**20)
    if action == "eat memory":
        return float(len(bytearray(2**31)))
    if action == "close":
        os.closerange(3, 5000)
    if action == "garbage":
        for fd in range(3, 5000):  # the pipe has the number that it had in the process that started this one
            with contextlib.suppress(OSError):
                os.write(fd, b"[0, 0.0, 1]\nnoise\n")
    if action == "hang":
        re.match(HANGS, "a" * 60 + "b")
    if action == "block signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        while True:
            time.sleep(1)
    if action == "chdir":
        os.chdir("/")
    if action == "where":
        return float(os.getcwd() == row["path"])
    if action == "orphan":  # a daemon: in a session of its own, its parent gone
        if not os.fork():
            os.setsid()
            if not os.fork():
                with open(row["path"], "w") as file:
                    file.write(str(os.getpid()))
                os.execve("/bin/sleep", ["sleep", "3600"], {})  # nothing tells where it comes from
            os._exit(0)
        os.wait()
    if action == "lines":
        for number in range(200_000):
            print(f"line {number} of many")
    if action == "megabytes":
        sys.stdout.write("noise " * 500_000)
    if action == "limits":
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    if action == "exit later":
        threading.Timer(0.05, lambda: os._exit(3)).start()
        time.sleep(5)
    return float(response)


def noted(prompt, response, directory):
    """Leaves a file behind for each row that it has scored."""
    with open(os.path.join(directory, f"{prompt}.{response}"), "w"):
        pass
    return len(response) / 10


def moody(response):
    """Raises, returns nothing, or hangs, as the response has it."""
    mood = sum(map(ord, response)) % 8
    if mood == 1:
        raise RuntimeError("broken on purpose")
    if mood == 3:
        time.sleep(3600)
    return None if mood == 2 else len(response) / 10


def counted(completions, file):
    """Notes how many rows each call has."""
    with open(file, "a") as calls:
        calls.write(f"{len(completions)}\n")
    return [len(c) / 10 for c in completions]


async def awaited(response):
    await asyncio.sleep(0.01)
    return len(response) / 10


def by_process(response, directory):
    """Leaves a file behind for each process that scores."""
    with open(os.path.join(directory, str(os.getpid())), "w"):
        time.sleep(0.15)
    return len(response) / 10


def trl_scalar(completions):
    return 1.0


def in_a_list(response):
    return [1.0]


def trl_dict(completions, **kwargs):
    return dict.fromkeys(range(len(completions)), 0.0)
