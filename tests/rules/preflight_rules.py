"""What breaks each rule of ``training`` and ``preflight``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tasks
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.config.rules import check_rules
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.preflight.checks import AGENT_RULES, ROLE_BATCH_RULES, ROLE_RULES, RoleInRun, RunSettings
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.training.train_config import read_config
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.role_plan import CallPlan

ACTOR, CALL = "models.actor.generation", "models.actor.calls.generate_sequences"


def ppo(*overrides: str, ranks: int = 1) -> Callable[[], Any]:
    """The small PPO task with these settings."""
    return lambda: prepare(str(tasks.task() / "ppo.json"), tasks.settings(Path("unused"), 4, *overrides), ranks)


def other(algorithm: str, *overrides: str) -> Callable[[], Any]:
    """Another algorithm on the small task's prompts."""
    return lambda: prepare(
        None,
        [
            f"algorithm.name={algorithm}",
            f"data.path={tasks.task() / 'train.jsonl'}",
            f"models.actor.path={tasks.task() / 'actor'}",
            "data.train_batch_size=8",
            "run.dir=unused",
            *overrides,
        ],
        1,
    )


SAMPLED = ("data.max_prompt_length=12", "data.max_response_length=12", "reward.function=tasks:even_share")
REPLAYS = ("algorithm.name=grpo", "data.path=unused", "models.actor.router_replay=R3", "run.dir=unused")
AGENTS = ("data.max_prompt_length=12", "data.max_response_length=12", "sampling.n=2", "agent.command=true")


def outside(*overrides: str, num_hosts: int = 1) -> Callable[[], Any]:
    """A run whose episodes programs outside fetch."""
    settings = ["algorithm.name=grpo", "data.path=unused", "run.dir=unused", "agent.external=127.0.0.1:0", *overrides]

    def check() -> None:
        config, _ = read_config(None, settings)
        check_rules(AGENT_RULES, RunSettings(config=config, num_hosts=num_hosts))

    return check


def agents_that_keep_pages() -> None:
    run = ppo("rollout.in_flight=16", f"{ACTOR}.kv_cache=keep")()
    config = replace(run.config, agent=AgentConfig(command="true"))
    check_rules(ROLE_BATCH_RULES, RoleInRun(config=config, role="actor", role_plan=run.roles["actor"]))


def role(role: str, tied: bool = False, calls: tuple[str, ...] = (), **settings: Any) -> Callable[[], Any]:
    """A placed role of the small PPO task with these settings. ``calls``: those that run elsewhere."""

    def check() -> None:
        run = ppo()()
        plan = run.roles[role]
        spec = replace(plan.spec, tie_word_embeddings=tied)
        elsewhere = {method: CallPlan(plan.pool, plan.shape) for method in calls}
        plan = replace(plan, config=RoleConfig(**settings), spec=spec, calls=elsewhere)
        check_rules(ROLE_RULES, RoleInRun(config=run.config, role=role, role_plan=plan))

    return check


def replaying_without_log_probs() -> None:
    run = ppo("algorithm.rollout_correction.bypass_mode=true")()
    actor = run.roles["actor"]
    plan = replace(actor, config=replace(actor.config, router_replay="R2"))
    check_rules(ROLE_RULES, RoleInRun(config=run.config, role="actor", role_plan=plan))


LORA = LoraConfig(rank=8)
CASES = [
    # the length of a run
    (
        ppo("data.epochs=2"),
        "run.steps=4, data.epochs=2.0: both say how long the run is; set run.steps=null, or leave data.epochs out",
    ),
    (ppo("run.steps=null"), "run.steps=null: nothing says how long the run is; give run.steps, or data.epochs"),
    # batches and samples
    (
        ppo("data.train_batch_size=6"),
        "algorithm.ppo_mini_batch_size=4, data.train_batch_size=6: the first must divide the second, both count prompts; change one "
        "of them",
    ),
    (
        ppo("sampling.top_k=1"),
        "sampling.temperature=1.0, sampling.top_k=1: training needs samples, and all would be the likeliest tokens; use a temperature "
        "above 0, and top_k above 1 or 0",
    ),
    (
        other("remax", *SAMPLED, "rollout.in_flight=16"),
        "rollout.in_flight=16, algorithm.name=remax: this algorithm takes no prompts in flight; leave the first out",
    ),
    (
        other("grpo", *SAMPLED, "sampling.n=1"),
        "sampling.n=1, algorithm.name=grpo: the algorithm compares the responses to a prompt; use at least 2",
    ),
    (
        ppo("rollout.in_flight=4"),
        "rollout.in_flight=4, data.train_batch_size=8: the first counts the prompts in flight, of which a step takes the second; raise "
        "the first or leave it out",
    ),
    (
        ppo("rollout.in_flight=20", "rollout.max_staleness=1"),
        "rollout.max_staleness=1, rollout.in_flight=20: rows take 2 steps more than the one that began them, and what they drew then "
        "would not be learned; raise the first or lower the second",
    ),
    # agents
    (
        other("remax", *AGENTS),
        "agent.command=true, algorithm.name=remax: this algorithm learns one row of each sample; take ppo or grpo, or one of their "
        "variants",
    ),
    (
        other("dr_grpo", *AGENTS),
        "agent.command=true, algorithm.loss_agg_mode=seq-mean-token-sum-norm: an episode with several conversations would count for "
        "more; take token-mean",
    ),
    (
        other("grpo", *AGENTS, "algorithm.use_kl_in_reward=true"),
        "agent.command=true, algorithm.use_kl_in_reward=true: the rows of an episode have one score; set use_kl_loss in place of the "
        "second",
    ),
    (
        other("grpo", *AGENTS, "algorithm.mask_truncated_completions=true"),
        "agent.command=true, algorithm.mask_truncated_completions=true: agents limit answers themselves, and turns that branches have "
        "in common would be lost with one of them; leave the second out",
    ),
    (
        other("grpo", *AGENTS, "reward.function=tasks:even_share"),
        "agent.command=true: the agent gives the reward, and the conversations of an episode would have different ones from reward or "
        "rewards; leave those out",
    ),
    (
        other("grpo", *AGENTS, "environment.cls=calculator"),
        "agent.command=true: the agent has its own tools; leave environment and environments out",
    ),
    (
        lambda: check_rules(AGENT_RULES, RunSettings(config=read_config(None, [*AGENTS, *REPLAYS])[0])),
        "agent.command=true: episodes do not record experts; take another models.actor.router_replay than R3",
    ),
    (
        outside("rollout.in_flight=128", "run.test_freq=2"),
        "agent.external=127.0.0.1:0, rollout.in_flight=128, run.test_freq=2: programs that wait for answers of training would fetch no "
        "episode of a validation; leave one of them out",
    ),
    (
        outside(num_hosts=2),
        "agent.external=127.0.0.1:0: programs of the other hosts cannot ask there, nor those of this one the replicas of others; take "
        "0.0.0.0:PORT",
    ),
    (
        other("grpo", *AGENTS, "placement.strategy=auto"),
        "placement.strategy=auto, agent.command=true: plans count one row for each sample; run `rlhf-spmd plan` without agent, with "
        "lengths of whole conversations in workload, and give plan=FILE",
    ),
    (
        agents_that_keep_pages,
        f"{ACTOR}.kv_cache=keep, agent.command=true: pages that are kept would leave no room for conversations of the next call; take "
        "offload or free",
    ),
    (
        other("grpo", *AGENTS, "agent.timeout_s=500"),
        "agent.timeout_s=500.0, run.timeout_s=600.0: other ranks wait for the episodes of a step, which end within 80% of the second; "
        "lower the first or raise the second",
    ),
    # roles in a run
    (
        ppo("algorithm.critic_warmup=4"),
        "run.steps=4: models.actor would never be trained; use more steps, or let it learn earlier (algorithm.critic_warmup?)",
    ),
    (
        ppo("algorithm.ppo_mini_batch_size=1", "sampling.n=1", ranks=4),
        "data.train_batch_size=8, sampling.n=1: a mini-batch has 1 rows, fewer than models.actor.layout.dp=4; use larger batches "
        "(algorithm.ppo_mini_batch_size?), more samples of each prompt, or a smaller dp",
    ),
    (
        ppo(f"{ACTOR}.kv_cache=keep"),
        f"{ACTOR}.kv_cache=keep, rollout.in_flight=null: all responses end in their step and no pages are left to keep; set "
        "rollout.in_flight above data.train_batch_size=8, or leave the first out",
    ),
    (
        ppo(ranks=3),
        "data.train_batch_size=8, rollout.in_flight=null: models.actor has 3 generation replicas, which cannot have equally many "
        "prompts; use multiples of 3",
    ),
    (
        replaying_without_log_probs,
        "models.actor.router_replay=R2, algorithm.name=ppo: with bypass_mode no forward pass computes the old log-probs; take R3, or "
        "leave it out",
    ),
    # validation
    (
        other("outside.undecided", *SAMPLED, "run.test_freq=2"),
        "run.test_freq=2, algorithm.name=outside.undecided: this algorithm has no validation; set run.test_freq=0",
    ),
    (
        ppo("run.test_freq=2"),
        "run.test_freq=2: there are no rows to validate by; give data.val_path, or set run.test_freq=0",
    ),
    (
        other("sft", "val_prompts.path=x", "reward.function=tasks:even_share"),
        "run.test_freq=0: val_prompts.path is given, and nothing validates; set run.test_freq above 0, or leave val_prompts out",
    ),
    (
        other("sft", "algorithm.stop_at_reward=0.5"),
        "algorithm.stop_at_reward=0.5, run.test_freq=0: no validation has a mean reward; give val_prompts.path, a reward and "
        "run.test_freq above 0",
    ),
    # rewards
    (
        ppo("reward.model=a", "models.reward.path=b"),
        "reward.model=a, models.reward.path=b: they name different models; give one",
    ),
    (
        ppo("reward.judge.template='{response}'", "reward.function=null"),
        "reward.model=null: reward.judge needs a model that generates; give it, or models.reward.path",
    ),
    (
        ppo("reward.function=null"),
        "reward.function=null: there is no reward; give reward.function, a reward model as reward.model, an environment that gives "
        "rewards, an agent as agent.run, or rewards of other names as rewards.<name>.function",
    ),
    (ppo("reward.weight=0"), "reward.weight=0.0: nothing else is rewarded; leave it out"),
    # models
    (
        role("actor", tied=True, optim=OptimConfig(head_lr=1.0)),
        "models.actor.optim.head_lr=1.0: the model's output matrix is its embedding (tie_word_embeddings); leave it out",
    ),
    (
        role("actor", lora=LORA, random_init=True),
        "models.actor.random_init=true, models.actor.lora.rank=8: adapters train beside weights that are read again; leave the first "
        "out",
    ),
    (
        ppo("models.reference.lora.rank=8"),
        "models.reference.lora.rank=8, models.reference.lora.path=null: this role is not trained; leave the first out, or give a "
        "reference the adapter of the second",
    ),
    (
        role("critic", lora=LORA, optim=OptimConfig(name="muon")),
        "models.critic.optim.name=muon, models.critic.lora.rank=8: muon is for whole matrices, and with adapters none is trained; use "
        "adamw",
    ),
    (
        role("actor", lora=LORA, optim=OptimConfig(head_lr=1.0)),
        "models.actor.optim.head_lr=1.0, models.actor.lora.rank=8: with adapters no head is trained; leave the first out",
    ),
    # layouts
    (
        ppo(f"{CALL}.layout.tp=2", "models.actor.layout.tp=2", f"{ACTOR}.tp=2", ranks=2),
        f"{ACTOR}.pp=1, {ACTOR}.tp=2: {CALL}.layout says as well how it generates there; leave one of them out",
    ),
    (
        role("actor", lora=LoraConfig(rank=8, bits=4), calls=("compute_log_prob",)),
        "models.actor.lora.bits=4: weights in few bits cannot be sent to other ranks, and models.actor.calls runs there; leave it out, "
        "or let the role's own ranks run all calls (placement.strategy=colocate)",
    ),
]
