"""What the benchmarks share: seconds, memory and machine rates; flags, processes and programs under torchrun; tables and JSON.

Only the standard library is imported until something else is asked for, because peers run this in Python environments of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

if TYPE_CHECKING:
    from rlhf_spmd.parallel.world import World

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
LOAD_AT_START = os.getloadavg()[0]

# Seconds and memory


def memory_mib(field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the peak since :func:`reset_peak`) of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def settle(device: str) -> None:
    """Wait until the device has done all that it was given, before a clock is read."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def peak_mib(device: str, baseline: float = 0.0) -> float:
    """Peak memory: on a GPU the bytes of tensors (``torch.cuda.max_memory_allocated``), else resident ones above ``baseline``."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / MIB
    return memory_mib("VmHWM") - baseline


def reset_peak() -> None:
    """Start the peak of resident memory anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def timed(
    body: Callable[[], Any], budget_s: float, least: int, device: str = "cpu"
) -> tuple[list[float], list[float], list[Any]]:
    """Wall seconds, CPU seconds and results of repetitions: at least ``least``, more while they fit into ``budget_s``."""
    settle(device)
    wall: list[float] = []
    cpu: list[float] = []
    results = []
    while len(wall) < least or sum(wall) + wall[-1] <= budget_s:
        begin, cpu_begin = time.perf_counter(), cpu_seconds()
        results.append(body())
        settle(device)
        wall.append(time.perf_counter() - begin)
        cpu.append(cpu_seconds() - cpu_begin)
    return wall, cpu, results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def rounded(share: float) -> float:
    """To three digits, also where little of the machine is used."""
    return float(f"{share:.3g}")


def slowest(world: World, bodies: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each body on its slowest rank; they take turns. Collective over the world: every rank of it must call, in
    program order."""
    import torch

    seconds: list[list[float]] = [[] for _ in bodies]
    for repeat in range(repeats + 1):
        for times, body in zip(seconds, bodies, strict=True):
            world.all.barrier("bench")
            begin = time.perf_counter()
            body()
            elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            longest = float(world.all.all_reduce(elapsed, "bench", "max"))
            if repeat:  # the first one connects
                times.append(longest)
    return [median(times) for times in seconds]


# The machine


Device = Literal["cpu", "cuda"]


def found_device() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    import torch

    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "load_at_start": round(LOAD_AT_START, 2)}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        facts["cpu"] = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {**facts, "torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


def machine_rates(threads: int, dtypes: Sequence[str], device: str = "cpu") -> dict[str, float]:
    """FLOP/s of square matrix products per dtype (under the caller's matmul switch) and bytes/s of a copy (read plus written)."""
    import torch

    torch.set_num_threads(threads)
    rates: dict[str, float] = {}
    size, copied = (8192, 2048 * MIB) if device == "cuda" else (1024, 256 * MIB)

    def best(body: Callable[[], object]) -> float:
        body()
        return min(timed(body, 1.0, 5, device)[0])

    for dtype in dtypes:
        a, b, out = (torch.rand(size, size, device=device).to(getattr(torch, dtype)) for _ in range(3))
        rates[f"{dtype}_flops"] = 2 * size**3 / best(partial(torch.matmul, a, b, out=out))
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    rates["copy_bytes"] = 2 * source.nbytes / best(lambda: target.copy_(source))
    if device == "cuda":
        del a, b, out, source, target
        torch.cuda.empty_cache()  # the cases run in other processes
    return rates


def device_kernels(run: Callable[[], Any]) -> list[list[Any]]:
    """[kernel, launches, milliseconds on the GPU] of one run, the 40 largest; their sum first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    kernels = [each for each in profiler.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
    found = sorted(((each.self_device_time_total / 1e3, each.count, each.key) for each in kernels), reverse=True)
    whole = [["all", sum(count for _, count, _ in found), round(sum(ms for ms, *_ in found), 1)]]
    return whole + [[name[:150], count, round(ms, 1)] for ms, count, name in found[:40]]


# Parts on the command line


def run_parts(*parts: Callable[..., int | None]) -> None:
    """The command line of a benchmark. Its first word names a part, unless there is only one. The part's arguments, or the fields of
    the dataclass that is its only argument, are flags; a sequence takes several values. Docstrings are the help."""
    main = sys.modules["__main__"]
    if sys.argv[1:2] == [INNER]:
        _run_body(getattr(main, sys.argv[2]), *map(Path, sys.argv[3:]))
    if not parts:
        sys.exit(main.__doc__)
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=style)
    commands = parser.add_subparsers(required=True, metavar="PART") if len(parts) > 1 else None
    for part in parts:
        about = inspect.getdoc(part) or ""
        first = about.partition("\n")[0].replace("%", "%%")
        own = commands.add_parser(part.__name__, description=about, help=first, formatter_class=style) if commands else parser
        flags = list(inspect.signature(part, eval_str=True).parameters.values())
        fields: Any = flags[0].annotation if flags and dataclasses.is_dataclass(flags[0].annotation) else None
        own.set_defaults(call=(lambda part=part, fields=fields, **given: part(fields(**given))) if fields else part)
        for flag in inspect.signature(fields, eval_str=True).parameters.values() if fields else flags:
            _add_flag(own, flag)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    sys.exit(given.pop("call")(**given))


def _add_flag(parser: argparse.ArgumentParser, flag: inspect.Parameter) -> None:
    kind, options = flag.annotation, dict[str, Any]()
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        kind = next(one for one in get_args(kind) if one is not types.NoneType)
    if get_origin(kind) is Sequence:
        kind = get_args(kind)[0]
        options = {"nargs": "*", "action": "extend"}
    if get_origin(kind) is Literal:
        options["choices"], kind = get_args(kind), str
    options |= {"action": "store_true"} if kind is bool else {"type": kind}
    if flag.default is inspect.Parameter.empty:
        options["required"] = True
    elif flag.default not in (None, False, "", ()):
        values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
        options["help"] = f"default: {' '.join(map(str, values))}"
    parser.add_argument(f"--{flag.name.replace('_', '-')}", dest=flag.name, default=None, **options)


def chosen(names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """All that are known where none are named. Ends the program at a name that is not known."""
    unknown = [name for name in names or () if name not in (known := list(known))]
    if unknown:
        sys.exit(f"no {unknown[0]!r}; there are: {', '.join(known)}")
    return list(known if names is None else names)


# Processes of their own

INNER = "--in-a-process-of-its-own"


def environment(python: str = sys.executable, **variables: str) -> dict[str, str]:
    """One thread. This checkout's sources come first; none of them where another Python runs a peer."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH")] if python == sys.executable else []
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**os.environ, **own, **variables}


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run_case(
    body: Callable[..., Any],
    case: Mapping[str, Any],
    ranks: int = 1,
    python: str = sys.executable,
    timeout_s: float | None = None,
    shown: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """What ``body(**case)`` returns on rank 0 of processes of its own; on other ranks it returns None. {"error": ...} where nothing
    comes. The body's file calls :func:`run_parts`. ``shown``: the processes write to this terminal."""
    with tempfile.TemporaryDirectory() as directory:
        given, out = Path(directory) / "case.json", Path(directory) / "out.json"
        given.write_text(json.dumps(case), encoding="utf-8")
        file = Path(inspect.getfile(body)).resolve()
        command = [python, *(torchrun(ranks) if ranks > 1 else []), str(file), INNER, body.__name__, str(given), str(out)]
        streams: dict[str, Any] = {} if shown else {"capture_output": True, "text": True}
        try:
            done = subprocess.run(command, env=environment(python, **variables), timeout=timeout_s, **streams)
        except subprocess.TimeoutExpired:
            return {"error": f"no result after {timeout_s:.0f} s"}
        except OSError as error:
            return {"error": str(error)[-300:]}
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))
    said = (done.stderr or "").splitlines()
    lines = [line.strip() for line in said if "Error" in line or "error:" in line]
    of_rank = [text for text in lines if text.startswith("[rank")]  # what torchrun itself says of it comes last
    return {"error": (of_rank or lines or said or [f"exit code {done.returncode}"])[-1][-300:]}


def on_ranks(ranks: int, body: Callable[..., Any], **case: Any) -> dict[str, Any]:
    """As :func:`run_case`, on this terminal; nothing where the body ends the process itself. Ends the program where it fails."""
    found = run_case(body, case, ranks, shown=True)
    if "error" in found and found["error"] != "exit code 0":
        sys.exit(f"{body.__name__} on {ranks} rank(s) failed: {found['error']}")
    return found


def _run_body(body: Callable[..., Any], case: Path, out: Path) -> NoReturn:
    found = body(**json.loads(case.read_text(encoding="utf-8")))
    if found is not None and os.environ.get("RANK", "0") == "0":  # what rank 0 returns is the result
        out.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and of engines are left behind


def join_world(device: str = "cpu") -> World:
    """All ranks of this torchrun, or this process alone."""
    import torch

    from rlhf_spmd.parallel.launch import connect_store, read_launch
    from rlhf_spmd.parallel.world import init_world

    launch = read_launch()
    return init_world(launch, connect_store(launch), device=torch.device("cpu") if device == "cpu" else None)


# Training programs


class RunError(RuntimeError):
    """Why a program did not do its steps, in a line."""


def run_program(
    run_dir: Path,
    ranks: int,
    settings: Mapping[str, Any],
    *more: str,
    stop_after: int | None = None,
    **variables: str,
) -> list[dict[str, Any]]:
    """The metrics of each step of a run under torchrun. ``stop_after``: it is told to end after so many steps, since a run ends with a
    checkpoint, which takes longer than the steps of a large model. Raises :class:`RunError`."""
    command = [sys.executable, *torchrun(ranks), "-m", "rlhf_spmd.train", *texts_of(settings)]
    said = run_dir.with_name(f"{run_dir.name}.log")
    with said.open("w") as output:
        process = subprocess.Popen(
            [*command, f"run.dir={run_dir}", *more], env=environment(**variables), stdout=output, stderr=output
        )
        while process.poll() is None and not (stop_after and len(read_metrics(run_dir)) >= stop_after):
            time.sleep(0.2)
        process.terminate()
        code = process.wait()
    rows = read_metrics(run_dir)
    if len(rows) < stop_after if stop_after else code:
        status = run_dir / "exit_status.json"
        ended = json.loads(status.read_text(encoding="utf-8")) if status.exists() else {"class": f"code {code}"}
        raise RunError(f"{ended['class']}: {ended.get('message') or said.read_text()[-4000:]}")
    return rows


def texts_of(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


# Tables and JSON


def table(rows: Iterable[Mapping[str, Any]], keys: str) -> str:
    """Markdown, with a column for each of the ``keys``."""
    names = keys.split()
    heads = [re.sub("_(s|us|mib|gb)$", r", \1", name.replace("_bytes", "_mib")).replace("_", " ") for name in names]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(names) - 1), *(line(row, keys) for row in rows)])


def line(row: Mapping[str, Any], keys: str) -> str:
    """Empty where the row lacks a value; its error in place of the first number. Bytes are shown as MiB."""
    texts = [_text(key, row.get(key)) for key in keys.split()]
    if "error" in row:
        texts[texts.index("")] = row["error"]
    return "| " + " | ".join(texts) + " |"


def _text(key: str, value: Any) -> str:
    if key.endswith("_bytes") and value is not None:
        value = value / MIB
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def save(report: Mapping[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
