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
from typing import NoReturn

from rlhf_spmd import __version__
from rlhf_spmd.config.registry import available, find
from rlhf_spmd.config.words import nearest
from rlhf_spmd.process.arguments import RANKS, cached_help, ignore_closed_pipes, read_config_arguments

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
    "convert": "a configuration of verl or TRL as one of this project",
    "reward-server": "a reward function behind HTTP, for reward.function=http",
}
OPTIONS_OF_PLAIN_PROGRAMS = {  # programs without a configuration, in one process
    "report": "--serve --port --help out=",
    "summary": "--help",
    "convert": "--help",
    "reward-server": "--function --host --port --token-env --help",
}
ONE_PROCESS = ("plan", *OPTIONS_OF_PLAIN_PROGRAMS)  # except ``plan profile``, which starts ranks
HELP = {"-h", "--help"}
OPTIONS = ("--config", "--help", "--print-config", "--dry-run", "--nproc-per-node")
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = "complete -c rlhf-spmd -n '__fish_use_subcommand' -f -a '%s'\n"
FISH_WORDS = "complete -c rlhf-spmd -n '__fish_seen_subcommand_from %s' -a '%s'\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a program and end the process with its exit code.

    Requests that need no program are answered here, and a program's ``--help`` from the cache. Else the module of the program's name
    is imported and its ``main`` called, with a number of ranks if the user gives none. The program reads its arguments
    (``process/command_line.py``). For several ranks it starts itself once for each (``process/launcher.py``); each rank comes to
    ``process/program.py``.
    """
    ignore_closed_pipes()
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for the user's own modules
    words = list(sys.argv[1:] if argv is None else argv)
    name, *arguments = words or ["--help"]
    if name == "--version":
        print(__version__)
    elif name in HELP or (name == "completion" and HELP & {*arguments}):
        width = max(map(len, PROGRAMS))
        print(__doc__, "programs:", *(f"  {program:<{width}}  {text}" for program, text in PROGRAMS.items()), sep="\n")
        raise SystemExit(0 if words else 2)
    elif name == "completion":
        print(completion(arguments[0] if arguments else ""), end="")
    elif name in PROGRAMS:
        raise SystemExit(run_program(name, arguments))
    elif name.startswith("-"):
        program = next((word for word in arguments if word in PROGRAMS), "train")
        _refuse(f"{name}: the program comes first: rlhf-spmd {program} {name} ...; --help lists programs")
    else:
        hint = nearest(name, list(PROGRAMS)) or ";"
        _refuse(f"unknown program '{name}'{hint} available: {', '.join(PROGRAMS)}, completion")


def run_program(name: str, arguments: Sequence[str]) -> int | None:
    """Return a program's exit code. Most programs end the process themselves."""
    text = cached_help(name, arguments)
    if text is not None:
        print(text.rstrip())
        return 0
    program = importlib.import_module(f"rlhf_spmd.{name.replace('-', '_')}")
    try:
        option = ranks_option(name, arguments)
    except ValueError as error:
        _refuse(str(error))
    code: int | None = program.main([*arguments, *option])
    return code


def ranks_option(name: str, arguments: Sequence[str]) -> list[str]:
    """Return ``--nproc-per-node`` and a number if the user gives none and the program starts ranks.

    Ends the process if srun has started the command several times. Raises ValueError for an environment that is no launcher's.
    """
    from rlhf_spmd.parallel.launch import num_tasks
    from rlhf_spmd.process.command_line import is_launched
    from rlhf_spmd.process.launcher import default_num_ranks

    options = {word.partition("=")[0] for word in arguments}
    is_one_process = name in ONE_PROCESS and list(arguments[:1]) != ["profile"]
    if is_one_process or is_launched() or options & {*RANKS, *HELP, "--print-config"}:
        return []
    if (number := num_tasks()) > 1:
        _refuse(
            f"srun or mpirun started {number} of this command, each would start ranks of its own; start torchrun: docs/clusters.md"
        )
    if name == "serve":  # one model, on as many ranks as hold it
        from rlhf_spmd.serve import ServeConfig, read_config

        with suppress(ValueError):  # which the program itself refuses
            return ["--nproc-per-node", str(read_config(ServeConfig, *read_config_arguments(arguments)).layout.tp)]
    return ["--nproc-per-node", str(default_num_ranks())]


def completion(shell: str) -> str:
    """Return the shell's script that completes programs and keys. Ends the process for an unknown shell."""
    words = {name: OPTIONS_OF_PLAIN_PROGRAMS.get(name) or " ".join([*OPTIONS, *_words(name)]) for name in PROGRAMS}
    programs = " ".join([*PROGRAMS, "completion"])
    if shell == "fish":
        return FISH % programs + "".join(FISH_WORDS % pair for pair in words.items())
    if shell not in ("bash", "zsh"):
        _refuse(f"completion {shell}: give a shell: bash, zsh or fish")
    cases = "\n".join(f'    *" {name}") words="{text}" ;;' for name, text in words.items())
    bash = Path(__file__).with_name("completion.bash").read_text(encoding="utf-8")
    return (ZSH if shell == "zsh" else "") + bash.replace("@programs@", programs).replace("@cases@", cases)


def _words(program: str) -> Iterator[str]:
    """Yield ``key=`` for each key, with roles by their names. Programs that train have the keys of all algorithms."""
    keys = importlib.import_module(f"rlhf_spmd.{program}").keys
    algorithms = available("rlhf_spmd.algorithms", required_attribute="step") if program in ("train", "plan") else ["sft"]
    names: dict[str, None] = {}
    for algorithm in algorithms:
        roles = find("algorithm", "rlhf_spmd.algorithms", algorithm, required_attribute="step").Config().roles
        for key in keys([f"algorithm.name={algorithm}"]):
            names |= dict.fromkeys(key.name.replace("<role>", role) for role in roles)
    return (f"{name}=" for name in names if "<" not in name)


def _refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
