"""``plan.yaml``: ranks, layout and settings of every call of a step.

``rlhf-spmd plan`` writes it, and ``train plan=FILE`` applies it to its configuration (:func:`apply_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.config.schema import ConfigError, read_section
from rlhf_spmd.config.written import parse, resolve
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.layout import check_zero_size
from rlhf_spmd.planner.problem import RankRange


@dataclass(frozen=True)
class PlacedCall:
    """A call on its ranks, with its settings and predictions.

    - ranks: "first-last", or one rank
    - home: the role's weights stay here between calls, in this layout
    - micro_batches (of a mini-batch), start, seconds, memory_gb (GiB on each rank): predictions, which are not read back

    Fields that do not concern a call keep their defaults.
    """

    ranks: str
    pp: PositiveInt = 1
    tp: PositiveInt = 1
    dp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    home: bool = False
    zero: int = 0
    zero_size: int | None = None
    sequence_parallel: bool = False
    activation_checkpointing: str = "none"
    offload: bool = False
    optim_offload: bool = False
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    graphs: bool = False
    micro_batches: int = 1
    start: float = 0.0
    seconds: float = 0.0
    memory_gb: float = 0.0

    @property
    def rank_range(self) -> RankRange:
        first, _, last = self.ranks.partition("-")
        return RankRange(int(first), int(last or first) - int(first) + 1)

    def check(self, where: str) -> None:
        """Raises ValueError."""
        if not re.fullmatch(r"\d+(-\d+)?", self.ranks) or self.rank_range.count < 1:
            raise ValueError(f"{where}.ranks={self.ranks!r} must be the first and the last rank, as 0-7, or one rank")
        if self.pp * self.tp * self.dp * self.cp != self.rank_range.count:
            raise ValueError(
                f"{where}: pp({self.pp}) * tp({self.tp}) * dp({self.dp}) * cp({self.cp}) is not the number of ranks in {self.ranks} "
                f"({self.rank_range.count})"
            )
        share, flying = self.gpu_memory_utilization, self.max_num_seqs
        if (share is not None and not 0 < share <= 1) or (flying is not None and flying < 1):
            raise ValueError(f"{where}: gpu_memory_utilization={share} must be in (0, 1] and max_num_seqs={flying} at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"{where}.zero={self.zero!r}: allowed are 0, 1, 2, 3")
        check_zero_size(self.zero, self.zero_size, self.dp * self.cp, where)
        if self.dp * self.cp % self.ep:
            raise ValueError(f"{where}.ep={self.ep} must divide dp({self.dp}) * cp({self.cp})")
        if self.activation_checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"{where}.activation_checkpointing={self.activation_checkpointing!r}: allowed are {', '.join(CHECKPOINTING)}"
            )


@dataclass(frozen=True)
class PlanFile:
    """A plan for ``ranks`` ranks, ``local_size`` on each host. ``calls``: by ``role.method``. ``algorithm``: settings of that
    section, the token budget of micro-batches. ``extra``: what the file says for people only."""

    ranks: int
    local_size: int
    algorithm: Mapping[str, Any]
    calls: Mapping[str, PlacedCall]
    extra: Mapping[str, Any]

    def to_yaml(self) -> str:
        usual = PlacedCall("0")
        always = ("ranks", "pp", "tp", "dp")
        calls = {}
        for name, call in self.calls.items():
            calls[name] = {key: x for key, x in asdict(call).items() if x != getattr(usual, key) or key in always}
        head = {"ranks": self.ranks, "local_size": self.local_size, "algorithm": dict(self.algorithm)}
        return yaml.safe_dump({**head, **self.extra, "calls": calls}, sort_keys=False)

    def settings(self) -> dict[str, Any]:
        """The plan as sections of the configuration of ``train``."""
        pools = {_pool(call.rank_range): list(call.rank_range.ranks) for call in self.calls.values()}
        models: dict[str, dict[str, Any]] = {}
        homes = {name.split(".")[0]: call for name, call in self.calls.items() if call.home}
        for role, home in homes.items():
            found = models[role] = {
                "pool": _pool(home.rank_range),
                "layout": _layout(home) | _sharded(home),
                "activation_checkpointing": home.activation_checkpointing,
                "offload": home.offload,
                "optim": {"offload": home.optim_offload},
                "calls": {},
            }
            own = {name.split(".")[1]: call for name, call in self.calls.items() if name.split(".")[0] == role}
            for method, call in own.items():
                if call.max_num_seqs is not None:
                    share = call.gpu_memory_utilization  # None: the configuration's
                    found["generation"] = {"max_num_seqs": call.max_num_seqs}
                    found["generation"] |= {} if share is None else {"gpu_memory_utilization": share}
                    if call.rank_range == home.rank_range and home.pp % call.pp == 0 and home.tp % call.tp == 0:
                        found["generation"] |= {"pp": call.pp, "tp": call.tp}
                        continue
                if (call.rank_range, _layout(call)) != (home.rank_range, _layout(home)):
                    found["calls"][method] = {"pool": _pool(call.rank_range), "layout": _layout(call)}
        return {"placement": {"strategy": "colocate", "pools": pools}, "models": models, "algorithm": self.algorithm}


def _pool(ranks: RankRange) -> str:
    return f"ranks_{ranks.first}_to_{ranks.end - 1}"


def _layout(call: PlacedCall) -> dict[str, Any]:
    more = {"cp": call.cp, "ep": call.ep}
    return {"pp": call.pp, "tp": call.tp, "dp": call.dp} | {axis: size for axis, size in more.items() if size > 1}


def _sharded(home: PlacedCall) -> dict[str, Any]:
    size = {} if home.zero_size is None else {"zero_size": home.zero_size}
    return {"zero": home.zero, **size, "sequence_parallel": home.sequence_parallel}


def read_plan(path: str) -> PlanFile:
    """Raises ConfigError, one line that names the file."""
    try:
        raw = resolve(parse(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"plan={path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("calls"), dict):
        raise ConfigError(f"plan={path} is not a plan: it must have 'calls', as `rlhf-spmd plan` writes them")
    calls = {}
    for name, given in raw["calls"].items():
        where = f"plan={path}: calls.{name}"
        if str(name).count(".") != 1 or not isinstance(given, dict) or "ranks" not in given:
            raise ConfigError(f"{where} must be a call as role.method, with its ranks")
        try:
            calls[str(name)] = read_section(PlacedCall, given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        check_section(calls[str(name)], where)
    if not calls:
        raise ConfigError(f"plan={path} has no calls")
    for role in {name.split(".")[0] for name in calls}:
        homes = [name for name, call in calls.items() if call.home and name.split(".")[0] == role]
        if len(homes) != 1:
            raise ConfigError(f"plan={path}: one call of role '{role}' must have home: true, and {len(homes)} have")
    last = max(call.rank_range.end for call in calls.values())
    extra = _without(raw, "ranks", "local_size", "algorithm", "calls")
    size, algorithm = raw.get("ranks", last), raw.get("algorithm") or {}
    local_size = raw.get("local_size", size)
    is_budget = isinstance(algorithm, dict) and all(type(one) is int and one > 0 for one in algorithm.values())
    if type(size) is not int or type(local_size) is not int or not is_budget:
        raise ConfigError(
            f"plan={path}: ranks and local_size must be integers, and algorithm a mapping to integers of at least 1"
        )
    return PlanFile(size, local_size, algorithm, calls, extra)


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def apply_plan(file: dict[str, Any], plan: PlanFile) -> dict[str, Any]:
    """The configuration ``file`` with the plan's placement and layouts, and with the other settings that the plan has."""
    settings = plan.settings()
    models = dict(file.get("models") or {})
    for role, planned in settings["models"].items():
        own = models.get(role) or {}
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"models.{role}={own!r}: with a plan a role's settings must stand by themselves, not as an interpolation"
            )
        merged = {**own, **_without(planned, "optim", "generation")}
        for key in ("optim", "generation"):
            merged[key] = {**(own.get(key) or {}), **planned.get(key, {})}
        if "generation" in planned and "pp" not in planned["generation"]:
            merged["generation"] = _without(merged["generation"], "pp", "tp")
        if (
            "generation" in planned and merged["generation"].get("ep", 1) != 1
        ):  # all ranks that share a model in generation share its experts
            split = merged["generation"] if "pp" in planned["generation"] else merged["calls"]["generate_sequences"]["layout"]
            merged["generation"] |= {"ep": split["tp"]}
        if not merged["offload"]:
            merged.pop("prefetch", None)
        if "generate_sequences" in merged["calls"]:  # whole weights are sent there
            merged["generation"] = _without(merged["generation"], "reshard_method", "buffers")
        models[role] = merged
    for role in set(models) - set(settings["models"]):  # without a model: the strategy places them
        if isinstance(models[role], Mapping):
            models[role] = _without(models[role], "pool")
    placement = _without(file.get("placement") or {}, "pools", "ratios", "strategy", "profile") | settings["placement"]
    algorithm = file.get("algorithm") or {}
    algorithm = algorithm if isinstance(algorithm, Mapping) else {"name": algorithm}
    return {**file, "models": models, "placement": placement, "algorithm": {**algorithm, **settings["algorithm"]}}


def check_ranks(path: str | None, world_size: int) -> None:
    """Raises ConfigError if the plan is for another number of ranks."""
    if path is not None and (plan := read_plan(path)).ranks != world_size:
        raise ConfigError(
            f"plan={path} is for {plan.ranks} ranks, this job has {world_size}; start as many, or plan again with cluster.nodes and "
            "cluster.gpus_per_node"
        )
