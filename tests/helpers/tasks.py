"""A PPO task small enough to run end to end in a second, and what tests read back of a run.

Policy, reference and critic are three Llamas of 128,000 parameters with four layers, so that every layout up to tp 4 or pp 4 fits
(37 tokens: no tp divides the vocabulary, and at tp 4 the two KV heads are replicated). Every token is one character, so the
text of a response tells its token ids. Reward workers import this module: torch only inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from places import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from ranks import Program
    from rlhf_spmd.data.files import Row
    from rlhf_spmd.parallel.world import World

    # of a checkpoint: (role, kind, name), the global tensor's shape, where the values begin, values
    _Piece = tuple[tuple[str, str, str], tuple[int, ...], tuple[int, ...], Tensor]

VOCABULARY = ("<eos>", *"0123456789abcdefghijklmnopqrstuvwxyz")
EOS = 0
MAX_RESPONSE = 12
PROMPTS, SAMPLES, NUM_TRAIN = 8, 2, 20  # prompts per step, responses per prompt, prompts in the data: epochs end inside a step
# what depends on the layout or on the clock by its nature
NOT_THE_SAME = ("timing_s/", "perf/", "memory/", "reshard/", "generation/", "rollout/log_prob_diff", "training/rollout_probs")
NOT_THE_SAME += ("unix_s", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/ppl_ratio")

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "eos_token_id": EOS,
    "initializer_range": 0.12,  # distributions far from uniform: every layer matters to every number
}
_CONFIG: dict[str, Any] = {
    "algorithm": {
        "name": "ppo",
        "ppo_mini_batch_size": 4,
        "ppo_epochs": 2,
        "gamma": 0.99,
        "lam": 0.95,
        "cliprange_value": 0.2,
        "entropy_coeff": 0.01,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.5, "horizon": 100},
    },
    "data": {"max_prompt_length": 12, "max_response_length": MAX_RESPONSE, "train_batch_size": PROMPTS},
    "sampling": {"n": SAMPLES},
    "reward": {"function": "tasks:even_share"},
}
_OPTIM = {"lr": 1e-3, "lr_scheduler_type": "cosine", "lr_warmup_steps": 5, "min_lr_ratio": 0.1}


def even_share(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Of the response's characters, the mean of a number that differs between them. ``REWARD_DELAY`` (s) makes steps longer."""
    time.sleep(float(os.environ.get("REWARD_DELAY", "0")))
    return sum(ord(c) % 7 - 3 for c in response) / (3 * MAX_RESPONSE) + 0.1 * sum(c in "02468" for c in response)


def coarse_share(prompt: str, response: str, row: dict[str, Any]) -> float:
    """0 or 1, so that the responses to a prompt may all score alike."""
    return float(even_share(prompt, response, row) > 0.25)


def always_one(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 1.0


@functools.cache
def task() -> Path:
    """A directory with ``ppo.json`` (all but run.*), data, tokenizer and models; made once per test session."""
    holder = tempfile.TemporaryDirectory(prefix="rlhf_spmd_task_")
    _KEEP.append(holder)
    root = Path(holder.name)
    _write_models(root)
    rng = random.Random(5)
    prompts = ["".join(rng.choices(VOCABULARY[1:], k=rng.randint(3, 12))) for _ in range(NUM_TRAIN)]
    (root / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    models = {role: {"path": str(root / role), "optim": _OPTIM} for role in ("actor", "critic")}
    config = {**_CONFIG, "models": {**models, "reference": {"path": str(root / "reference")}}}
    config["data"] = {**_CONFIG["data"], "path": str(root / "train.jsonl")}
    (root / "ppo.json").write_text(json.dumps(config))
    return root


def other_task(algorithm: dict[str, Any], *roles: str) -> str:
    """The configuration file of another algorithm on the same data and models; ``algorithm``: its section."""
    config = json.loads((task() / "ppo.json").read_text())
    models = {role: config["models"][role] for role in roles}
    digest = hashlib.sha256(json.dumps([algorithm, *roles]).encode()).hexdigest()[:8]  # ppo.json itself is not written over
    path = task() / f"{algorithm['name']}-{digest}.json"
    path.write_text(json.dumps({**config, "algorithm": algorithm, "models": models}))
    return str(path)


def pairs(name: str = "pairs", count: int = 20) -> Path:
    """A file of preference pairs, with margins and safety, for the models of :func:`task`; made once for each name."""
    path, rng = task() / f"{name}.jsonl", random.Random(name)
    if not path.exists():
        rows = []
        for number in range(count):
            prompt, chosen, rejected = ("".join(rng.choices(VOCABULARY[1:], k=rng.randint(3, 12))) for _ in range(3))
            safety = {"safe_chosen": number % 3 > 0, "safe_rejected": number % 3 > 1}
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": number % 4 / 2, **safety})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(*values: dict[str, Any]) -> list[Row]:
    """As read from a file whose lines hold ``values``."""
    from rlhf_spmd.data.files import Row

    return [Row(value, f"x:{i}") for i, value in enumerate(values, 1)]


def texts_of(rows: Iterable[Tensor]) -> list[str]:
    return ["".join(VOCABULARY[i] for i in ids) for ids in rows]


def tokenizer() -> Any:
    from rlhf_spmd.data.tokenizer import load_tokenizer

    return load_tokenizer(task() / "actor")


_KEEP: list[tempfile.TemporaryDirectory[str]] = []  # removed when the test process ends


def _write_models(root: Path) -> None:
    from safetensors.torch import load_file, save_file

    from rlhf_spmd.models.weights import write_random_model

    _write_tokenizer(root / "tokenizer")
    lm = {**_LLAMA, "architectures": ["LlamaForCausalLM"]}
    value = {**_LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    for name, config, seed in (("actor", lm, 1), ("reference", lm, 2), ("critic", value, 3)):
        write_random_model(root / name, config, seed)
        shutil.copytree(root / "tokenizer", root / name, dirs_exist_ok=True)
    actor, other = (load_file(root / name / "model.safetensors") for name in ("actor", "reference"))
    near = {name: tensor + 0.1 * other[name] for name, tensor in actor.items()}  # so the first step has some KL
    save_file(near, root / "reference" / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<eos>"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def quickstart(root: Path) -> None:
    """In ``root`` what scripts/quickstart.sh makes, with random weights."""
    import sort_digits
    from rlhf_spmd.models.weights import write_random_model

    task = root / "runs" / "quickstart" / "task"
    sort_digits.main(["--out", str(task), "--sft", "200", "--train", "100", "--val", "10"])
    for part in ("sft", "ppo"):
        export = root / "runs" / "quickstart" / part / "export"
        write_random_model(export, json.loads((task / "model" / "config.json").read_text()), seed=1)
        shutil.copytree(task / "model", export, dirs_exist_ok=True)


# -- running


def settings(run_dir: Path, steps: int, *more: str) -> list[str]:
    """Overrides of a run: its directory, length, all responses logged, no export."""
    every = f"run.log_samples={PROMPTS * SAMPLES}"
    return [f"run.dir={run_dir}", f"run.steps={steps}", every, "run.export=false", *more]


def train_here(world: World, config: str, overrides: Sequence[str]) -> None:
    """The training program's own two halves on a rank of tests/helpers/ranks.py; its process boundary has tests of its own."""
    from rlhf_spmd.process.board import Board
    from rlhf_spmd.process.program import ProgramContext
    from rlhf_spmd.telemetry.run_dir import create_run_dir
    from rlhf_spmd.train import prepare, train

    prepared = prepare(config, overrides, world.size, launch=world.launch)
    create_run_dir(prepared.config.run.dir)
    train(ProgramContext(world, Board(world.launch, world.store), prepared))


def train(ranks: int, run_dir: Path, steps: int, *more: str, config: Path | str | None = None) -> Run:
    """A training run that writes no checkpoint, trace and report; :func:`train_here` and :func:`read_run` are for tests of these.
    ``config``: its file, if not that of :func:`task`. ``more``: overrides.
    """
    from ranks import run_ranks

    drafts = run_ranks(ranks, _train_without_files, str(config or task() / "ppo.json"), settings(run_dir, steps, *more))
    return _run_of(run_dir, [piece for pieces, _ in drafts for piece in pieces], drafts[0][1])


def _train_without_files(world: World, config: str, overrides: Sequence[str]) -> tuple[list[_Piece], dict[str, Any]]:
    """Returns what this rank would have written of the last checkpoint, and the checkpoint's state."""
    from unittest.mock import patch

    from rlhf_spmd.checkpoint.save import Draft
    from rlhf_spmd.training.checkpoints import CheckpointWriter

    drafts: list[Draft] = []
    with (
        patch.object(CheckpointWriter, "write", lambda writer, draft: drafts.append(draft)),
        patch("rlhf_spmd.training.trainer.write_trace"),
        patch("rlhf_spmd.training.trainer.write_report"),
    ):
        train_here(world, config, overrides)
    pieces = [
        ((role, kind, box.name), box.shape, box.start, values.detach().clone())
        for role, boxes in drafts[-1].pieces.items()
        for kind, box, values in boxes
    ]
    return pieces, dict(drafts[-1].state)


def leave_world() -> None:
    """After ``LLM`` in the test process itself, which a script would leave at its end."""
    import torch

    from rlhf_spmd.parallel.world import join_world

    join_world.cache_clear()
    torch.distributed.destroy_process_group()


def train_alone(run_dir: Path, steps: int, *more: str, config: Path | None = None) -> None:
    """In the test process itself, which is the single rank."""
    import torch

    from rlhf_spmd.parallel.launch import Launch
    from rlhf_spmd.parallel.world import World

    torch.set_num_threads(1)
    world = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    train_here(world, str(config or task() / "ppo.json"), settings(run_dir, steps, *more))


def start_program(ranks: int, run_dir: Path, overrides: Sequence[str], delay_s: float = 0.0) -> Program:
    """The training program on ranks of its own, without torchrun; ``delay_s`` for each reward."""
    from ranks import Program

    run_dir.mkdir(parents=True, exist_ok=True)
    arguments = ["--config", str(task() / "ppo.json"), *overrides]
    return Program(ranks, arguments, run_dir / "output.txt", environment(delay_s))


def environment(delay_s: float = 0.0) -> dict[str, str]:
    paths = os.pathsep.join(
        (*map(str, (ROOT / "src", ROOT / "tests", ROOT / "tests" / "helpers")), *filter(None, [os.environ.get("PYTHONPATH")]))
    )
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "REWARD_DELAY": str(delay_s)}


def start_torchrun(run_dir: Path, overrides: Sequence[str], *torchrun: str, delay_s: float = 0.0) -> subprocess.Popen[str]:
    """``torchrun <torchrun> -m rlhf_spmd.train`` in a process group of its own; ``delay_s`` for each reward."""
    variables = environment(delay_s)
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "rlhf_spmd.train"]
    command += ["--config", str(task() / "ppo.json"), *overrides]
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "output.txt").open("a") as output:
        return subprocess.Popen(command, env=variables, stdout=output, stderr=output, text=True, start_new_session=True)


def one_node(ranks: int) -> tuple[str, ...]:
    return "--nproc-per-node", str(ranks), "--master-port", str(free_port())


def free_port() -> int:
    """Below the ports that the system gives to connections, so that none of them takes it before the program that is told it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first if first > 20_000 else 65_536)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def finish(process: subprocess.Popen[str] | Program, run_dir: Path, timeout_s: float = 600.0) -> int:
    """Waits for all ranks; kills them if they take too long."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"not finished in {timeout_s} s:\n{(run_dir / 'output.txt').read_text()[-4000:]}") from None


def kill(process: subprocess.Popen[str] | Program) -> None:
    """SIGKILL to torchrun and its ranks (which are in sessions of their own); returns when they are gone."""
    ranks = ranks_of(process)
    for pid in (*([process.pid] if isinstance(process, subprocess.Popen) else []), *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    while not all(_gone(pid) for pid in ranks):
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def ranks_of(process: subprocess.Popen[str] | Program) -> list[int]:
    """Process ids of those that have not been waited for."""
    if not isinstance(process, subprocess.Popen):
        return [pid for rank, pid in enumerate(process.ranks) if rank not in process.codes]
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def await_steps(process: subprocess.Popen[str] | Program, run_dir: Path, steps: int, timeout_s: float = 600.0) -> None:
    """Returns when ``steps`` steps are in metrics.jsonl."""
    deadline = time.monotonic() + timeout_s
    path = run_dir / "metrics.jsonl"
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        alive = process.poll() is None and time.monotonic() < deadline
        assert alive, f"did not reach step {steps}:\n{(run_dir / 'output.txt').read_text()[-4000:]}"
        time.sleep(0.005)


# -- reading back


@dataclass(frozen=True)
class Run:
    """``metrics``: one dictionary per step, without what depends on the clock or the layout by its nature (``raw`` has all).
    ``responses``: token ids by (step, row id). ``weights``: (role, kind, Hugging Face name) -> whole tensor at the end.
    ``in_flight``: by replica, the rows that the next step would have gone on with, as bytes.
    """

    metrics: list[dict[str, Any]]
    raw: list[dict[str, Any]]
    responses: dict[tuple[int, int], list[int]]
    weights: dict[tuple[str, str, str], Tensor]
    in_flight: dict[str, Tensor]
    state: dict[str, Any]

    def log_prob_difference(self) -> float:
        return max(float(row["rollout/log_prob_diff_max"]) for row in self.raw)


def read_run(run_dir: Path) -> Run:
    """With the weights of its latest checkpoint."""
    from rlhf_spmd.checkpoint.directory import read_manifest
    from rlhf_spmd.checkpoint.load import read_pieces

    directory = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    manifest = read_manifest(directory)
    stored = read_pieces(directory, [piece for key in manifest.lines for piece in manifest.pieces_in(key)])
    pieces = [((piece.role, piece.kind, piece.name), piece.shape, piece.start, tensor) for piece, tensor in stored]
    return _run_of(run_dir, pieces, manifest.state)


def _run_of(run_dir: Path, pieces: Iterable[_Piece], state: dict[str, Any]) -> Run:
    import torch

    from rlhf_spmd.training.checkpoints import ROWS_IN_FLIGHT

    raw, samples = _lines(run_dir / "metrics.jsonl"), _lines(run_dir / "rollouts.jsonl")
    metrics = [{key: value for key, value in row.items() if not key.startswith(NOT_THE_SAME)} for row in raw]
    responses = {(row["step"], row["row_id"]): token_ids(row["response"]) for row in samples}
    weights: dict[tuple[str, str, str], Any] = {}
    in_flight = {}
    for key, shape, start, tensor in pieces:
        if key[0] == ROWS_IN_FLIGHT:
            in_flight[key[2]] = tensor
            continue
        global_tensor = weights.setdefault(key, torch.full(shape, torch.nan, dtype=tensor.dtype))
        global_tensor[tuple(slice(first, first + n) for first, n in zip(start, tensor.shape, strict=True))] = tensor
    return Run(metrics, raw, responses, weights, in_flight, state)


def token_ids(response: str) -> list[int]:
    """One character per token; a response that is shorter than the limit was ended by <eos>, which its text leaves out."""
    ids = [VOCABULARY.index(character) for character in response]
    return ids if len(ids) == MAX_RESPONSE else [*ids, EOS]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- comparing


def worst_metric(one: Run, other: Run, floor: float) -> tuple[float, str]:
    """The largest relative difference of a metric, and where. Below ``floor`` a metric counts as ``floor``: there are means of
    terms of size one that cancel (pg_loss of whitened advantages), whose error has the size of the terms.
    """
    assert [row.keys() for row in one.metrics] == [row.keys() for row in other.metrics], "the runs have other metrics or steps"
    return max(_differences(one, other, floor), default=(0.0, ""))


def _differences(one: Run, other: Run, floor: float) -> Iterator[tuple[float, str]]:
    for a, b in zip(one.metrics, other.metrics, strict=True):
        for key in a:
            yield abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), floor), f"{key} of step {a['step']}: {a[key]}, {b[key]}"


def worst_tensor(one: Run, other: Run, kinds: Iterable[str] = ("param",)) -> tuple[float, str]:
    """The largest difference of a tensor relative to its largest element, and where."""
    assert one.weights.keys() == other.weights.keys(), "the checkpoints hold other tensors"
    found = [
        (float((tensor - other.weights[key]).abs().max() / tensor.abs().max().clamp_min(1e-30)), " ".join(key))
        for key, tensor in one.weights.items()
        if key[1] in kinds
    ]
    return max(found)


def assert_bit_equal(one: Run, other: Run) -> None:
    """Metrics, responses, weights, optimizer states and the state of a checkpoint."""
    import torch

    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert a == b, f"step {a['step']}: " + ", ".join(f"{key} {a[key]} {b.get(key)}" for key in a if a[key] != b.get(key))
    assert one.responses == other.responses
    assert one.state == other.state
    assert one.in_flight.keys() == other.in_flight.keys()
    assert all(torch.equal(tensor, other.in_flight[name]) for name, tensor in one.in_flight.items()), "rows in flight differ"
    assert one.weights.keys() == other.weights.keys()
    different = [" ".join(key) for key, tensor in one.weights.items() if not torch.equal(tensor, other.weights[key])]
    assert not different, f"{len(different)} of {len(one.weights)} tensors differ, such as {different[:3]}"
