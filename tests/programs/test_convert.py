"""rlhf-spmd convert: what it writes loads, means the same, and what it leaves out is said."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_spmd.convert import main
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.train import TrainConfig, read_config

SCRIPT = r"""
train=$PLACE/gsm8k/train.parquet
more="['$train', '$PLACE/math/train.parquet']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=ESTIMATOR \
    data.train_files="$more" data.val_files=$PLACE/gsm8k/test.parquet \
    data.train_batch_size=64 data.max_prompt_length=128 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=/models/small actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=KL \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.fsdp_config.fsdp_size=4 \
    actor_rollout_ref.ref.fsdp_config.fsdp_size=8 critic.model.fsdp_config.fsdp_size=-1 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.top_k=-1 \
    critic.model.path=/models/critic \
    trainer.logger='["console"]' trainer.experiment_name=mine trainer.nnodes=2 trainer.n_gpus_per_node=4 \
    trainer.total_epochs=3 trainer.save_freq=-1 trainer.test_freq=5 MORE $@
"""


def write_script(tmp_path: Path, estimator: str, *more: str, kl: bool = False) -> Path:
    source = tmp_path / "run.sh"
    text = SCRIPT.replace("ESTIMATOR", estimator).replace("KL", str(kl)).replace("MORE", " ".join(more))
    source.write_text(text.replace("$PLACE", "/data"))
    return source


def convert(tmp_path: Path, estimator: str, *more: str, kl: bool = False) -> tuple[TrainConfig, str, str]:
    out = tmp_path / "mine.yaml"
    _, written, said = run_script(str(write_script(tmp_path, estimator, *more, kl=kl)))
    out.write_text(written)
    return read_config(str(out), [])[0], written, said


def run_script(*arguments: str) -> tuple[int, str, str]:
    """The program in this process: exit code, standard output and standard error."""
    written, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, written.getvalue(), said.getvalue()


def test_a_script_with_a_critic(tmp_path: Path) -> None:
    config, text, _ = convert(tmp_path, "gae")
    assert text.startswith("# torchrun --nnodes 2 --nproc-per-node 4 -m rlhf_spmd.train")
    assert config.algorithm.name == "ppo" and not config.algorithm.kl.use_kl_in_reward, "verl's default, not this project's"
    assert config.data.path == ["/data/gsm8k/train.parquet", "/data/math/train.parquet"]
    assert (config.data.val_path, config.data.epochs, config.run.steps) == ("/data/gsm8k/test.parquet", 3, None)
    assert (config.run.save_freq, config.run.test_freq, config.logger.wandb, config.logger.trackers) == (0, 5, "disabled", [])
    actor, critic = config.models["actor"], config.models["critic"]
    assert (actor.path, actor.optim.lr, actor.optim.offload, actor.layout.zero) == ("/models/small", 2e-6, True, 3)
    assert (actor.layout.zero_size, critic.layout.zero_size, "reference:" in text) == (4, None, False), (
        "all 8 ranks are no part"
    )
    assert (actor.generation.tp, actor.activation_checkpointing) == (2, "full")
    assert (critic.path, critic.optim.lr) == ("/models/critic", 1e-5)
    assert (config.sampling.n, config.val_sampling.temperature, config.reward.function) == (5, 0, "auto")
    assert (config.algorithm.use_dynamic_bsz, config.algorithm.ppo_micro_batch_size_per_gpu) == (False, 4)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_scripts_without_one(tmp_path: Path, estimator: str) -> None:
    config, _, _ = convert(tmp_path, estimator, kl=estimator == "grpo")
    assert config.algorithm.name == estimator and set(config.models) == {
        "actor",
        *(["reference"] if estimator == "grpo" else []),
    }


def test_a_loss_and_a_reward_of_ones_own(tmp_path: Path) -> None:
    more = ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "custom_reward_function.path=mine.py")
    (tmp_path / "mine.py").write_text("def compute_score(solution_str):\n    return 1.0\n")
    config, _, _ = convert(tmp_path, "grpo", *(text.replace("mine.py", str(tmp_path / "mine.py")) for text in more))
    assert config.algorithm.name == "gspo" and config.reward.function == f"{tmp_path}/mine.py:compute_score"


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=all-linear"
    config, _, said = convert(tmp_path, "grpo", *lora, "actor_rollout_ref.actor.no_such_key=1")
    assert config.models["actor"].lora == LoraConfig(rank=8)
    assert set(convert(tmp_path, "grpo", *lora, kl=True)[0].models) == {"actor"}, "without its adapters it is the reference"
    assert "actor_rollout_ref.actor.no_such_key: left out, not known" in said
    assert "use_remove_padding: left out, rows are always packed" in said and "trainer.nnodes" not in said


def test_values_of_the_environment_stay_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_SECRET", "hidden")
    source = tmp_path / "ppo.yaml"
    source.write_text(
        "actor_rollout_ref: {model: {path: '/models/${oc.env:MODEL_SECRET}'}}\ntrainer: {experiment_name: '${data.seed}x'}\n"
        "data: {seed: 3, train_batch_size: '${oc.env:BATCH,64}', train_files: a.parquet}\n"
    )
    code, text, _ = run_script(str(source))
    assert code == 0 and "hidden" not in text and "path: /models/${oc.env:MODEL_SECRET}" in text and "dir: runs/3x" in text
    (tmp_path / "mine.yaml").write_text(text)
    config, _ = read_config(str(tmp_path / "mine.yaml"), [])
    assert (config.models["actor"].path, config.data.train_batch_size) == ("/models/hidden", 64)


def test_an_estimator_that_the_algorithm_has_not_is_left_out(tmp_path: Path) -> None:
    config, _, said = convert(tmp_path, "opo", "algorithm.filter_groups.enable=True")
    assert config.algorithm.name == "dapo" and "algorithm.adv_estimator: left out, dapo has advantages of its own" in said


def test_trackers_and_ways_to_resume_that_are_not_there_are_said(tmp_path: Path) -> None:
    more = "trainer.logger=[console,swanlab,vemlp_wandb,tensorboard]", "trainer.resume_mode=maybe"
    config, _, said = convert(tmp_path, "grpo", *more)
    assert (config.logger.wandb, config.logger.trackers, config.run.resume) == ("disabled", ["tensorboard"], "auto")
    assert "trainer.logger=swanlab,vemlp_wandb: left out, there is wandb, tensorboard, mlflow, trackio\n" in said
    assert "trainer.resume_mode: left out, maybe is not known\n" in said
    known = "trainer.logger=[console,file,wandb]", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/c"
    _, written, said = run_script(str(write_script(tmp_path, "grpo", *known)))
    assert "wandb: online" in written and "resume: /c" in written and "logger" not in said and "resume" not in said


def test_bash_expands_the_script_and_what_it_cannot_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    text = """max=$((1024 * 2))
export OUT=${NOWHERE_SET:-/tmp/here}
DATA=(
  data.train_files=[/d/a.parquet,/d/b.parquet]
  data.max_prompt_length=${max}
)
LAUNCH=(torchrun --nnodes 1)
if [ "$max" -gt 2000 ]; then steps=7; else steps=8; fi
ray status || exit 1
echo "$max" > LOG.txt
"${LAUNCH[@]}" -m recipe.dapo.main_dapo "${DATA[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    trainer.total_training_steps=$steps trainer.experiment_name=$(basename /a/mine.sh .sh) \\
    actor_rollout_ref.model.path=$MODEL trainer.default_local_dir=$OUT algorithm.filter_groups.enable=True \\
    algorithm.filter_groups.metric=acc 2>&1 | tee log
"""
    command = [sys.executable, "-m", "rlhf_spmd", "convert", str(script)]
    script.write_text(text)
    asked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "path: ${oc.env:MODEL}" in asked.stdout and "takes them from the environment: MODEL\n" in asked.stderr
    assert "not run, so what they do or answer is missing: ray\n" in asked.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run.sh"}, "the script writes nothing"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"MODEL": "/m"})
    (tmp_path / "mine.yaml").write_text(done.stdout)
    config = read_config(str(tmp_path / "mine.yaml"), [])[0]
    assert config.algorithm.name == "dapo" and config.data.path == ["/d/a.parquet", "/d/b.parquet"]
    assert (config.data.max_prompt_length, config.run.dir, config.models["actor"].path) == (2048, "/tmp/here", "/m")
    assert (config.run.steps, config.run.name) == (7, "mine")
    script.write_text("python3 -m other.program a.b=1\n")
    assert subprocess.run(command, capture_output=True, text=True).returncode == 2


def test_dapo_is_what_the_script_turns_on(tmp_path: Path) -> None:
    """Also where it turns filtering off; what does nothing as the script has it is left out and said."""
    script, keys = tmp_path / "dapo.sh", ("filter_groups", "overlong_buffer")
    command = """on=FILTER
python3 -m recipe.dapo.main_dapo data.train_files=/d.parquet algorithm.adv_estimator=grpo algorithm.filter_groups.enable=$on \\
    actor_rollout_ref.model.path=/m reward_model.overlong_buffer.enable=OVERLONG reward_model.overlong_buffer.penalty_factor=0.7 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 algorithm.kl_ctrl.kl_coef=0.0 data.seed=3 \\
    data.shuffle=False
"""
    for filtering, overlong in ((False, True), (True, False), (True, True), (False, False)):
        script.write_text(command.replace("FILTER", str(filtering)).replace("OVERLONG", str(overlong)))
        _, written, said = run_script(str(script))
        (tmp_path / "mine.yaml").write_text(written)
        config = read_config(str(tmp_path / "mine.yaml"), [])[0]
        found = [getattr(config.algorithm, key).enable for key in keys if config.algorithm.name == "dapo"]
        assert found == ([filtering, overlong] if filtering or overlong else [])
        assert "kl_loss_coef: left out, does nothing without algorithm.use_kl_loss" in said and "kl_coef" not in written
        assert "data.seed: left out, does nothing without data.shuffle" in said
        assert ("penalty_factor: left out" in said) != overlong
    script.write_text("python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m\n")
    assert "name: grpo" in run_script(str(script))[1], "verl's own default: filtering is off"


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("rloo", 0.001), ("opo", 0.001)],
)
def test_verls_defaults_are_kept(tmp_path: Path, estimator: str, expected: float) -> None:
    algorithm = convert(tmp_path, estimator)[0].algorithm
    assert (algorithm.policy.loss_agg_mode, algorithm.kl.use_kl_in_reward) == ("token-mean", False)
    algorithm = convert(tmp_path, estimator, "algorithm.use_kl_in_reward=True")[0].algorithm
    assert (algorithm.kl.kl_ctrl.kl_coef, algorithm.kl.use_kl_in_reward) == (expected, True)


def test_an_estimator_that_is_not_there(tmp_path: Path) -> None:
    code, written, said = run_script(str(write_script(tmp_path, "gpg")))
    assert code == 2 and not written and "algorithm.adv_estimator=gpg" in said


BROKEN = [
    ("run.sh", SCRIPT, "trainer.nnodes=two", "trainer.nnodes=two must be a number"),
    ("run.sh", SCRIPT, "data.seed", "'data.seed' is no override; give key=value"),
    ("a.yaml", "data: {seed: 1}", "data.seed", "'data.seed' is no override; give key=value"),
    ("a.yaml", "", "data.seed=1", "must hold verl's settings (section: key: value), and is empty"),
    ("a.yaml", "- data\n- trainer", "data.seed=1", "a.yaml' must hold a mapping (key: value), not a list"),
    ("a.yaml", "data: {seed: 1", "data.seed=1", "a.yaml':1 is not valid YAML"),
    ("a.yaml", "trainer: {test_freq: often}", "data.seed=1", "trainer.test_freq=often must be a number"),
    ("a.yaml", "algorithm: {adv_estimator: [grpo]}", "data.seed=1", "algorithm.adv_estimator=['grpo']"),
    (
        "a.yaml",
        "learning_rate: 1e-6\nbeta: 0.1",
        "output_dir=here",
        "has no key of verl; learning_rate is TRL's; docs/migrating.md",
    ),
    (
        "a.yaml",
        "data: {train_batch_size: 8}",
        "models.actor.path=/m",
        "is a configuration of rlhf_spmd already: models.actor.path",
    ),
    ("a.yaml", "mode: fast", "deep=1", "a.yaml: has no key of verl; docs/migrating.md"),
]


@pytest.mark.parametrize(("name", "text", "override", "message"), BROKEN)
def test_what_cannot_be_converted_is_one_line(tmp_path: Path, name: str, text: str, override: str, message: str) -> None:
    text = text.replace("ESTIMATOR", "grpo").replace("KL", "False").replace("MORE", "").replace("$PLACE", "/data")
    (tmp_path / name).write_text(text)
    code, written, said = run_script(str(tmp_path / name), override)
    *lines, last = said.splitlines()
    assert code == 2 and not written and message in last and not any("convert" in line for line in lines)


def test_newer_names_of_rewards(tmp_path: Path) -> None:
    """verl's since February 2026, in which the reward has a section of its own."""
    (tmp_path / "mine.py").write_text("def compute_score(solution_str, scale):\n    return 1.0\n")
    config, _, said = convert(
        tmp_path,
        "grpo",
        f"reward.custom_reward_function.path={tmp_path}/mine.py reward.custom_reward_function.name=compute_score",
        "+reward.custom_reward_function.reward_kwargs.scale=2 +reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward.reward_kwargs.overlong_buffer_cfg.len=32 reward.reward_manager.name=dapo",
    )
    assert config.reward.function == f"{tmp_path}/mine.py:compute_score" and config.reward.kwargs == {"scale": 2}
    assert (config.algorithm.name, config.algorithm.overlong_buffer.len) == ("dapo", 32) and "reward." not in said
    model = "reward.reward_model.enable=True", "reward.reward_model.model_path=/rm"
    assert convert(tmp_path, "gae", *model)[0].reward.model == "/rm"


def test_a_yaml(tmp_path: Path) -> None:
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {path: /m}, rollout: {n: 2, temperature: 0.7}}\n"
    (tmp_path / "verl.yaml").write_text(
        text + "data: {train_files: /d.parquet, val_files: null}\ntrainer: {total_training_steps: 9}\n"
    )
    _, written, _ = run_script(str(tmp_path / "verl.yaml"), "trainer.nnodes=3")
    (tmp_path / "mine.yaml").write_text(written)
    config = read_config(str(tmp_path / "mine.yaml"), [])[0]
    assert (config.run.steps, config.sampling.temperature, config.data.train_batch_size) == (9, 0.7, 1024)
    assert "--nnodes 3" in written


def test_text_of_a_yaml_stays_what_was_written(tmp_path: Path) -> None:
    """YAML 1.1 has 750 for 12:30 and 202401 for 2024_01; a switch is what verl reads."""
    (tmp_path / "verl.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {path: /m}, actor: {use_kl_loss: yes, optim: {lr: 1e-6}}}\n"
        "data: {train_files: /d.parquet}\ntrainer: {experiment_name: 12:30, project_name: 2024_01, nnodes: 1}\n"
    )
    code, written, said = run_script(str(tmp_path / "verl.yaml"))
    assert code == 0, said
    (tmp_path / "mine.yaml").write_text(written)
    config = read_config(str(tmp_path / "mine.yaml"), [])[0]
    assert (config.run.name, config.logger.project) == ("12:30", "2024_01")
    assert config.algorithm.kl.use_kl_loss is True and config.models["actor"].optim.lr == 1e-6


def test_a_script_that_trains_by_examples(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text("""if [ "$#" -lt 2 ]; then echo usage; exit 1; fi
torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer data.train_files=/d.parquet data.val_files=/v.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 engine.fsdp_size=2 model.partial_pretrain=/m model.lora_rank=8 optim.lr=1e-4 \\
    trainer.total_epochs=2 trainer.default_local_dir=/out trainer.logger=console trainer.no_such=1 \\
    use_remove_padding=true trainer.test_freq=-1
""")
    code, written, said = run_script(str(script))
    (tmp_path / "mine.yaml").write_text(written)
    config = read_config(str(tmp_path / "mine.yaml"), [])[0]
    assert code == 0 and config.algorithm.name == "sft" and set(config.models) == {"actor"}
    data, actor = config.data, config.models["actor"]
    assert (data.prompt_key, data.response_key, data.apply_chat_template) == ("extra_info.question", "extra_info.answer", True)
    assert (data.path, data.val_path, data.epochs, data.train_batch_size) == ("/d.parquet", "/v.parquet", 2, 256)
    assert (actor.path, actor.lora.rank, actor.optim.lr, actor.layout.zero) == ("/m", 8, 1e-4, 3)
    assert actor.layout.zero_size == 2
    assert (config.run.dir, config.run.test_freq, config.logger.wandb) == ("/out", 0, "disabled")
    assert "trainer.no_such: left out, not known" in said and "rows are always packed" in said
    script.write_text(script.read_text().replace("data.prompt_key=extra_info", "data.multiturn.enable=true"))
    written = run_script(str(script))[1]
    assert "prompt_key: messages" in written and "response_key" not in written


def test_arithmetic_tests_and_quotes_of_a_script_are_no_redirections(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("""nodes=1; name='a>b'
if (( nodes > 1 )); then size=2048; else size=512; fi
if [[ $nodes > 2 ]]; then steps=7; else steps=8; fi  # > what
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=$size trainer.experiment_name="$name" \\
    trainer.total_training_steps=$steps actor_rollout_ref.model.path=/m custom_reward_function.reward_kwargs.key=$MY_API_KEY > log 2>&1
""")
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_spmd", "convert", str(script)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MY_API_KEY": "hunter2"},
    )
    assert "train_batch_size: 512" in done.stdout and "steps: 8" in done.stdout and "name: a>b" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr and "${oc.env:MY_API_KEY}" in done.stdout


RENDERED = "+data.apply_chat_template_kwargs.enable_thinking=False", "+data.apply_chat_template_kwargs.effort=high"


def test_variables_of_a_chat_template(tmp_path: Path) -> None:
    config, _, said = convert(tmp_path, "grpo", *RENDERED)
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "effort": "high"} and "apply_chat" not in said
    (tmp_path / "verl.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {apply_chat_template_kwargs: {enable_thinking: false}, train_files: /d}\n"
        "actor_rollout_ref: {model: {path: /m}}\n"
    )
    assert "enable_thinking: false" in run_script(str(tmp_path / "verl.yaml"))[1]
    sft = tmp_path / "sft.sh"
    sft.write_text("torchrun -m verl.trainer.sft_trainer data.train_files=/d model.path=/m " + " ".join(RENDERED))
    (tmp_path / "sft.yaml").write_text(run_script(str(sft))[1])
    assert read_config(str(tmp_path / "sft.yaml"), [])[0].data.chat_template_kwargs["enable_thinking"] is False


def distillation(**more: object) -> list[str]:
    loss = {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False, "loss_max_clamp": 10.0, **more}
    keys = [f"distillation.distillation_loss.{key}={value}" for key, value in loss.items()]
    return [*keys, "distillation.enabled=True", "+distillation.teacher_models.one.model_path=/models/teacher"]


def test_a_student_of_a_teacher(tmp_path: Path) -> None:
    config, _, said = convert(tmp_path, "grpo", *distillation())
    assert config.algorithm.name == "distill" and config.algorithm.gamma == 0, "each token's KL by itself"
    assert config.models["teacher"].path == "/models/teacher" and set(config.models) == {"actor", "teacher"}
    assert "loss_max_clamp: left out, the teacher is a role, models.teacher, and nothing is clamped" in said
    for other, why in (
        (
            distillation(loss_mode="k3"),
            "loss_mode=k3 with use_policy_gradient=true: a student learns by the policy gradient of k1",
        ),
        (distillation(use_policy_gradient=False), "loss_mode=k1 with use_policy_gradient=false"),
        (distillation(use_task_rewards=True), "use_task_rewards=true: here a student learns from its teacher alone"),
        ([*distillation(), "+distillation.teacher_models.two.model_path=/t"], "teacher_models: there are 2; here is one"),
    ):
        code, written, said = run_script(str(write_script(tmp_path, "grpo", *other)))
        assert code == 2 and not written and why in said


def test_bounds_in_pairs(tmp_path: Path) -> None:
    key = "algorithm.rollout_correction.rollout_rs"
    correction = convert(tmp_path, "grpo", f"{key}=token_k1", f"{key}_threshold=0.6_1.6")[0].algorithm.policy.rollout_correction
    assert (correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold) == (0.6, 1.6)
    correction = convert(tmp_path, "grpo", f"{key}=token_k1", f"{key}_threshold=1.6")[0].algorithm.policy.rollout_correction
    assert (correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold) == (None, 1.6)
    for kinds, bounds, why in (
        ("token_k1,seq_max_k2", "0.6_1.6,2", "here one kind"),
        ("token_k1", "a_b", "must be a number, or two"),
    ):
        code, _, said = run_script(str(write_script(tmp_path, "grpo", f"{key}={kinds}", f"{key}_threshold={bounds}")))
        assert code == 2 and why in said


def test_optimizers_and_where_their_states_rest(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor."
    for asked, name in (("AdamW", "adamw"), ("muon", "muon"), ("AdamW8bit", "adamw_8bit"), ("Sophia", "adamw")):
        config, _, said = convert(tmp_path, "gae", f"{actor}optim.optimizer={asked}", f"critic.optim.optimizer={asked}")
        assert {config.models[role].optim.name for role in ("actor", "critic")} == {name}
        assert ("critic.optim.optimizer: left out, there is no Sophia; adamw takes its place" in said) == (asked == "Sophia")
    more = f"{actor}veomni.param_offload=True", f"+{actor}optim.override_optimizer_config.optimizer_cpu_offload=True"
    config, _, said = convert(tmp_path, "grpo", *more, "model_engine=veomni", f"{actor}optim.lr_decay_style=cosine")
    actor_config = config.models["actor"]
    assert (actor_config.offload, actor_config.optim.offload, actor_config.optim.lr_scheduler_type) == (True, True, "cosine")
    assert "model_engine: left out, it chooses among verl's defaults" in said


@pytest.mark.parametrize(("training", "zero"), [(4, 0), (1, 3)])
def test_megatrons_weights_are_sharded_where_generation_needs_it(tmp_path: Path, training: int, zero: int) -> None:
    """The script generates with tp=2. A reference's optimizer, which verl can name, is none."""
    layout = f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={training}", "model_engine=megatron"
    config, _, said = convert(tmp_path, "grpo", *layout, "actor_rollout_ref.ref.megatron.optimizer_offload=True", kl=True)
    assert config.models["actor"].layout.zero == zero and config.models["actor"].generation.tp == 2
    assert ("actor_rollout_ref.actor.megatron: left out, layout.zero=3 shards the weights" in said) == (zero == 3)
    assert "optimizer_offload: left out, a reference is not trained" in said


def test_megatrons_experts_are_shared(tmp_path: Path) -> None:
    """Its ep counts ranks of tp too where each expert is whole on one; a rank holds as much of them here."""
    actor, more = "actor_rollout_ref.actor.megatron.", "model_engine=megatron"
    reference = actor.replace("actor.meg", "ref.meg")
    given = (
        f"{actor}tensor_model_parallel_size=2",
        f"{actor}expert_model_parallel_size=8",
        f"{reference}expert_model_parallel_size=2",
    )
    for whole, ep in ((f"{actor}expert_tensor_parallel_size=1", 4), (f"{actor}expert_tensor_parallel_size=2", 8), (more, 8)):
        config, _, said = convert(tmp_path, "grpo", *given, whole, more, kl=True)
        assert (config.models["actor"].layout.ep, config.models["reference"].layout.ep) == (ep, 2)
        assert ("expert_tensor_parallel_size: left out, layout.tp splits each expert" in said) == (whole != more)


@pytest.mark.parametrize(("experts", "tp", "ours"), [(8, 4, 4), (1, 4, 1), (8, 1, 1)])
def test_experts_that_generation_shares(tmp_path: Path, experts: int, tp: int, ours: int) -> None:
    """verl's number counts replicas, too. Any tp fits then, so weights need no ZeRO-3 beside Megatron."""
    rollout, more = "actor_rollout_ref.rollout.", ("model_engine=megatron", "actor_rollout_ref.rollout.data_parallel_size=2")
    given = f"{rollout}expert_parallel_size={experts}", f"{rollout}tensor_model_parallel_size={tp}", *more
    config, _, said = convert(tmp_path, "grpo", *given)
    assert (config.models["actor"].generation.ep, config.models["actor"].generation.tp) == (ours, tp)
    assert ("expert_parallel_size: left out, generation shares experts among the ranks" in said) == (tp == 1)
    assert config.models["actor"].layout.zero == (3 if (experts, tp) == (1, 4) else 0)


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3", "R4"])
def test_experts_of_the_pass_before(tmp_path: Path, mode: str) -> None:
    """And the coefficient of Megatron's balance loss, whose scale is another."""
    megatron = "actor_rollout_ref.actor.megatron."
    records = f"actor_rollout_ref.rollout.enable_rollout_routing_replay={mode == 'R3'}"
    more = f"{megatron}router_replay.mode={mode}", f"+{megatron}override_transformer_config.moe_aux_loss_coeff=0.01", records
    config, _, said = convert(tmp_path, "grpo", *more)
    assert config.models["actor"].router_replay == (mode if mode in ("R2", "R3") else "disabled")
    assert (f"{megatron}router_replay.mode: left out, there is no R4; models.actor.router_replay has R2" in said) == (
        mode == "R4"
    )
    assert "rollout_routing_replay" not in said
    assert "moe_aux_loss_coeff: left out, models.<role>.router_aux_loss_coef is theirs times layers" in said


def test_what_a_script_demands_is_a_reference(tmp_path: Path) -> None:
    """Whatever words it demands it with; a brace and a list are read though they are quoted for Hydra."""
    script = tmp_path / "run.sh"
    script.write_text(
        "MODEL=${MODEL_DIR:?say where the model is}\nPLAN='{layers.\\{*\\}:{}}'\n"
        "OPTIONS=\"model.path=$MODEL optim.betas='[0.9,0.99]' +model.recompute=$PLAN optim.lr=1e-4 optim.min_lr=1e-5\"\n"
        "torchrun -m verl.trainer.sft_trainer data.train_files=/d.parquet $OPTIONS trainer.save_freq=after_each_epoch "
        "trainer.max_ckpt_to_keep=1\n"
    )
    code, written, said = run_script(str(script))
    assert code == 0 and "path: ${oc.env:MODEL_DIR}" in written and "MODEL_DIR" in said
    (tmp_path / "mine.yaml").write_text(written.replace("${oc.env:MODEL_DIR}", "/m"))
    config, _ = read_config(str(tmp_path / "mine.yaml"), [])
    optim = config.models["actor"].optim
    assert (list(optim.betas), optim.min_lr_ratio, config.run.keep_checkpoints) == ([0.9, 0.99], pytest.approx(0.1), 2)
    assert "trainer.save_freq: left out, 'after_each_epoch'; here it is a number of steps" in said
