"""The quickstart's task: sort 4 to 14 digits. Writes data, a character tokenizer and a model configuration.

    python examples/sort_digits.py --out DIR --seed 0

``DIR/{sft,train,val}.jsonl`` hold ``{"id", "prompt": "5397>", "answer": "3579", "data_source"}``; sft rows also have
``response``. No prompt occurs twice. ``DIR/pairs.jsonl`` and ``pairs_val.jsonl`` hold ``{"id", "prompt", "chosen",
"rejected", "margin", "safe_chosen", "safe_rejected"}``: the margin counts errors, and a response with invented digits
is not safe. ``DIR/model/`` holds the tokenizer and config.json of a Llama with 1.6 million parameters, without weights.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = (*SPECIAL, *"0123456789", ">", " ")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def make_row(rng: random.Random, digits: tuple[int, int]) -> dict[str, str]:
    task = "".join(rng.choice("0123456789") for _ in range(rng.randint(*digits)))
    answer = "".join(sorted(task))
    return {"prompt": f"{task}>", "answer": answer, "response": answer}


def make_pair(rng: random.Random, digits: tuple[int, int]) -> dict[str, object]:
    """Return two responses. The chosen one has more digits in place, and is unsafe only if the other is too."""
    row = make_row(rng, digits)
    answer = row["answer"]
    while True:
        pair = sorted((spoil(rng, answer) for _ in range(2)), key=lambda text: errors(text, answer))
        unsafe = [sorted(text) != list(answer) for text in pair]
        margin = errors(pair[1], answer) - errors(pair[0], answer)
        if margin and unsafe != [True, False]:
            safety = {"safe_chosen": not unsafe[0], "safe_rejected": not unsafe[1]}
            return {"prompt": row["prompt"], "chosen": pair[0], "rejected": pair[1], "margin": margin, **safety}


def spoil(rng: random.Random, answer: str) -> str:
    """Return ``answer`` with up to three pairs of digits swapped, and sometimes with a digit that the task lacks."""
    digits = list(answer)
    for _ in range(rng.randint(0, 3)):
        i, j = rng.randrange(len(digits)), rng.randrange(len(digits))
        digits[i], digits[j] = digits[j], digits[i]
    if rng.random() < 0.4:
        digits[rng.randrange(len(digits))] = rng.choice("0123456789")
    return "".join(digits)


def errors(text: str, answer: str) -> int:
    return sum(digit != right for digit, right in zip(text, answer, strict=True))


def write_pairs(path: Path, rng: random.Random, num_pairs: int, digits: tuple[int, int]) -> None:
    """Write ``num_pairs`` pairs as jsonl."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_pairs):
            file.write(json.dumps({"id": f"{path.stem}-{number}", **make_pair(rng, digits)}) + "\n")


def write_splits(
    out: Path, source: str, make: Callable[[], dict[str, str]], num_sft: int, num_train: int, num_val: int
) -> None:
    """Write ``out/{val,sft,train}.jsonl`` with rows from ``make``; no prompt repeats, and only sft rows keep
    ``response``."""
    seen: set[str] = set()
    out.mkdir(parents=True, exist_ok=True)
    for split, num_rows in (("val", num_val), ("sft", num_sft), ("train", num_train)):
        with (out / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(num_rows):
                while (row := make())["prompt"] in seen:
                    pass
                seen.add(row["prompt"])
                kept = {"id": f"{split}-{number}", "prompt": row["prompt"], "answer": row["answer"], "data_source": source}
                file.write(json.dumps({**kept, "response": row["response"]} if split == "sft" else kept) + "\n")


def write_tokenizer(directory: Path, vocabulary: Sequence[str] = VOCABULARY, chat_template: str | None = None) -> None:
    """Write a Hugging Face tokenizer with one token per character and a leading ``<bos>``.

    ``vocabulary`` begins with SPECIAL; its longer words are special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens([token for token in vocabulary if len(token) > 1])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    settings |= {"chat_template": chat_template} if chat_template else {}
    write_json(directory / "tokenizer_config.json", {**settings, "model_max_length": LLAMA["max_position_embeddings"]})


def write_task(
    out: Path, seed: int, num_sft: int = 20000, num_train: int = 8000, num_val: int = 256, digits: tuple[int, int] = (8, 12)
) -> None:
    """Write all files of the task to ``out``; the same seed and sizes give the same bytes."""
    low, high = digits
    if not 1 <= low <= high:
        raise ValueError(f"digits from {low} to {high}: the range must be at least 1 and not empty")
    possible = sum(10**n for n in range(low, high + 1))
    wanted = num_sft + num_train + num_val
    if wanted > possible // 2:
        raise ValueError(
            f"{wanted} different tasks wanted, but only {possible} exist for {low} to {high} digits; ask for fewer"
        )
    rng = random.Random(f"sort_digits {seed}")
    write_splits(out, "sort_digits", lambda: make_row(rng, digits), num_sft, num_train, num_val)
    for name, num_pairs in (("pairs", num_train), ("pairs_val", num_val)):
        write_pairs(out / f"{name}.jsonl", random.Random(f"sort_digits {name} {seed}"), num_pairs, digits)
    write_tokenizer(out / "model")
    write_json(out / "model" / "config.json", LLAMA)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", type=int, default=20000, help="rows of sft.jsonl")
    parser.add_argument("--train", type=int, default=8000, help="rows of train.jsonl")
    parser.add_argument("--val", type=int, default=256, help="rows of val.jsonl")
    parser.add_argument("--min-digits", type=int, default=4)
    parser.add_argument("--max-digits", type=int, default=14)
    args = parser.parse_args(arguments)
    try:
        write_task(args.out, args.seed, args.sft, args.train, args.val, (args.min_digits, args.max_digits))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.out}: {args.sft} sft, {args.train} train and {args.val} validation rows, model/ with tokenizer and config")


if __name__ == "__main__":
    main()
