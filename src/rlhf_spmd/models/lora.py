"""Low-rank adapters (LoRA, Hu et al. 2022, arXiv 2106.09685): their settings, and which slices a rank holds. Pure: no tensors.

Beside a matrix W [out, in] lie A [rank, in] and B [out, rank]; the layer multiplies by W + scale * B A. A parameter that fuses several
matrices has an A for each and their rows of B, one under the other. A rank's slices are those that its part of W needs, so one of
the two is replicated over tp; each rank then has a part of its gradient (``Decoder.scattered``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from rlhf_spmd.config.constraints import NonNegativeInt, PositiveFloat, Range
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.models.layer_kinds import is_fixed
from rlhf_spmd.parallel.boxes import Box, ParamShard

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."  # PEFT's, of every tensor of an adapter
_BY_COLUMNS = "qkv", "latent.q_b", "latent.kv_b", "gate_up"  # matrices of which a tp rank has some rows
_BY_ROWS = "out", "down"  # matrices of which it has some columns
_WHOLE = "latent.q_a", "latent.kv_a"  # matrices of which it has all

# Keys of PEFT's adapter_config.json (LoraConfig of peft 0.21). These change no product: they describe the adapter, are said by the
# names of its tensors, or shape only how it was drawn and trained. Keys that are in no table must ask for nothing.
PEFT_HARMLESS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "megatron_config", "megatron_core", "velora_config", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    )
)
PEFT_VALUES: Mapping[str, tuple[object, ...]] = {  # keys with the values that change no product
    "peft_type": ("LORA",),
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA belong to a base that they have changed
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
PEFT_EQUAL = {"r": ("rank", 8), "lora_alpha": ("alpha", 8), "use_rslora": ("use_rslora", False)}  # ours, and PEFT's default


@dataclass(frozen=True)
class LoraConfig:
    """``models.<role>.lora``: low-rank adapters are trained, and heads of values, in place of the model's weights; PEFT's names.

    - rank: of the adapters, see [parallelism.md](parallelism.md#adapters-lora); 0: all weights are trained, or with `path` the rank of
      its adapter, whose `alpha`, `use_rslora` and `target_modules` hold where the defaults stand here
    - alpha: adapters are scaled by alpha / rank
    - use_rslora: by alpha / sqrt(rank) instead
    - dropout: of what adapters read in updates; what is drawn differs between layouts
    - target_modules: `all-linear`: all matrices of the layers, or a list such as `[q_proj, v_proj]`; the router and the experts of
      a mixture, the shared one too, have none
    - path: PEFT's directory of an adapter that training begins with, which the reference has, too; null: B is zero
    - bits: of an element of the matrices that have adapters, 4 (NF4) or 8, by bitsandbytes; null: the
      role's dtype; see [parallelism.md](parallelism.md#four-or-eight-bits)
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    target_modules: str | list[str] = ALL_LINEAR
    use_rslora: bool = False
    path: str | None = None
    bits: Literal[4, 8] | None = None

    needs: ClassVar = {"rank or path": ("alpha", "dropout", "target_modules", "use_rslora", "bits")}
    rules: ClassVar[Rules] = (
        Rule(
            ("target_modules",),
            lambda s: not s.target_modules or (isinstance(s.target_modules, str) and s.target_modules != ALL_LINEAR),
            "it names no matrices",
            f"set {ALL_LINEAR}, or a list of modules such as [q_proj, v_proj]",
        ),
    )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def targets(self, tensor: str) -> bool:
        """Return True if a matrix of the layers, ``<module>.weight``, has an adapter."""
        module = tensor.removesuffix(".weight")
        return self.target_modules == ALL_LINEAR or any(f".{module}".endswith(f".{end}") for end in self.target_modules)

    def check(self, where: str) -> None:
        """Raise ValueError without bitsandbytes."""
        if self.bits is not None and find_spec("bitsandbytes") is None:
            raise ValueError(f"{where}.bits={self.bits} needs the library: pip install bitsandbytes")


def with_stored_settings(lora: LoraConfig, config: Mapping[str, Any], file: str) -> LoraConfig:
    """Return ``lora`` with the rank of the adapter whose adapter_config.json is ``config``, and with what else the file says where
    ``lora`` has the default. Raises ValueError for a file without a rank."""
    rank, modules = config.get("r"), config.get("target_modules")
    defaults = LoraConfig()
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{file}: r={rank!r} must be the adapter's rank, a whole number of at least 1")
    stored = {name: config.get(key, default) for key, (name, default) in PEFT_EQUAL.items()}
    stored |= {"target_modules": sorted(modules)} if isinstance(modules, list) else {}
    return replace(lora, **{name: value for name, value in stored.items() if getattr(lora, name) == getattr(defaults, name)})


def check_peft_config(config: Mapping[str, Any], lora: LoraConfig, file: str, where: str) -> None:
    """Raise ValueError for a key of an adapter_config.json, ``file``, that differs from ``lora``, the settings of ``where``, or that
    makes the adapter another function than W + scale * B A."""
    for key, (name, default) in PEFT_EQUAL.items():
        if (value := config.get(key, default)) != (ours := getattr(lora, name)):
            raise ValueError(f"{where}.{name}={ours}, but {file} has {key}={value}; they must be equal")
    for key, value in config.items():
        asks = value not in PEFT_VALUES[key] if key in PEFT_VALUES else bool(value) and value != "none"
        if asks and key not in PEFT_HARMLESS and key not in PEFT_EQUAL:
            raise ValueError(
                f"{where}.path: {file} has {key}={value!r}, which is not supported; merge the adapter into its model by PEFT, and "
                "begin with that"
            )


class AdapterPart(NamedTuple):
    """One matrix, or some rows of it, inside a fused parameter: its rows of A, of B, and of the parameter."""

    a: slice
    b: slice
    rows: slice


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's parameter in the decoder."""
    return ".lora." in name


def is_trained(name: str, head: str, lora: bool) -> bool:
    """Return True for a parameter that a role trains: with adapters these, and a head of values, which the model's directory may not
    have; otherwise all but what no optimizer changes."""
    if not lora:
        return not is_fixed(name)
    return is_adapter(name) or name.endswith("value.weight") or (head == "value" and name.endswith("head.weight"))


def adapter_tensor(tensor: str, which: str) -> str:
    """Return PEFT's name of a matrix's A or B: ``base_model.model.<module>.lora_A.weight``."""
    return f"{PREFIX}{tensor.removesuffix('.weight')}.lora_{which}.weight"


def adapter_parts(matrix: ParamShard, lora: LoraConfig) -> list[AdapterPart]:
    """Return the rows of A, of B and of the parameter for each box that has an adapter."""
    boxes = [box for box in matrix.boxes if lora.targets(box.name)]
    parts = []
    first = 0
    number = {name: i for i, name in enumerate(dict.fromkeys(box.name for box in boxes))}
    for box in boxes:
        count, start = box.size[0], box.local[0]
        row = number[box.name] * lora.rank
        parts.append(AdapterPart(slice(row, row + lora.rank), slice(first, first + count), slice(start, start + count)))
        first += count
    return parts


def plan_adapters(block: Mapping[str, ParamShard], lora: LoraConfig | None) -> dict[str, ParamShard]:
    """Return the plan of a layer's adapters, by the plan ``block`` of the layer: ``qkv.lora.a``, ``qkv.lora.b``, and so on."""
    plan: dict[str, ParamShard] = {}
    if lora is None:
        return plan
    every = [name for name in (*_WHOLE, *_BY_COLUMNS, *_BY_ROWS) if f"{name}.weight" in block]
    for name in every if "router.weight" not in block else [name for name in every if name not in ("gate_up", "down")]:
        matrix = block[f"{name}.weight"]
        rank = lora.rank
        by_module: dict[str, Box] = {}
        a, b = list[Box](), list[Box]()
        for box, part in zip((box for box in matrix.boxes if lora.targets(box.name)), adapter_parts(matrix, lora), strict=True):
            (rows, columns), (row, column), (count, width) = box.shape, box.start, box.size
            b.append(Box(adapter_tensor(box.name, "B"), (rows, rank), (row, 0), (count, rank), (part.b.start, 0)))
            if by_module.setdefault(box.name, box) is box:
                a.append(Box(adapter_tensor(box.name, "A"), (rank, columns), (0, column), (rank, width), (part.a.start, 0)))
        if b:
            width = matrix.shape[1]
            count = sum(box.size[0] for box in b)
            plan[f"{name}.lora.a"] = ParamShard((rank * len(a), width), tuple(a), replicated_on_tp=name not in _BY_ROWS)
            plan[f"{name}.lora.b"] = ParamShard((count, rank), tuple(b), replicated_on_tp=name not in _BY_COLUMNS)
    return plan
