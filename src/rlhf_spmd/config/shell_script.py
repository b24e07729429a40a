"""The arguments that a shell script gives to a program. The script runs in a bash that can start nothing and write nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 20
# Programs that only answer. All others are noted with their arguments, and do nothing.
ANSWERING = (
    *("basename", "cat", "cut", "date", "dirname", "expr", "head", "hostname", "ls", "nproc"),
    *("readlink", "realpath", "seq", "sort", "tail", "tr", "uname", "uniq", "wc", "whoami"),
)
PRELUDE = r"""
note() { printf '%s\0' "$@" $'\1' >&8; }
command_not_found_handle() {
  if [ -p /dev/stdin ]; then while read -r _; do :; done; fi  # two of a pipeline must not write their notes at once
  note "$@"
}
exec() { [ $# -eq 0 ] || "$@"; }
exit() { :; }; cd() { :; }; source() { :; }; kill() { :; }; trap() { :; }; wait() { :; }; ulimit() { :; }; function . { :; }
set -u
"""
SECRET = re.compile(r"(?i)(^|_)(\w*key|token|secret|password|passwd|pass|credentials?)(_|$)")  # names of variables
OUTPUT = re.compile(  # a redirection; arithmetic, tests, quotes and comments are kept as they are
    r"""(?P<kept>\(\(.*?\)\)|\[\[.*?\]\]|'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)\#[^\n]*)|"""
    r"""(?<![<>&\d=-])\d?>>?\|?\s*(?!&)["']?[\w./${}~-]+["']?""",
    re.DOTALL,
)
DEMANDED = re.compile(r"\$\{(\w+):?\?")
UNSET = re.compile(r"\$?(\w+): (?:unbound variable|parameter null or not set|parameter not set)")


@dataclass(frozen=True)
class ScriptCommand:
    """``arguments``: the words after the program's name. ``not_run``: other programs that the script starts. ``unset``: variables that
    it reads and nothing sets; ``${oc.env:NAME}`` stands for each.
    """

    arguments: list[str]
    not_run: list[str]
    unset: list[str]


def last_command(path: Path, program: str) -> ScriptCommand:
    """Return the last command of a bash script that starts ``program``, a regular expression for a whole argument.

    Raises ValueError, one line, for a script that starts none.
    """
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\$\{BASH_SOURCE(\[0\])?\}|\$BASH_SOURCE\b", "$0", text)
    text = re.sub(r"\b(PATH|SHELL|ENV|BASH_ENV)=", r"\1_=", text)  # which a restricted bash does not let be set
    text = re.sub(r"(^|[;&|({]\s*|\s)(?:[\w.~-]*/)+(python[\d.]*|torchrun)(?=\s)", r"\1\2", text, flags=re.MULTILINE)
    text = OUTPUT.sub(lambda match: match["kept"] or "", text)  # nor an output be sent elsewhere
    unset: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in ANSWERING:
            if (program_file := shutil.which(name)) is not None:
                (Path(directory) / name).symlink_to(program_file)
        demanded = {name: rf"(?<=: ){name}(?=: )" for name in DEMANDED.findall(text)}  # which tells why in the script's words
        while True:
            commands, errors = _run(PRELUDE + text, path, directory, unset)
            names = [*UNSET.findall(errors), *(name for name, where in demanded.items() if re.search(where, errors))]
            missing = [name for name in dict.fromkeys(names) if name not in unset]
            if not missing:
                break
            unset += missing
    starts = [number for number, command in enumerate(commands) if any(re.fullmatch(program, word) for word in command)]
    if not starts:
        lines = [line for line in errors.splitlines() if line and not line.startswith("+")]  # as set -x traces
        why = (lines or ["it starts other programs"])[-1].split(": ", 1)[-1]
        also = f" ({', '.join(map(_named, unset))} not set)" if unset else ""
        raise ValueError(f"{path}: does not come to the command that was looked for: {why[:200]}{also}")
    words = commands[starts[-1]]
    first = next(number for number, word in enumerate(words) if re.fullmatch(program, word))
    others = [command[0] for number, command in enumerate(commands) if number != starts[-1] and command[0] != "tee"]
    return ScriptCommand(words[first + 1 :], list(dict.fromkeys(others)), [_named(name) for name in unset])


def _named(variable: str) -> str:
    return f"ARGUMENT_{variable}" if variable.isdigit() else variable


def _run(program: str, path: Path, directory: str, unset: list[str]) -> tuple[list[list[str]], str]:
    """Return the commands that the script would start, and its standard error."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("BASH")}
    for name in filter(SECRET.search, variables):
        variables[name] = f"${{oc.env:{name}}}"  # the value is never written out
    variables |= {"PATH": directory, "LC_ALL": "C"} | {name: f"${{oc.env:{name}}}" for name in unset if not name.isdigit()}
    arguments = [f"${{oc.env:ARGUMENT_{n}}}" for n in range(1, 1 + max([int(n) for n in unset if n.isdigit()], default=0))]
    bash = shutil.which("bash") or "/bin/bash"
    with tempfile.TemporaryFile() as notes:
        command = [bash, "--norc", "--noprofile", "--restricted", "-c", program, str(path), *arguments]

        def as_eight() -> None:
            os.dup2(notes.fileno(), 8)

        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        try:
            done = subprocess.run(  # type: ignore[call-overload]
                command, env=variables, pass_fds=(8,), preexec_fn=as_eight, errors="replace", timeout=TIMEOUT_S, **options
            )
            errors = done.stderr
        except subprocess.TimeoutExpired:
            errors = f"bash: does not end within {TIMEOUT_S} s"
        notes.seek(0)
        words = notes.read().decode(errors="replace").split("\0")
    commands: list[list[str]] = [[]]
    for word in words[:-1]:
        if word == "\1":
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command], errors
