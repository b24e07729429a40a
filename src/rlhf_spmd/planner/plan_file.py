"""``plan.yaml``: ranks, layout and settings of every call of a step.

``rlhf-spmd plan`` writes it, and ``train plan=FILE`` applies it to its configuration (:func:`apply_plan`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml

from rlhf_spmd.config.constraints import PositiveFraction, PositiveInt, Range
from rlhf_spmd.config.plain_yaml import parse, resolve
from rlhf_spmd.config.rules import Rule, Rules, check_section
from rlhf_spmd.config.schema import ConfigError, read_section
from rlhf_spmd.parallel.layout import check_zero_size
from rlhf_spmd.planner.problem import RankRange, runs_of_equals

RANKS = r"\d+(-\d+)?"  # as a plan writes them


def read_ranks(ranks: str) -> RankRange:
    """Return the range that "first-last", or one rank, names."""
    first, _, last = ranks.partition("-")
    return RankRange(int(first), int(last or first) - int(first) + 1)


@dataclass(frozen=True)
class PlacedCall:
    """A call on its ranks, with its settings and predictions.

    - ranks: "first-last", or one rank
    - home: the role's weights stay here between calls, in this layout
    - micro_batches (of a mini-batch), start, seconds, memory_gb (GiB on the rank that has least left), room_gb (GiB of its device):
      predictions, which are not read back

    Fields that do not concern a call keep their defaults.
    """

    ranks: str
    pp: PositiveInt = 1
    tp: PositiveInt = 1
    dp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    home: bool = False
    zero: Annotated[int, Range(least=0, most=3)] = 0
    zero_size: int | None = None
    sequence_parallel: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    offload: bool = False
    optim_offload: bool = False
    max_num_seqs: PositiveInt | None = None
    gpu_memory_utilization: PositiveFraction | None = None
    graphs: bool = False
    micro_batches: int = 1
    start: float = 0.0
    seconds: float = 0.0
    memory_gb: float = 0.0
    room_gb: float = 0.0

    @property
    def rank_range(self) -> RankRange:
        """Return ``ranks`` as a range."""
        return read_ranks(self.ranks)

    rules: ClassVar[Rules] = (
        Rule(
            ("ranks", "pp", "tp", "dp", "cp"),
            lambda call: call.pp * call.tp * call.dp * call.cp != call.rank_range.count,
            "pp * tp * dp * cp is not the number of ranks, {s.rank_range.count}",
            "change one of them",
        ),
        Rule(
            ("ep", "dp", "cp"),
            lambda call: call.dp * call.cp % call.ep != 0,
            "ranks that share the experts are some of dp * cp",
            "let ep divide dp * cp",
        ),
    )

    def check(self, where: str) -> None:
        """Raise ValueError if ``zero_size`` does not fit."""
        check_zero_size(self.zero, self.zero_size, self.dp * self.cp, where)


@dataclass(frozen=True)
class PlanFile:
    """A plan for ``ranks`` ranks, ``local_size`` on each host.

    - algorithm: settings of that section: the token budget of micro-batches
    - calls: ``role.method`` -> the placed call
    - step_seconds: a prediction, which is not read back
    - speeds, generation_speeds: of each rank, as in ``placement``; empty: all are equal
    """

    ranks: int
    local_size: int
    algorithm: Mapping[str, Any]
    calls: Mapping[str, PlacedCall]
    step_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    generation_speeds: tuple[float, ...] = ()

    def to_yaml(self) -> str:
        """Return the text of ``plan.yaml``."""
        default = PlacedCall("0")
        always = ("ranks", "pp", "tp", "dp")
        calls = {}
        for name, call in self.calls.items():
            calls[name] = {key: value for key, value in asdict(call).items() if value != getattr(default, key) or key in always}
        head = {"ranks": self.ranks, "local_size": self.local_size, "algorithm": dict(self.algorithm)}
        speeds = {key: _by_range(values) for key, values in self._speeds().items()}
        return yaml.safe_dump({**head, "step_seconds": self.step_seconds, **speeds, "calls": calls}, sort_keys=False)

    def _speeds(self) -> dict[str, tuple[float, ...]]:
        """Return the speeds of ranks by key, if ranks are unequal."""
        speeds = {"speeds": self.speeds, "generation_speeds": self.generation_speeds}
        return {key: values for key, values in speeds.items() if values}

    def settings(self) -> dict[str, Any]:
        """Return the plan as sections of the configuration of ``train``."""
        pools = {_pool(call.rank_range): list(call.rank_range.ranks) for call in self.calls.values()}
        homes = {name.split(".")[0]: call for name, call in self.calls.items() if call.home}
        models: dict[str, dict[str, Any]] = {}
        for role, home in homes.items():
            models[role] = {
                "pool": _pool(home.rank_range),
                "layout": _layout(home) | _sharded(home),
                "activation_checkpointing": home.activation_checkpointing,
                "offload": home.offload,
                "optim": {"offload": home.optim_offload},
                "calls": {},
            }
        for name, call in self.calls.items():
            role, method = name.split(".")
            home = homes[role]
            section = models[role]
            if call.max_num_seqs is not None:
                generation: dict[str, Any] = {"max_num_seqs": call.max_num_seqs}
                if call.gpu_memory_utilization is not None:  # otherwise the configuration's
                    generation["gpu_memory_utilization"] = call.gpu_memory_utilization
                section["generation"] = generation
                if call.rank_range == home.rank_range and home.pp % call.pp == 0 and home.tp % call.tp == 0:
                    generation |= {"pp": call.pp, "tp": call.tp}
                    continue
            if (call.rank_range, _layout(call)) != (home.rank_range, _layout(home)):
                section["calls"][method] = {"pool": _pool(call.rank_range), "layout": _layout(call)}
        speeds = {key: list(values) for key, values in self._speeds().items()}
        return {"placement": {"strategy": "colocate", "pools": pools, **speeds}, "models": models, "algorithm": self.algorithm}


def _pool(ranks: RankRange) -> str:
    return f"ranks_{ranks.first}_to_{ranks.end - 1}"


def _layout(call: PlacedCall) -> dict[str, Any]:
    extra_axes = {"cp": call.cp, "ep": call.ep}
    return {"pp": call.pp, "tp": call.tp, "dp": call.dp} | {axis: size for axis, size in extra_axes.items() if size > 1}


def _sharded(home: PlacedCall) -> dict[str, Any]:
    size = {} if home.zero_size is None else {"zero_size": home.zero_size}
    return {"zero": home.zero, **size, "sequence_parallel": home.sequence_parallel}


def read_plan(path: str, key: str = "plan") -> PlanFile:
    """Return the plan of a file. Raises ConfigError, one line that names ``key``, the setting, and the file."""
    try:
        raw = resolve(parse(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{key}={path} cannot be read: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}"
        ) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("calls"), dict) or not raw["calls"]:
        raise ConfigError(f"{key}={path} is not a plan: it must have 'calls', as `rlhf-spmd plan` writes them")
    calls = {str(name): _read_call(f"{key}={path}", str(name), call) for name, call in raw["calls"].items()}
    for role in {name.split(".")[0] for name in calls}:
        num_homes = sum(call.home for name, call in calls.items() if name.split(".")[0] == role)
        if num_homes != 1:
            raise ConfigError(f"{key}={path}: one call of role '{role}' must have home: true, and {num_homes} have")
    last = max(call.rank_range.end for call in calls.values())
    size = raw.get("ranks", last)
    algorithm = raw.get("algorithm") or {}
    local_size = raw.get("local_size", size)
    is_budget = isinstance(algorithm, dict) and all(type(tokens) is int and tokens > 0 for tokens in algorithm.values())
    if type(size) is not int or type(local_size) is not int or not is_budget:
        raise ConfigError(
            f"{key}={path}: ranks and local_size must be integers, and algorithm a mapping to integers of at least 1"
        )
    speeds, generation_speeds = (_read_speeds(raw, name, size, f"{key}={path}") for name in ("speeds", "generation_speeds"))
    return PlanFile(size, local_size, algorithm, calls, 0.0, speeds, generation_speeds)


def _by_range(values: Sequence[float]) -> dict[str, float]:
    """Return ranges of ranks with equal values -> their value. ``values``: one for each rank."""
    return {str(ranks): value for ranks, value in runs_of_equals(values)}


def _read_speeds(raw: Mapping[str, object], key: str, size: int, where: str) -> tuple[float, ...]:
    """Return the speeds under ``key``, one for each of ``size`` ranks; empty if there are none."""
    by_range = raw.get(key)
    if by_range is None:
        return ()
    speeds: list[float] = []
    for ranks, speed in by_range.items() if isinstance(by_range, dict) else ():
        if not (re.fullmatch(RANKS, str(ranks)) and read_ranks(str(ranks)).first == len(speeds) and _is_speed(speed)):
            fault = f"the entry '{ranks}: {speed}' is wrong where rank {len(speeds)} comes next"
            break
        speeds += [float(speed)] * read_ranks(str(ranks)).count
    else:
        if len(speeds) == size:
            return tuple(speeds)
        fault = f"they end with rank {len(speeds) - 1}" if speeds else "there are none"
    raise ConfigError(f"{where}: {key} must have a number above 0 for all {size} ranks in order, as 0-7: 1.0; {fault}")


def _is_speed(speed: object) -> bool:
    return isinstance(speed, (int, float)) and not isinstance(speed, bool) and 0 < speed < math.inf


def _read_call(file: str, name: str, settings: object) -> PlacedCall:
    """Return a call of the plan. Raises ConfigError that begins with ``file``."""
    where = f"{file}: calls.{name}"
    if name.count(".") != 1 or not isinstance(settings, dict) or "ranks" not in settings:
        raise ConfigError(f"{where} must be a call as role.method, with its ranks")
    if not re.fullmatch(RANKS, str(settings["ranks"])):
        raise ConfigError(f"{where}.ranks={settings['ranks']} must be the first and the last rank, as 0-7, or one rank")
    try:
        call = read_section(PlacedCall, settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    try:
        check_section(call, f"calls.{name}")
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return call


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def apply_plan(file: dict[str, Any], plan: PlanFile) -> dict[str, Any]:
    """Return the configuration ``file`` with the plan's placement and layouts, and with the other settings that the plan has."""
    settings = plan.settings()
    models = dict(file.get("models") or {})
    for role, planned in settings["models"].items():
        section = models.get(role) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"models.{role}={section!r}: with a plan a role's settings must stand by themselves, not as an interpolation"
            )
        models[role] = _planned_role(section, planned)
    for role in set(models) - set(settings["models"]):  # without a model: the strategy places them
        if isinstance(models[role], Mapping):
            models[role] = _without(models[role], "pool")
    placement = (
        _without(file.get("placement") or {}, "pools", "ratios", "strategy", "profile", "speeds", "generation_speeds")
        | settings["placement"]
    )
    algorithm = file.get("algorithm") or {}
    algorithm = algorithm if isinstance(algorithm, Mapping) else {"name": algorithm}
    return {**file, "models": models, "placement": placement, "algorithm": {**algorithm, **settings["algorithm"]}}


def _planned_role(section: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Return a role's section of the configuration with what the plan has for it."""
    merged = {**section, **planned}
    for key in ("optim", "generation"):
        merged[key] = {**(section.get(key) or {}), **planned.get(key, {})}
    if "generation" in planned:
        on_home_ranks = "pp" in planned["generation"]
        if not on_home_ranks:
            merged["generation"] = _without(merged["generation"], "pp", "tp")
        if merged["generation"].get("ep", 1) != 1:  # all ranks that share a model in generation share its experts
            grid = merged["generation"] if on_home_ranks else merged["calls"]["generate_sequences"]["layout"]
            merged["generation"] |= {"ep": grid["tp"]}
    if not merged["offload"]:
        merged.pop("prefetch", None)
    if "generate_sequences" in merged["calls"]:  # complete weights are sent there
        merged["generation"] = _without(merged["generation"], "reshard_method", "buffers")
    return merged


def check_ranks(path: str | None, world_size: int) -> None:
    """Raise ConfigError if the plan is for another number of ranks."""
    if path is not None and (plan := read_plan(path)).ranks != world_size:
        raise ConfigError(
            f"plan={path} is for {plan.ranks} ranks, this job has {world_size}; start as many, or plan again with cluster.nodes and "
            "cluster.gpus_per_node"
        )
