"""What the benchmarks share: seconds, memory and machine rates, on CPUs and CUDA devices. Only the standard library until a rate
or a GPU is asked for, because peers run it in Python environments of their own."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MIB = 1 << 20


def memory_mib(field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the peak since :func:`reset_peak`) of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``: where everything is computed, the rates included."""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=found, help="cuda where there is a GPU, else cpu")


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


def machine_facts() -> dict[str, Any]:
    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "load_at_start": round(os.getloadavg()[0], 2)}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        facts["cpu"] = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return facts


def device_facts(device: str) -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


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


def run_case(command: Sequence[str], env: dict[str, str], out: Path, timeout_s: float) -> dict[str, Any]:
    """Run one case in a process of its own; it writes a JSON object to ``out``. {"error": ...} where it does not."""
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    except (subprocess.TimeoutExpired, OSError) as error:
        return {"error": str(error)[-300:] if isinstance(error, OSError) else f"no result after {timeout_s:.0f} s"}
    if out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line or "error:" in line]
    of_rank = [text for text in lines if text.startswith("[rank")]  # what torchrun itself says of it comes last
    return {"error": (of_rank or lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1][-300:]}


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


def rounded(share: float) -> float:
    """To three digits, also where little of the machine is used."""
    return float(f"{share:.3g}")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def on_ranks(ranks: int, *command: str) -> int:
    """Run a script with its arguments under torchrun, one thread per rank; its exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*launcher, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """Markdown: the first ``text_columns`` to the left, numbers to the right."""
    rule = "|" + "---|" * text_columns + "--:|" * (len(heads) - text_columns)
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def save(report: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
