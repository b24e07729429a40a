"""How one model is split over the ranks of its pool. Pure, without a process group.

Training ranks form the grid ``[pp, dp, cp, tp]`` (HybridFlow, section 5.3):

- pp: pipeline stages, each with some of the layers
- dp: replicas, each with rows of its own
- cp: ranks with the same rows, and each a part of their tokens
- tp: consecutive ranks, each with a slice of every matrix
- ep: neighbours among the dp * cp ranks of a stage and slice that share the experts; the other weights are the same on all of these

A generation layout has p_g stages and t_g slices on the same ranks. Generation TP groups take every (t/t_g)-th rank of a training TP
group, generation PP groups every (p/p_g)-th stage, and the micro-DP group has the ranks in between. So a rank's training shard is
always a slice of its generation shard. If that cannot be, or is not wanted, generation ranks form a grid of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import numpy as np

from rlhf_spmd.config.constraints import PositiveInt, Range

MOST_RANKS = 65_536  # more than any job has: a description of each rank is made before a pool can be found too small
NumRanks = Annotated[int, Range(least=1, most=MOST_RANKS)]


@dataclass(frozen=True)
class LayoutConfig:
    """``models.<role>.layout``. For ``vpp`` see ``parallel.pipeline``, for ``sequence_parallel`` ``models.tensor_parallel``.

    - pp: pipeline stages
    - vpp: chunks of layers per pipeline rank (interleaved 1F1B), see [parallelism.md](parallelism.md)
    - tp: tensor slices
    - dp: replicas; null: what the ranks of the pool leave
    - cp: ranks that share the tokens of each row in training and scoring (context parallelism, also called Ulysses), for sequences that
      one rank cannot hold; see [parallelism.md](parallelism.md#context-parallelism)
    - ep: neighbours among the dp * cp copies that share the experts of each layer in training and scoring (expert parallelism); tokens
      travel to them. Divides `dp` * `cp` and the number of experts; see [parallelism.md](parallelism.md#experts-in-parallel)
    - zero: ZeRO stage over the dp * cp copies of the weights, 0 to 3
    - zero_size: neighbouring copies that share one copy of what `zero` shards, say those of a host (HSDP); divides `dp` * `cp`; null:
      all, see [placement.md](placement.md#zero-inside-hosts)
    - sequence_parallel: outside attention and MLP each tp rank holds 1 / tp of the tokens, see [parallelism.md](parallelism.md);
      without effect at tp 1
    """

    pp: NumRanks = 1
    vpp: PositiveInt = 1
    tp: NumRanks = 1
    dp: NumRanks | None = None
    cp: NumRanks = 1
    ep: NumRanks = 1
    zero: Literal[0, 1, 2, 3] = 0
    zero_size: NumRanks | None = None
    sequence_parallel: bool = False


AXES = ("pp", "dp", "cp", "tp")  # of training and of generation layouts


class Coordinate(NamedTuple):
    """A rank's coordinates on :data:`AXES`."""

    pp: int
    dp: int
    cp: int
    tp: int


class Grid(ABC):
    """The ranks of a pool by their coordinates on :data:`AXES`. Indices count ranks inside the pool (0 .. size-1)."""

    pp: int
    tp: int
    ep: int = 1  # so many neighbouring ranks of dp * cp share the experts
    # each tp rank has 1 / tp of the experts in place of a slice of each; never where ep is above 1
    expert_parallel_generation: bool = False

    @property
    @abstractmethod
    def ranks(self) -> np.ndarray:
        """Return the pool indices by coordinate, [pp, dp, cp, tp]. Generation has no cp: 1."""

    @property
    def dp_shard(self) -> int:
        """Return how many neighbouring ranks of dp * cp share one copy of what ZeRO shards; 1: each rank has its own copy."""
        return 1

    @cached_property
    def _coordinates(self) -> list[Coordinate]:
        axes = np.unravel_index(np.argsort(self.ranks, axis=None), self.ranks.shape)
        return [Coordinate(*coordinate) for coordinate in zip(*(axis.tolist() for axis in axes), strict=True)]

    def coordinate(self, index: int) -> Coordinate:
        """Return the coordinates of a pool index."""
        return self._coordinates[index]

    def index(self, pp: int, dp: int, cp: int, tp: int) -> int:
        """Return the pool index at these coordinates."""
        return int(self.ranks[pp, dp, cp, tp])

    def along(self, index: int, *axes: str) -> list[int]:
        """Return ``index`` and the ranks that differ from it only on ``axes``, in the order of their coordinates."""
        coordinate = zip(AXES, self.coordinate(index), strict=True)
        where = tuple(slice(None) if axis in axes else number for axis, number in coordinate)
        ranks: list[int] = self.ranks[where].reshape(-1).tolist()
        return ranks

    def replica_group(self, index: int) -> list[int]:
        """Return the pp * tp ranks that hold the copy of the model of ``index``."""
        return self.along(index, "pp", "tp")

    def shard_group(self, index: int) -> list[int]:
        """Return the ``dp_shard`` ranks, ``index`` among them, that share one copy of what ZeRO shards."""
        return self._neighbours(index, self.dp_shard)

    def same_shard_group(self, index: int) -> list[int]:
        """Return the ranks that hold the same part of the model as ``index``, and itself: one of each shard group."""
        return self._counterparts(index, self.dp_shard)

    def ep_group(self, index: int) -> list[int]:
        """Return the ``ep`` ranks, ``index`` among them, that share the experts."""
        return self._neighbours(index, self.ep)

    def expert_copies(self, index: int) -> list[int]:
        """Return the ranks that hold the same experts as ``index``, and itself: one of each ep group."""
        return self._counterparts(index, self.ep)

    @property
    def model_copy_size(self) -> int:
        """Return the least number of neighbouring ranks of dp * cp that hold all of a stage and slice, under ZeRO and ep."""
        return math.lcm(self.dp_shard, self.ep)

    def model_copy_group(self, index: int) -> list[int]:
        """Return the ``model_copy_size`` ranks, ``index`` among them, that hold all of its stage and slice."""
        return self._neighbours(index, self.model_copy_size)

    def _neighbours(self, index: int, size: int) -> list[int]:
        copies = self.along(index, "dp", "cp")
        first = copies.index(index) // size * size
        return copies[first : first + size]

    def _counterparts(self, index: int, size: int) -> list[int]:
        copies = self.along(index, "dp", "cp")
        return copies[copies.index(index) % size :: size]


@dataclass(frozen=True)
class Layout(Grid):
    """A resolved training layout (p, t, d, c) with its ZeRO stage over d * c and ``vpp`` virtual stages per rank.

    ``zero_size``: the number of neighbouring ranks of dp * cp over which ZeRO shards; None: all of them.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    zero: int = 0
    vpp: int = 1
    sequence_parallel: bool = False
    zero_size: int | None = None
    cp: int = 1
    ep: int = 1
    expert_parallel_generation: bool = False

    def __post_init__(self) -> None:
        assert self.copies % (self.zero_size or 1) == 0, f"zero_size={self.zero_size} does not divide dp * cp={self.copies}"
        assert self.copies % self.ep == 0, f"ep={self.ep} does not divide dp * cp={self.copies}"

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.copies

    @property
    def copies(self) -> int:
        """Return the number of ranks with the same stage and slice of the model: dp * cp."""
        return self.dp * self.cp

    @property
    def dp_shard(self) -> int:
        return (self.zero_size or self.copies) if self.zero else 1

    @property
    def dp_replicate(self) -> int:
        """Return the number of copies of the model over dp * cp."""
        return self.copies // self.dp_shard

    def stages(self, pp_rank: int) -> list[int]:
        """Return the virtual stages (of ``pp * vpp``) that a pipeline rank holds, one per chunk of layers."""
        return [chunk * self.pp + pp_rank for chunk in range(self.vpp)]

    @cached_property
    def ranks(self) -> np.ndarray:
        return np.arange(self.size).reshape(self.pp, self.dp, self.cp, self.tp)

    def __str__(self) -> str:
        options = ("cp", 1), ("ep", 1), ("zero", 0), ("zero_size", None), ("vpp", 1)
        parts = (f" {key}({getattr(self, key)})" for key, default in options if getattr(self, key) != default)
        return f"pp({self.pp}) * tp({self.tp}) * dp({self.dp})" + "".join(parts)


def resolve_layout(config: LayoutConfig, pool_size: int, where: str) -> Layout:
    """Return the layout with dp filled in, and check that it covers the pool exactly.

    ``where`` names the role and pool in messages: ``models.critic.layout on pool 'b'``. Raises ValueError with both sides of the failed
    equation.
    """
    if config.vpp > 1 and config.pp == 1:
        raise ValueError(
            f"{where}: vpp={config.vpp} interleaves the chunks of several stages, but pp=1; set vpp=1 or pp to 2 or more"
        )
    dp = config.dp if config.dp is not None else max(pool_size // (config.pp * config.tp * config.cp), 1)
    check_zero_size(config.zero, config.zero_size, dp * config.cp, where)
    if dp * config.cp % config.ep:
        raise ValueError(
            f"{where}: ep={config.ep} must divide dp * cp = {dp * config.cp}; allowed: {_divisors(dp * config.cp)}"
        )
    zero_size = None if config.zero_size == dp * config.cp else config.zero_size
    layout = Layout(
        config.pp, config.tp, dp, config.zero, config.vpp, config.sequence_parallel, zero_size, config.cp, config.ep
    )
    if layout.size != pool_size:
        cp = f" * cp({layout.cp})" if layout.cp > 1 else ""
        raise ValueError(
            f"{where}: pp({layout.pp}) * tp({layout.tp}) * dp({layout.dp}){cp} = {layout.size} ranks, but the pool has {pool_size}; "
            f"change the layout or the pool so that both are equal"
        )
    return layout


def check_zero_size(zero: int, size: int | None, copies: int, where: str) -> None:
    """Raise ValueError if ZeRO cannot shard over ``size`` neighbours of ``copies`` ranks, with the value and what is allowed."""
    if size is None:
        return
    if copies % size:
        raise ValueError(
            f"{where}.zero_size={size}: must divide dp * cp = {copies}; allowed: {_divisors(copies)}, or null: all of them"
        )
    if not zero:
        raise ValueError(f"{where}.zero_size={size} needs {where}.zero 1, 2 or 3, and that is 0")


def _divisors(number: int) -> str:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return ", ".join(map(str, sorted({*small, *(number // n for n in small)})))


@dataclass(frozen=True)
class GenerationLayout(Grid):
    """(p_g, t_g, d_g, d * c) over the ranks of a training layout, with d_g = p*t / (p_g*t_g) micro-DP replicas per copy of the model.

    ``consecutive``: no regrouping. The ranks form the grid [p_g, replicas, t_g] like those of a training layout, and a training shard
    may lie outside its rank's generation shard. ``expert_parallel_generation``: ranks of tp have whole experts; see
    :func:`generation_layout`.
    """

    train: Layout
    pp: int
    tp: int
    consecutive: bool = False
    expert_parallel_generation: bool = False

    def __post_init__(self) -> None:
        for name, part, trained in (("pp", self.pp, self.train.pp), ("tp", self.tp, self.train.tp)):
            if part < 1 or (trained % part and self.train.zero < 3 and not self.expert_parallel_generation):
                raise ValueError(
                    f"generation.{name}={part} must divide the training layout's {name}={trained}: "
                    "every training shard has to be a slice of its generation shard (with layout.zero=3 any "
                    f"whose pp * tp divides the number of ranks, as with generation.ep={self.tp})"
                )
        if self.train.size % (self.pp * self.tp):
            raise ValueError(
                f"generation.pp={self.pp} * generation.tp={self.tp} = {self.pp * self.tp} ranks must divide the "
                f"{self.train.size} ranks of the training layout {self.train}"
            )
        assert self.consecutive or not (self.train.pp % self.pp or self.train.tp % self.tp), f"{self}: no regrouping"

    @property
    def fused_slices(self) -> int:
        """Return how many training slices a fused generation matrix consists of; each slice's rows stay together in it."""
        return 1 if self.consecutive else self.train.tp // self.tp

    @property
    def micro_dp(self) -> int:
        return self.train.pp * self.train.tp // (self.pp * self.tp)

    @property
    def dp(self) -> int:
        """Return the number of generation replicas, d_g * d * c: the ranks of a training layout's cp generate on their own."""
        return self.train.size // (self.pp * self.tp)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Return the pool indices by coordinate, [p_g, d_g * d * c, 1, t_g]."""
        ranks = np.arange(self.train.size)
        shape = self.pp, self.dp, 1, self.tp
        num_parts = self.train.tp  # neighbours with different parts of a training stage
        needs_own_grid = self.consecutive
        if self.expert_parallel_generation:
            num_parts *= self.train.ep
            needs_own_grid = bool(self.train.pp % self.pp or num_parts % self.tp)
        if needs_own_grid:
            return ranks.reshape(shape)
        stages = self.train.pp // self.pp  # training stages of a generation stage
        slices = num_parts // self.tp  # training parts of a generation slice
        return ranks.reshape(self.pp, stages, -1, self.tp, slices).transpose(0, 2, 1, 4, 3).reshape(shape)

    def micro_dp_group(self, index: int) -> list[int]:
        """Return the ranks whose training shards form the generation shard of ``index``, in the order of their slices."""
        pp, dp, _, tp = self.coordinate(index)
        first = dp // self.micro_dp * self.micro_dp
        group: list[int] = self.ranks[pp, first : first + self.micro_dp, 0, tp].tolist()
        return group


def generation_layout(
    train: Layout, pp: int, tp: int, consecutive: bool = False, expert_parallel_generation: bool = False
) -> GenerationLayout:
    """Return the regrouping of ``train``, or a grid of its own if the layouts do not allow that or ``consecutive`` asks for it.

    With ``expert_parallel_generation`` no regrouping makes slices of experts parts of whole ones. Ranks that have different experts
    or slices of them in training are then regrouped as the ranks of tp are otherwise, so that each lacks the least of its experts.
    Raises ValueError for a generation layout that does not fit.
    """
    fits = train.pp % max(pp, 1) == 0 and train.tp % max(tp, 1) == 0
    whole_stages = train.vpp == 1 or pp == 1  # with virtual stages the layers of a rank are not consecutive
    consecutive = consecutive or expert_parallel_generation or not (fits and whole_stages)
    return GenerationLayout(train, pp, tp, consecutive, expert_parallel_generation)


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """Return the layers of a pipeline stage. Stages are as equal as possible; earlier ones take the remainder.

    If p_g divides p, generation stage i must own exactly the layers of its p/p_g training stages. So a remainder is allowed only if
    stages are not regrouped; callers check that.
    """
    base, extra = divmod(num_layers, pp)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))
