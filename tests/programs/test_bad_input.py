"""Bad input stops a training run before it starts: one line that names the key or file, the value and what is allowed.

The table goes through the program's own ``prepare`` in this process, two through the command line, one under torchrun.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tasks
from ranks import run_command
from rlhf_spmd.process.exit import classify
from rlhf_spmd.train import prepare

# overrides, number of ranks, parts of the line. Paths that start with ``@`` are written from CONTENTS below.
ACTOR, CALL = "models.actor.generation", "models.actor.calls.generate_sequences"
UNCHUNKED = [f"{ACTOR}.enable_chunked_prefill=false", f"{ACTOR}.max_num_batched_tokens=20", f"{ACTOR}.max_num_seqs=20"]
CONFIG = [
    (["run.stepz=3"], 1, ["unknown key 'run.stepz'", "did you mean 'run.steps'?", "save_freq"]),
    (["models.reward.lora.rank=8"], 1, ["models.reward.lora.rank=8: this role has no model; leave it out"]),
    (["models.reward.optim.lr=1"], 1, ["models.reward.optim.lr=1.0: this role has no model"]),
    (["models.reference.optim.lr=1"], 1, ["models.reference.optim.lr=1.0: this role is not trained; leave it out"]),
    (["--learning_rate", "1e-5"], 1, ["no option 'learning_rate'; it is TRL's; here: models.actor.optim.lr", "key=value"]),
    (["--node-rank=1"], 1, ["no option 'node_rank'; it is torchrun's", "docs/clusters.md"]),
    (["--run.steps", "run.seed=1", "3"], 1, ["no option '--run.steps'", "write run.steps=3"]),
    (["configs/x.yaml"], 1, ["'configs/x.yaml' is a file; give it as --config configs/x.yaml"]),
    (["model.actor.path=x"], 1, ["unknown key 'model'", "did you mean 'models'?"]),
    (["models.crtic.dtype=float32"], 1, ["models.crtic", "did you mean 'critic'?", "actor, critic, reference, reward"]),
    (["run.steps=many"], 1, ["run.steps='many'", "an integer"]),
    (["run.steps=0"], 1, ["run.steps=0", "at least 1"]),
    (["reward.timeout_s=700"], 1, ["reward.timeout_s=700.0", "run.timeout_s=600.0"]),
    (["run.timeout_s=1e30"], 1, ["run.timeout_s=1e+30", "at most 100000000"]),
    (["reward.timeout_s=1e30"], 1, ["reward.timeout_s=1e+30", "at most 100000000"]),
    (["run.resume=/nowhere"], 1, ["run.resume='/nowhere'", "auto", "never", "directory"]),
    (["run.dir=@file/run"], 1, ["run.dir=", "not a directory"]),
    (["run.name"], 1, ["'run.name'", "key.subkey=value"]),
    (["models.critic.path=configs"], 1, ["models.critic.path: ", "config.json: no such file"]),
    (
        [f"{ACTOR}.buffers=keep", f"{CALL}.pool=b", "placement.pools.b=[0]"],
        1,
        ["buffers=keep: weights for calls.generate_sequences"],
    ),
    (["run=3"], 1, ["run=3", "mapping"]),
    (["run.seed=1", "run=3", "run.steps=2"], 1, ["'run=3'", "'run' is a section", "run.<key>="]),
    (["data.path={a.jsonl: 3, b.jsonl: 0}"], 1, ["data.path: the weight of 'b.jsonl' is 0.0; it must be above 0"]),
    (["algorithm=null"], 1, ["algorithm=null", "algorithm.name=<another one>"]),
    (["run.steps.more=3"], 1, ["run.steps={'more': 3}", "an integer"]),
    (["run.dir=${run.nmae}"], 1, ["run.dir", "run.nmae"]),
    (["sampling.temperature=0", "sampling.n=2"], 1, ["sampling.temperature=0.0, sampling.n=2: greedy responses"]),
    (["models.actor.optim.momentum=0.9"], 1, ["optim.momentum=0.9 does nothing without models.actor.optim.name=muon; leave"]),
    (["algorithm.gamma=1.5"], 1, ["algorithm.gamma=1.5", "at least 0 and at most 1"]),
    (["algorithm.clip_ratio_low=nan"], 1, ["algorithm.clip_ratio_low=nan: must be a finite number"]),
    (["algorithm.adv_estimator=gea"], 1, ["algorithm.adv_estimator=gea: ppo has gae"]),
    (["algorithm.kl_ctrl.type=fixd"], 1, ["algorithm.kl_ctrl.type='fixd' is not known; did you mean 'fixed'? allowed: fixed"]),
    (["algorithm.kl_loss_coef=0.1"], 1, ["algorithm.kl_loss_coef=0.1 does nothing without algorithm.use_kl_loss;"]),
    (["algorithm.use_kl_in_reward=false"], 1, ["kl_ctrl.kl_coef=0.05 does nothing without algorithm.use_kl_in_reward;"]),
    (["algorithm.kl_ctrl.type=fixed"], 1, ["target_kl=0.5 does nothing without algorithm.kl_ctrl.type=adaptive;"]),
    (
        ["data.truncation=left"],
        1,
        ["data.truncation=left does nothing without data.filter_overlong_prompts=false; leave it out"],
    ),
    (["data.val_batch_size=3"], 1, ["data.val_batch_size=3 does nothing without data.val_path; leave it out"]),
    (["algorithm.name=grop"], 1, ["unknown algorithm 'grop'", "did you mean 'grpo'?", "available: ", "grpo", "ppo", "sft"]),
    (["algorithm.name=outside.nothing"], 1, ["'outside.nothing'", "PYTHONPATH"]),
    (["algorithm.name=outside.rewards"], 1, ["outside.rewards", "'step'"]),
    (["algorithm.name=outside.no_config"], 1, ["outside.no_config", "AlgorithmConfig"]),
    (["reward.function=gsm8"], 1, ["reward.function 'gsm8'", "did you mean 'gsm8k'?"]),
    (["reward.function=outside.rewards:oftn_fails"], 1, ["'outside.rewards:oftn_fails'", "often_fails"]),
    (
        ["reward.function=outside.rewards:unknown_arguments"],
        1,
        ["takes (text, question): no row of data.path has", "prompt, response, row;"],
    ),
    (["reward.data_sources=[sums]"], 1, ["reward.data_sources", "'sums'", "None"]),
    (["rewards.critic.function=gsm8k"], 1, ["rewards.critic: this algorithm has no such reward", "its rewards are reward"]),
    (["rewards.response_length.function=gsm8k"], 1, ["response_length: metrics of the run begin with response_length/"]),
    (["rewards.reward/extra.function=gsm8k"], 1, ["rewards.reward/extra: a name has no '/'"]),
    (["rewards.controller.function=gsm8k"], 1, ["rewards.controller: this algorithm has no such reward", "its rewards are"]),
    (["rewards.cost.weight=2"], 1, ["rewards.cost.function=null: there is no cost", "rewards.cost.model"]),
    (["reward.function=null", "rewards.cost.weight=2"], 1, ["rewards.cost.function=null: there is no cost"]),
    (["rewards.reward.function=gsm8k"], 1, ["reward and rewards.reward", "give one"]),
    (["reward.max_failure_rate=2"], 1, ["reward.max_failure_rate=2.0", "at least 0 and at most 1"]),
    (["logger.wandb=sometimes"], 1, ["logger.wandb='sometimes'", "online, offline, disabled"]),
    (["logger.trackers=[mlflow]"], 1, ["logger.trackers[0]='mlflow' is not known; allowed: tensorboard"]),
    # layouts and pools
    (["models.actor.layout.dp=4"], 2, ["models.actor.layout", "= 4 ranks", "has 2"]),
    (["models.actor.layout.tp=3"], 3, ["models.actor.layout", "tp=3", "num_attention_heads=4"]),
    (["models.critic.layout.pp=8"], 8, ["models.critic.layout", "pp=8", "num_hidden_layers=4"]),
    (["models.actor.layout.vpp=2"], 1, ["models.actor.layout", "vpp=2", "pp=1"]),
    (
        ["models.critic.layout.pp=2", "models.critic.layout.vpp=3"],
        2,
        ["layout.vpp=3: each of 6 stages", "num_hidden_layers=4"],
    ),
    (["models.actor.layout.zero=5"], 2, ["models.actor.layout", "zero=5", "0, 1, 2, 3"]),
    ([f"{ACTOR}.reuse_rollout_log_probs=true", "models.actor.layout.tp=2"], 2, ["generation has tp=1 and training tp=2"]),
    (["models.actor.generation.tp=2"], 2, ["models.actor.generation.tp=2", "must divide", "tp=1"]),
    (["models.actor.generation.reshard_method=fast"], 1, ["models.actor.generation.reshard_method='fast'", "zero_redundancy"]),
    (["models.reference.generation.buffers=keep"], 1, ["models.reference.generation.buffers=keep: this role"]),
    (["models.critic.generation.tp=7"], 1, ["models.critic.generation.tp=7: this role does not generate; leave it out"]),
    (["run.seed=18446744073709551616"], 1, ["must be at least -9223372036854775808 and at most"]),
    (["placement.pools.a=[0,5]"], 2, ["placement.pools.a", "rank 5", "0 to 1"]),
    (["placement.pools.a=[0]"], 2, ["placement.pools.a", "no role's pool names it"]),
    (["placement.pools.a=[1,0]"], 2, ["placement.pools.a", "[1, 0]", "ascend"]),
    (["models.critic.pool=b"], 2, ["models.critic.pool='b'", "placement.pools", "none"]),
    (["placement.strategy=AUTTO"], 2, ["placement.strategy 'AUTTO'", "did you mean 'auto'?", "auto, colocate, interleave"]),
    (["placement.strategy=auto", "placement.profile=/nope"], 2, ["placement.profile=/nope", "rlhf-spmd plan profile"]),
    (["placement.pools.all=[0]"], 2, ["placement.pools.all=[0]", "another name"]),
    (["placement.speeds=[1.0,0.5,1.0]"], 2, ["placement.speeds has 3 numbers", "this job has 2 ranks"]),
    (["placement.generation_speeds=[1.0]"], 2, ["placement.generation_speeds has 1 numbers", "this job has 2 ranks"]),
    (["placement.speeds=[1.0,0]"], 2, ["placement.speeds[1]=0.0: must be above 0"]),
    (["rollout.chunks=0"], 1, ["rollout.chunks=0", "at least 1"]),
    (["placement.strategy=split"], 1, ["placement.strategy='split'", "2 ranks", "has 1"]),
    (["placement.strategy=standalone"], 2, ["placement.strategy='standalone'", "3 ranks", "reference at least 1", "has 2"]),
    (["placement.strategy=outside.rewards"], 1, ["placement.strategy 'outside.rewards'", "has no 'place'"]),
    (["placement.ratios.critic=1.5"], 2, ["placement.ratios.critic=1.5", "at most 1"]),
    (["placement.ratios.critc=0.5"], 2, ["placement.ratios.critc", "did you mean 'critic'?"]),
    (["placement.ratios={critic.update: 0.5}"], 2, ["placement.ratios.critic.update", "critic.compute_values"]),
    (
        ["placement.strategy=split", "placement.ratios={actor: 0.25, critic: 0.5}"],
        4,
        ["3 ranks", "placement.ratios (0.5)", "has 4"],
    ),
    (["placement.strategy=separate", "placement.ratios={actor: 0.5, critic: 0.25}"], 4, ["critic=0.25 of 4 ranks is 1"]),
    (["placement.pools.a=[0]", "models.critic.pool=a", "placement.ratios.critic=0.5"], 2, ["models.critic says by itself"]),
    (["placement.strategy=separate", f"{ACTOR}.reshard_method=full_gather"], 2, ["calls.generate_sequences", "leave it out"]),
    (["placement.strategy=separate", "models.actor.generation.tp=2"], 2, ["actor.generate_sequences at least 2", "has 2"]),
    (["placement.strategy=separate", "models.critic.layout.tp=2"], 2, ["placement.strategy='separate'", "3 ranks", "has 2"]),
    (["models.critic.calls.compute_value.layout.tp=1"], 1, ["calls.compute_value", "did you mean 'compute_values'?"]),
    (["models.critic.calls.update.layout.dp=1"], 1, ["calls.update:", "the role's own pool", "compute_values"]),
    (["models.critic.calls.compute_values.layout.tp=4"], 2, ["critic.calls.compute_values.layout", "= 4 ranks", "has 2"]),
    (["models.critic.calls.compute_values.layuot.tp=1"], 1, ["layuot", "did you mean", "layout"]),
    (["models.critic.calls.compute_values.pool=b"], 2, ["models.critic.calls.compute_values.pool='b'", "placement.pools"]),
    (["models.reward.calls.compute_reward.layout.dp=1"], 1, ["models.reward.calls.compute_reward", "has no model"]),
    ([f"{CALL}.layout.zero=3"], 2, ["calls.generate_sequences.layout", "zero(3)", "leave"]),
    ([f"{CALL}.layout.dp=3"], 3, ["data.train_batch_size=8", "3 generation replicas"]),
    # batches and lengths
    (
        ["models.actor.layout.tp=65536", "models.actor.layout.cp=65536"],
        1,
        ["needs 4294967296 ranks; at most 65536 are allowed"],
    ),
    (["models.critic.layout.zero=1", "models.critic.layout.zero_size=3"], 4, ["must divide dp * cp = 4; allowed: 1, 2, 4"]),
    (["models.actor.layout.cp=3"], 3, ["models.actor.layout.cp=3", "4 query heads and 2 KV heads; allowed: 1, 2, 4"]),
    (["models.actor.layout.zero_size=2"], 4, ["actor", "zero_size=2 needs", "zero 1, 2 or 3"]),
    (["data.max_prompt_length=60"], 1, ["data.max_prompt_length", "= 72 tokens", "models.actor", "64"]),
    (["val_sampling.max_response_length=60"], 1, ["val_sampling.max_response_length = 72 tokens", "64"]),
    (["val_sampling.stop=['a<eos>']"], 1, ["val_sampling.stop: 'a<eos>'", "special token '<eos>'", "its id 0"]),
    (["sampling.min_response_length=13"], 1, ["sampling.min_response_length=13", "data.max_response_length=12"]),
    (["algorithm.ppo_max_token_len_per_gpu=9"], 1, ["= 24 tokens", "algorithm.ppo_max_token_len_per_gpu=9"]),
    (["val_sampling.logprobs=38"], 1, ["val_sampling.logprobs=38", "between 0 and 37"]),
    ([f"{ACTOR}.num_pages=2", f"{ACTOR}.page_size=8"], 1, ["num_pages=2", "= 24 tokens", "need 3 pages of page_size=8"]),
    (UNCHUNKED, 1, ["models.actor.generation.max_num_batched_tokens=20", "= 24 tokens", "enable_chunked_prefill=true"]),
    # models
    (["models.actor.path=/nowhere/model"], 1, ["path=/nowhere/model is not a directory", "(ORGANISATION/NAME, where"]),
    (["models.critic.path=@no_weights"], 1, ["@no_weights", "is there; models.critic.random_init=true draws"]),
    (["models.actor.path=@a_run"], 1, ["path=@a_run has no config.json: it is of a run", "into @a_run/export; give"]),
    (["models.actor.path=@a_run/checkpoints/step_1"], 1, ["step_1 has no config.json", "into @a_run/export; give that"]),
    (["models.actor.path=@cut_weights"], 1, ["@cut_weights/model.safetensors", "cannot be read as safetensors"]),
    (["models.actor.path=@other_shapes"], 1, ["@other_shapes/model.safetensors", "[96, 64]", "[128, 64]"]),
    (["models.reference.path=@a_tensor_less"], 1, ["@a_tensor_less/model.safetensors", "'model.norm.weight' is missing"]),
    (["reward.model=@no_value_head"], 1, ["@no_value_head/model.safetensors", "'score.weight' is missing"]),
    (["models.actor.path=@unknown_family"], 1, ["@unknown_family/config.json", "'lama'", "did you mean 'llama'?"]),
    (["models.critic.path=@other_vocabulary", "models.critic.random_init=true"], 1, ["models.critic.path", "40", "37"]),
    (["models.actor.path=@broken_config"], 1, ["@broken_config/config.json", "not readable as JSON"]),
]
DATA = [
    (["data.path=/nowhere/train.jsonl"], 1, ["data file '/nowhere/train.jsonl' does not exist"]),
    (["data.path=nowhere/train"], 1, ["'nowhere/train' is not a file or directory here"]),
    (["data.path=@broken.jsonl"], 1, ["@broken.jsonl:2: not valid JSON"]),
    (["data.path=@no_prompt.jsonl"], 1, ["@no_prompt.jsonl:1: no key 'prompt'", "data.prompt_key", "text"]),
    (["data.path=@half.jsonl"], 1, ["@half.jsonl:1: not valid Unicode", "\\ud83d"]),
    (["data.chat_template='{% if'", "data.apply_chat_template=true"], 1, ["data.chat_template, line 1: not valid Jinja"]),
    (["data.path=@lists.jsonl"], 1, ["@lists.jsonl:1", "must be a JSON object, not list"]),
    (["data.path=@empty.jsonl"], 1, ["@empty.jsonl' holds no rows"]),
    (["data.path=@one.jsonl"], 1, ["data.train_batch_size=8", "only 1 usable rows"]),
    (["data.path=@binary.jsonl"], 1, ["@binary.jsonl:1", "not valid UTF-8"]),
    (["data.val_path=/nowhere/val.jsonl"], 1, ["'/nowhere/val.jsonl' does not exist"]),
    (["data.max_prompt_length=2"], 1, ["data.max_prompt_length=2", "the shortest has 3"]),
    (["models.actor.path=@no_tokenizer"], 1, ["@no_tokenizer' holds no tokenizer", "tokenizer.json"]),
]


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


def cut(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def drop_tensor(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def as_run(directory: Path) -> None:
    (directory / "checkpoints" / "step_1").mkdir(parents=True)
    (directory / "config.json").rename(directory / "config.yaml")


CONTENTS: dict[str, bytes | Callable[[Path], object]] = {
    "file": b"",
    "broken.jsonl": b'{"prompt": "12"}\n{"prompt": \n',
    "no_prompt.jsonl": b'{"text": "12"}\n',
    "half.jsonl": b'{"prompt": "12", "note": "\\ud83d"}\n',
    "lists.jsonl": b"[1]\n",
    "empty.jsonl": b"",
    "one.jsonl": b'{"prompt": "12"}\n',
    "binary.jsonl": b"\xff\xfe\x00abc",
    "no_weights": lambda model: (model / "model.safetensors").unlink(),
    "cut_weights": cut,
    "other_shapes": with_config(intermediate_size=128),
    "a_tensor_less": drop_tensor,
    "unknown_family": with_config(model_type="lama"),
    "other_vocabulary": with_config(vocab_size=40),
    "broken_config": lambda model: (model / "config.json").write_text('{"a":'),
    "a_run": as_run,
    "no_value_head": lambda model: None,
    "no_tokenizer": lambda model: [file.unlink() for file in model.glob("tokenizer*")],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    for name, content in CONTENTS.items():
        if isinstance(content, bytes):
            (root / name).write_bytes(content)
        else:
            content(Path(shutil.copytree(tasks.task() / "actor", root / name)))
    return root


def place(texts: list[str], files: Path) -> list[str]:
    return [text.replace("@", f"{files}/") for text in texts]


def overrides_of(row: tuple[list[str], int, list[str]]) -> str:
    return " ".join(row[0]) or f"{row[1]} ranks"


@pytest.mark.parametrize("row", [*CONFIG, *DATA], ids=overrides_of)
def test_the_line_names_key_or_file_value_and_what_is_allowed(row: tuple[list[str], int, list[str]], files: Path) -> None:
    overrides, ranks, parts = row
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refusal:
        prepare(str(tasks.task() / "ppo.json"), place(overrides, files), ranks)
    assert [part for part in place(parts, files) if part not in str(refusal.value)] == [], str(refusal.value)
    assert classify(refusal.value) == ("data" if row in DATA else "config")


@pytest.mark.parametrize(
    ("code", "override", "line"),
    [
        (2, "run.stepz=3", r"config error: unknown key 'run\.stepz'; did you mean 'run\.steps'\?.*"),
        (3, "data.path=@broken.jsonl", r"data error: \S*/broken\.jsonl:2: not valid JSON.*"),
    ],
)
def test_the_command_prints_the_line_alone_and_exits_with_2(
    code: int, override: str, line: str, files: Path, tmp_path: Path
) -> None:
    """As a person starts it, without torchrun. ``code``: of exit_status.json."""
    arguments = ["--config", str(tasks.task() / "ppo.json"), f"run.dir={tmp_path}", *place([override], files)]
    command = run_command("rlhf_spmd.train", arguments, tasks.environment())
    assert re.fullmatch(line + r"\n", command.stderr), command.stderr
    assert command.stdout == ""
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert (command.returncode, status["code"], status["message"]) == (2, code, command.stderr.strip())


def test_under_torchrun_the_line_comes_once_and_each_rank_has_the_code(tmp_path: Path) -> None:
    process = tasks.start_torchrun(tmp_path, [f"run.dir={tmp_path}", "models.actor.layout.tp=4"], *tasks.one_node(2))
    assert tasks.finish(process, tmp_path, timeout_s=200.0) == 1  # ranks that wait for each other do so for 300 s
    output = (tmp_path / "output.txt").read_text()
    before_report = re.split(r"^E\d{4} ", output, maxsplit=1, flags=re.M)[0].splitlines()
    (line,) = (text for text in before_report if not re.match(r"\[?W\d{4} ", text))
    assert re.match(r"config error: models\.actor\.layout on pool 'all': pp\(1\) \* tp\(4\) \* dp\(1\) = 4 ranks, .* 2;", line)
    assert re.findall(r"exitcode\s+: (\d+)", output) == ["2", "2"]
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "config"
