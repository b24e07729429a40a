"""Episodes of several turns over HTTP, beside the same turns as an environment in process: tokens drawn per second of generation.

    python scripts/bench/agents.py [--episodes 256] [--steps 3] [--hidden 256] [--out FILE]

A random model of four layers answers four times, on one rank. The first step has the import of the agent.
"""

from __future__ import annotations

import json
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import environment, machine_facts, run_parts, save, table, torchrun
from rlhf_spmd.models.weights import write_random_model

PIECES = ["<unk>", "<s>", "</s>", *string.printable[:95]]
TEMPLATE = (
    "{% for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}{% if add_generation_prompt %}|assistant|{% endif %}"
)
PROGRAMS = """
import http.client, json, urllib.parse

class Four:
    def __init__(self):
        self.turns = 0
    def reset(self, row):
        return None
    def step(self, text):
        self.turns += 1
        return [{"role": "user", "content": "and then?"}], len(text) / 100, self.turns == 4

def ask(base_url, messages):
    address = urllib.parse.urlparse(base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    body = json.dumps({"messages": messages, "model": "actor"})
    connection.request("POST", address.path + "/chat/completions", body, {"Content-Type": "application/json"})
    message = json.loads(connection.getresponse().read())["choices"][0]["message"]
    connection.close()
    return message

async def run(base_url, row):
    messages, total = row["prompt"], 0.0
    for _ in range(4):
        message = ask(base_url, messages)
        total += len(message["content"]) / 100
        messages += [message, {"role": "user", "content": "and then?"}]
    return total
"""


def write_task(root: Path, hidden: int, prompts: int) -> None:
    """Write a model whose tokens are characters, prompts and the two programs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    sizes = {"vocab_size": len(PIECES), "hidden_size": hidden, "intermediate_size": 3 * hidden, "max_position_embeddings": 512}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "initializer_range": 0.02}
    write_random_model(root / "model", {**kind, **sizes, **heads}, seed=3)
    inner = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(root / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{number:03d} what is it"}]} for number in range(prompts)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "programs.py").write_text(PROGRAMS)


def train(root: Path, name: str, episodes: int, steps: int, *more: str) -> list[dict[str, Any]]:
    """Return the tokens and the seconds of each step's generation."""
    settings = [
        *("algorithm.name=grpo", "algorithm.use_kl_loss=false", "algorithm.ppo_max_token_len_per_gpu=4096"),
        *(f"data.path={root / 'train.jsonl'}", f"data.train_batch_size={episodes // 8}", "sampling.n=8"),
        *("data.max_prompt_length=64", "data.max_response_length=400", "data.shuffle=false"),
        *(f"models.actor.path={root / 'model'}", f"models.actor.generation.max_num_seqs={episodes}"),
        *("sampling.logit_bias={2: 2.6}", f"run.steps={steps}", "run.export=false", f"run.dir={root / name}", *more),
    ]
    command = [sys.executable, *torchrun(1), "-m", "rlhf_spmd.train", *settings]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    rows = [(line["response_length/mean"] * episodes, line["timing_s/generate_sequences"]) for line in lines]
    return [{"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds} for tokens, seconds in rows]


def agents(episodes: int = 256, steps: int = 3, hidden: int = 256, out: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_task(root, hidden, episodes // 8 * steps)
        program = root / "programs.py"
        inside = train(root, "environment", episodes, steps, f"environment.cls={program}:Four")
        over_http = train(root, "agent", episodes, steps, f"agent.run={program}:run", f"agent.concurrency={episodes}")
    rows = [
        {
            "step": step,
            "in_process": one["tokens_per_s"],
            "over_http": two["tokens_per_s"],
            "share": two["tokens_per_s"] / one["tokens_per_s"],
            "tokens": two["tokens"] / one["tokens"],  # about 1: the same work, with other draws
        }
        for step, (one, two) in enumerate(zip(inside, over_http, strict=True), 1)
    ]
    print(table(rows, "step in_process over_http share tokens"))
    save({"bench": "agents", "machine": machine_facts(), "episodes": episodes, "steps": rows}, out)


if __name__ == "__main__":
    run_parts(agents)
