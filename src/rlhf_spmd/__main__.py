"""All programs as one command. Alone on a machine it starts the ranks itself; under torchrun it is one of them.

rlhf-spmd train --config configs/quickstart_ppo.yaml --nproc-per-node 2 run.steps=20
rlhf-spmd train --help                            every key with its type, its default and what it means
rlhf-spmd train --help reward                     the keys that contain reward
rlhf-spmd completion bash >> ~/.bashrc            or zsh, or fish: complete programs and keys with the tab key
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd import __version__
from rlhf_spmd.config.keys import check_names
from rlhf_spmd.config.load import read_tree
from rlhf_spmd.config.registry import available, find
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.process.arguments import (
    RANKS,
    ProgramKeys,
    help_text,
    ignore_closed_pipes,
    load_keys,
    read_arguments,
    read_words,
    save_keys,
    shared_parser,
)

PROGRAMS = {
    "train": "training by any algorithm, from configuration to export",
    "sft": "supervised fine-tuning: train, with algorithm.name=sft where none is named",
    "generate": "responses for a file of prompts",
    "evaluate": "mean@k, pass@k and maj@k of a model on sets of prompts",
    "score": "log-probs of given responses",
    "serve": "a model behind OpenAI's interface",
    "plan": "the best placement on a cluster, and whether a run fits; one process",
    "report": "one page about a run, or several beside each other; one process",
    "summary": "what a run did, in a few lines",
    "convert": "a configuration of verl's PPO trainer as one of this project",
    "reward-server": "a reward function behind HTTP, for reward.function=http",
}
OTHERS = {  # without a configuration, in one process: their options
    "report": "--serve --port --help out=",
    "summary": "--help",
    "convert": "--help",
    "reward-server": "--function --host --port --token-env --help",
}
ONE_PROCESS = ("plan", *OTHERS)  # but plan profile
HELP = {"-h", "--help"}
ASKED = {*HELP, "--print-config"}
OPTIONS = ("--config", "--help", "--print-config", "--dry-run", "--nproc-per-node")
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = "complete -c rlhf-spmd -n '__fish_use_subcommand' -f -a '%s'\n"
FISH_WORDS = "complete -c rlhf-spmd -n '__fish_seen_subcommand_from %s' -a '%s'\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process with the program's exit code."""
    ignore_closed_pipes()
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for the user's own modules
    given = list(sys.argv[1:] if argv is None else argv)
    name, *rest = given or ["--help"]
    if name == "--version":
        print(__version__)
    elif name in HELP or (name == "completion" and HELP & {*rest}):
        width = max(map(len, PROGRAMS))
        print(__doc__, "programs:", *(f"  {one:<{width}}  {said}" for one, said in PROGRAMS.items()), sep="\n")
        raise SystemExit(0 if given else 2)
    elif name == "completion":
        print(completion(rest[0] if rest else ""), end="")
    elif name in PROGRAMS:
        answer_early(name, rest)
        program = importlib.import_module(f"rlhf_spmd.{name.replace('-', '_')}")
        remember_keys(name, program)
        try:
            more = usual_ranks(name, rest)
        except ValueError as error:
            _refuse(str(error))
        raise SystemExit(program.main([*rest, *more]))
    elif name.startswith("-"):
        meant = next((one for one in rest if one in PROGRAMS), "train")
        _refuse(f"{name}: the program comes first: rlhf-spmd {meant} {name} ...; --help lists programs")
    else:
        hint = nearest(name, list(PROGRAMS)) or ";"
        _refuse(f"unknown program '{name}'{hint} available: {', '.join(PROGRAMS)}, completion")


def answer_early(name: str, arguments: Sequence[str]) -> None:
    """Answer ``--help`` and refuse unknown keys without importing the program, if its keys are remembered. Both end the process.

    Ranks leave it to the program, which makes one line of theirs.
    """
    known = None if {"RANK", "WORLD_SIZE"} & {*os.environ} else load_keys(name)
    if known is None:
        return
    words = [
        one for number, one in enumerate(arguments) if name != "plan" or (one != "--json" and (number or one != "profile"))
    ]
    parser = shared_parser(name, known.about)
    try:
        given, overrides = read_arguments(parser, words)
        config, *more = given.config or [None]
        tree = {} if given.help or more else read_tree(config, overrides)
        named = [value.removeprefix("algorithm.name=") for value in overrides if value.startswith("algorithm.name=")]
        section = tree.get("algorithm")
        if isinstance(section, dict) and section.get("name") is not None:
            named.append(str(section["name"]))
        keys = known.keys.get((named or [known.default])[-1])
        if keys is None or more:
            return
        if given.help:
            print(help_text(parser, keys, overrides).rstrip())
            raise SystemExit(0)
        check_names(keys, tree)
    except ValueError as error:
        _refuse(f"config error: {error}")


def remember_keys(name: str, program: Any) -> None:
    """Remember the program's keys, for each algorithm, for the next time."""
    if name in OTHERS or load_keys(name) is not None:
        return
    trains = name in ("train", "sft", "plan")
    algorithms = available("rlhf_spmd.algorithms", exports="step") if trains else [""]
    keys = {one: list(program.keys([f"algorithm.name={one}"] if one else [])) for one in algorithms}
    default = ("sft" if name == "sft" else "ppo") if trains else ""
    save_keys(name, ProgramKeys(program.__doc__ or "", default, keys))


def usual_ranks(name: str, arguments: Sequence[str]) -> list[str]:
    """Return ``--nproc-per-node`` if the user has not given it and ranks will be started.

    Ends the process if srun has started the command several times.
    """
    from rlhf_spmd.parallel.launch import num_tasks
    from rlhf_spmd.process.command_line import launched
    from rlhf_spmd.process.launcher import default_num_ranks

    is_said = any(one.partition("=")[0] in RANKS for one in arguments)
    is_alone = name in ONE_PROCESS and list(arguments[:1]) != ["profile"]
    if is_said or is_alone or launched() or ASKED & {*arguments}:
        return []
    if (number := num_tasks()) > 1:
        _refuse(
            f"srun or mpirun started {number} of this command, each would start ranks of its own; start torchrun: docs/clusters.md"
        )
    if name == "serve":  # one model, on as many ranks as hold it
        from rlhf_spmd.serve import ServeConfig, read_config

        with suppress(ValueError):  # which the program itself refuses
            return ["--nproc-per-node", str(read_config(ServeConfig, *read_words(arguments)).layout.tp)]
    return ["--nproc-per-node", str(default_num_ranks())]


def completion(shell: str) -> str:
    """Return the shell's script that completes programs and keys. Ends the process for an unknown shell."""
    words = {name: OTHERS.get(name) or " ".join([*OPTIONS, *_words(name)]) for name in PROGRAMS}
    programs = " ".join([*PROGRAMS, "completion"])
    if shell == "fish":
        return FISH % programs + "".join(FISH_WORDS % pair for pair in words.items())
    if shell not in ("bash", "zsh"):
        _refuse(f"completion {shell}: give a shell: bash, zsh or fish")
    cases = "\n".join(f'    *" {name}") words="{its}" ;;' for name, its in words.items())
    bash = Path(__file__).with_name("completion.bash").read_text(encoding="utf-8")
    return (ZSH if shell == "zsh" else "") + bash.replace("@programs@", programs).replace("@cases@", cases)


def _words(program: str) -> Iterator[str]:
    """Yield ``key=`` for each key, with roles by their names. Programs that train have the keys of all algorithms."""
    keys = importlib.import_module(f"rlhf_spmd.{program}").keys
    algorithms = available("rlhf_spmd.algorithms", exports="step") if program in ("train", "plan") else ["sft"]
    found: dict[str, None] = {}
    for algorithm in algorithms:
        roles = find("algorithm", "rlhf_spmd.algorithms", algorithm, exports="step").Config().roles
        for key in keys([f"algorithm.name={algorithm}"]):
            found |= dict.fromkeys(key.name.replace("<role>", role) for role in roles)
    return (f"{name}=" for name in found if "<" not in name)


def _refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
