"""The tasks of the agents in ``examples/agents``: conversations that show the form of each, and rows to train on.

    python examples/agent_tasks.py --out DIR --seed 0

``DIR/sft.jsonl`` holds ``{"messages", "tools"}``: what each agent and a model that does not know the task would say.
``DIR/{tool_user,debate,guess}.jsonl`` hold ``{"id", "prompt", "answer"}``. ``DIR/model/`` holds a character tokenizer
with a chat template, and config.json of a Llama with 0.6 million parameters, without weights.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sort_digits import LLAMA, SPECIAL, write_json, write_tokenizer

MARKS = ("<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>")
VOCABULARY = (*SPECIAL, *MARKS, *string.digits, *string.ascii_lowercase, *' {}":,-')
TEMPLATE = (
    "<bos>{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = {"plus": "add", "minus": "subtract", "times": "multiply"}  # of a question, and the tool that answers it
TOOLS = [{"type": "function", "function": {"name": name}} for name in WORDS.values()]  # the template reads names only
LETTERS = string.ascii_lowercase[:7]
SHOWN = 0.3  # of the answers in conversations: how often they are meant to be right

Row = dict[str, Any]


def said(role: str, content: str, **fields: Any) -> Row:
    return {"role": role, "content": content, **fields}


def compute(name: str, a: int, b: int) -> int:
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[name]


def sum_row(rng: random.Random) -> Row:
    a, b, word = rng.randint(2, 20), rng.randint(2, 20), rng.choice(list(WORDS))
    return {"prompt": f"{a} {word} {b}", "answer": str(compute(WORDS[word], a, b))}


def sum_conversation(rng: random.Random) -> Row:
    """The right tool is called, or any. The answer is what it returns."""
    prompt = sum_row(rng)["prompt"]
    a, word, b = prompt.split()
    name = WORDS[word] if rng.random() < SHOWN else rng.choice(list(WORDS.values()))
    arguments = {"a": int(a), "b": int(b)}
    call = {"id": "call", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    result = str(compute(name, **arguments))
    turns = said("assistant", "", tool_calls=[call]), said("tool", result, tool_call_id="call"), said("assistant", result)
    return {"messages": [said("user", prompt), *turns], "tools": TOOLS}


def digits_row(rng: random.Random) -> Row:
    """The largest digit is as often a 1 as a 9."""
    answer = rng.randint(1, 9)
    digits = [str(rng.randint(0, answer)) for _ in range(8)]
    digits[rng.randrange(8)] = str(answer)
    return {"prompt": f"{''.join(digits[:4])} {''.join(digits[4:])}", "answer": str(answer)}


def digits_conversation(rng: random.Random) -> Row:
    """A side names the largest digit that it has read, or any."""
    own, other = digits_row(rng)["prompt"].split()
    heard = rng.choice(other)
    first, last = (max(read) if rng.random() < SHOWN else rng.choice(read) for read in (own, own + heard))
    return {"messages": [said("user", own), said("assistant", first), said("user", heard), said("assistant", last)]}


def letter_row(rng: random.Random) -> Row:
    return {"prompt": f"{LETTERS[0]} to {LETTERS[-1]}", "answer": rng.choice(LETTERS)}


def letter_conversation(rng: random.Random) -> Row:
    """Guesses are in the middle of what is left, or any letters."""
    low, high = sorted(rng.choices(range(len(LETTERS)), k=2))
    messages = [said("user", f"{LETTERS[low]} to {LETTERS[high]}")]
    for _ in range(2):
        guess = (low + high) // 2 if rng.random() < SHOWN else rng.randrange(len(LETTERS))
        is_later = guess <= low or (guess < high and rng.random() < 0.5)
        messages += [said("assistant", LETTERS[guess]), said("user", "after" if is_later else "before")]
        low, high = (max(low, guess + 1), high) if is_later else (low, min(high, guess - 1))
        if low > high:
            break
    return {"messages": messages[:-1]}


TASKS: dict[str, tuple[Callable[[random.Random], Row], Callable[[random.Random], Row]]] = {
    "tool_user": (sum_row, sum_conversation),
    "debate": (digits_row, digits_conversation),
    "guess": (letter_row, letter_conversation),
}


def write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(out: Path, seed: int, num_sft: int = 12000, num_train: int = 4000) -> None:
    """Write all files to ``out``; the same seed and sizes give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    streams = {name: random.Random(f"agent_tasks {name} {seed}") for name in TASKS}
    names = [*TASKS] * -(-num_sft // len(TASKS))
    write_rows(out / "sft.jsonl", [TASKS[name][1](streams[name]) for name in names[:num_sft]])
    for name, (row, _) in TASKS.items():
        rng = streams[name]
        write_rows(out / f"{name}.jsonl", [{"id": f"{name}-{number}", **row(rng)} for number in range(num_train)])
    write_tokenizer(out / "model", VOCABULARY, TEMPLATE)
    small = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": 256,
    }
    write_json(out / "model" / "config.json", {**LLAMA, **small})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    write_tasks(args.out, args.seed)
    print(f"{args.out}: conversations, rows of {', '.join(TASKS)}, model/ with tokenizer and config")


if __name__ == "__main__":
    main()
