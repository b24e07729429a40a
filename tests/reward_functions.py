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
    if action == "nan":
        return float("nan")
    if action == "none":
        return None
    if action == "modules":
        return {"score": 0, "torch": "torch" in sys.modules, "main": "__mp_main__" in sys.modules}
    if action == "pid":
        return {"score": 0.0, "pid": os.getpid()}
    if action == "hash":
        return float(hash("a string") % 1000003)
    return float(row["value"])


NOT_A_FUNCTION = 3
