"""What ``rlhf-spmd convert`` makes of all shell scripts below a directory, such as the examples of a checkout of verl.

    python scripts/results/convert_scripts.py CHECKOUT/examples
    python scripts/results/convert_scripts.py CHECKOUT/examples --json examples.json

The second table has a line for each script that converts: its keys, those that are translated, those that are named on standard
error, and those that are lost: neither, and the result is the same with another value.

A script converts if ``convert`` writes a configuration. It loads if ``train`` accepts that. It is laid out if ``plan`` then finds its
calls and places them as configured on the script's GPUs, whatever memory they need; each model has the sizes of a large Llama, or of
a large Qwen3-MoE where the script asks for what only experts have.
Models and data are not read. What stops the others is named by its key, and so are keys that nothing is known about.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_spmd import convert, plan
from rlhf_spmd.config.foreign import foreign_names
from rlhf_spmd.config.foreign_input import read_foreign
from rlhf_spmd.config.verl_settings import is_sft, our_name, sft_name
from rlhf_spmd.train import read_config

# divisible by what layouts divide by
LLAMA = {
    "model_type": "llama",
    "vocab_size": 151936,
    "hidden_size": 16384,
    "intermediate_size": 32768,
    "num_hidden_layers": 384,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 4096,
}
UNKNOWN = "not known: look it up"
COMMAND = ("trainer.nnodes", "trainer.n_gpus_per_node")  # which the first line of the result says
KEY = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class Converted:
    """One script. ``kind``: rl or sft. ``stopped_by``: a key, or "no trainer": the script starts none. ``why``: one line, "" for a
    script that nothing stops. ``unknown``: keys that were left out without a reason. ``keys``, ``named``: numbers of all keys, and of
    those left out. ``lost``: keys that are neither named nor change anything.
    """

    script: str
    kind: str
    converts: bool
    loads: bool
    laid_out: bool
    stopped_by: str = ""
    why: str = ""
    unknown: tuple[str, ...] = ()
    keys: int = 0
    named: int = 0
    lost: tuple[str, ...] = ()


def try_script(path: Path, name: str) -> Converted:
    kind = "sft" if "sft_trainer" in path.read_text(encoding="utf-8") else "rl"
    unknown, stages, facts = tuple[str, ...](), list[bool](), dict[str, Any]()
    try:
        with contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as directory:
            source = read_foreign(path, [])
            settings, left_out = convert.convert(source)
            unknown = tuple(key for key, why in left_out.items() if why == UNKNOWN)
            facts = {"unknown": unknown, "keys": len(source), "named": sum(key in left_out for key in source)}
            facts["lost"] = tuple(lost_keys(source, settings, left_out))
            stages.append(True)
            file = Path(directory) / "converted.yaml"
            text = OmegaConf.to_yaml(convert.tree_of(settings))
            file.write_text(re.sub(r"\$\{oc\.env:(\w+)\}", r"\1", text), encoding="utf-8")
            read_config(str(file), [])
            stages.append(True)
            lay_out(file, source.get("trainer.nnodes", 1), source.get("trainer.n_gpus_per_node", 8))
            stages.append(True)
    except ValueError as error:
        why = str(error).replace(f"{path}: ", "").replace(str(path.parent), "")
        named = KEY.search(why)
        starts_none = "does not come to the command" in why
        key = "no trainer" if starts_none else named[0] if named else why.split()[0]
        return Converted(name, kind, *(len(stages) > stage for stage in range(3)), key, " ".join(why.split()), **facts)
    return Converted(name, kind, True, True, True, **facts)


def lost_keys(source: dict[str, Any], settings: dict[str, Any], left_out: dict[str, str]) -> Iterator[str]:
    """Yield the keys that are not named, stand under no name of ours, and whose value changes nothing."""
    translate = sft_name if is_sft(source) else partial(our_name, foreign_names()["verl"]["keys"])
    for key, value in source.items():
        if key not in left_out and key not in COMMAND and translate(key) not in settings:
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else ["other"]
            with contextlib.suppress(ValueError, TypeError):  # then the value is read
                if convert.convert({**source, key: other}) == (settings, left_out):
                    yield key


def lay_out(made: Path, nodes: int, gpus: int) -> None:
    """Place the calls of the configuration ``made`` as it says. Raises ValueError, one line."""
    config, _ = read_config(str(made), [])
    roles = set(config.models)
    roles |= {"reference"} & set(config.algorithm.roles)
    asks = any(
        max(model.layout.ep, model.generation.ep) > 1 or model.router_replay != "disabled" for model in config.models.values()
    )
    (made.parent / "config.json").write_text(json.dumps(LLAMA | (EXPERTS if asks else {})), encoding="utf-8")
    sizes = [f"models.{role}.path={made.parent}" for role in roles if role != "reward"]
    sizes += [f"reward.model={made.parent}"] if config.reward.model is not None else []
    cluster = [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus}", "cluster.gpu=h100"]
    request = plan.read_request(str(made), [*sizes, *cluster, "plan.fixed=config", f"plan.out={made.parent / 'plan.yaml'}"])
    try:
        plan.search_plan(request)
    except ValueError as error:
        if "GiB" not in str(error):  # it asks for more memory: the sizes are not the model's
            raise


def survey(directory: Path) -> list[Converted]:
    return [try_script(path, str(path.relative_to(directory))) for path in sorted(directory.rglob("*.sh"))]


def table(found: Sequence[Converted]) -> Iterator[list[str | int]]:
    """Rows of [trainer, scripts, convert, load, laid out, laid out with every key known]."""
    for kind in ("rl", "sft"):
        its = [one for one in found if one.kind == kind]
        stages = ([one.converts for one in its], [one.loads for one in its], [one.laid_out for one in its])
        yield [kind, len(its), *map(sum, stages), sum(one.laid_out and not one.unknown for one in its)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path, help="a file for what each script gives")
    arguments = parser.parse_args()
    found = survey(arguments.directory)
    print(f"{'':6}" + "".join(f"{title:>16}" for title in ("scripts", "convert", "load", "laid out", "all keys known")))
    for kind, *numbers in table(found):
        print(f"{kind:6}" + "".join(f"{number:16}" for number in numbers))
    stopped = Counter(one.stopped_by for one in found if one.stopped_by)
    print("\nwhat stops the others")
    for key, count in stopped.most_common():
        print(f"{count:4}  {key}: {next(one.why for one in found if one.stopped_by == key)[:160]}")
    print("\nkeys of each script: all, translated, named, lost")
    for one in found:
        if one.converts:
            translated = one.keys - one.named - len(one.lost)
            print(f"{one.keys:4} {translated:4} {one.named:4} {len(one.lost):4}  {one.script} {' '.join(one.lost)}")
    print("\nkeys left out without a reason")
    for key, count in Counter(key for one in found for key in one.unknown).most_common():
        print(f"{count:4}  {key}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
