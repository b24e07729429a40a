"""The task of the calculator example: word problems whose numbers are too large to compute without a tool.

    python examples/word_problems.py --out DIR --seed 0

``DIR/{sft,train,val}.jsonl`` hold ``{"id", "prompt", "answer", "data_source"}``. Sft rows also have ``response``, with
the calculator's results where it would give them: ``<<47*36=1692>><<1692+58=1750>>#### 1750``. No prompt occurs twice.
``DIR/model/`` holds a character tokenizer and config.json of a Llama with 0.7 million parameters, without weights.
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path

from sort_digits import LLAMA, SPECIAL, write_json, write_splits, write_tokenizer

VOCABULARY = (*SPECIAL, *string.digits, *string.ascii_lowercase, *" .<>=+-*#")
NAMES = ("ann", "bob", "eve", "joe", "kim", "max", "sue", "tom")
THINGS = ("bags of nuts", "rows of seats", "boxes of pens", "packs of cards", "trays of eggs")
CHANGES = {"": "", "gets": "+", "loses": "-"}


def make_row(rng: random.Random) -> dict[str, str]:
    """Return a problem of one or two steps: a product, and a number that is added or subtracted."""
    name, thing, change = rng.choice(NAMES), rng.choice(THINGS), rng.choice(list(CHANGES))
    count, each, more = rng.randint(11, 99), rng.randint(11, 99), rng.randint(11, 99)
    plural = thing.split()[-1]
    prompt, result = f"{name} has {count} {thing} with {each} in each", count * each
    response = f"<<{count}*{each}={result}>>"
    if change:
        prompt += f" and {change} {more} {plural}"
        after = result + more if change == "gets" else result - more
        response += f"<<{result}{CHANGES[change]}{more}={after}>>"
        result = after
    return {"prompt": f"{prompt}.", "response": f"{response}#### {result}", "answer": str(result)}


def write_task(out: Path, seed: int, num_sft: int = 20000, num_train: int = 8000, num_val: int = 256) -> None:
    """Write all files of the task to ``out``; the same seed and sizes give the same bytes."""
    rng = random.Random(f"word_problems {seed}")
    write_splits(out, "word_problems", lambda: make_row(rng), num_sft, num_train, num_val)
    write_tokenizer(out / "model", VOCABULARY)
    small = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": len(VOCABULARY),
    }
    write_json(out / "model" / "config.json", {**LLAMA, **small})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    write_task(args.out, args.seed)
    print(f"{args.out}: sft, train and validation rows, model/ with tokenizer and config")


if __name__ == "__main__":
    main()
