"""verl's single controller on the toys of ``control.py``, in the Python environment that has verl; ``control.py`` starts it.

    python control_verl.py CASE.json OUT.json

One process drives all workers through Ray. Written: seconds from the start of the program, and from that of the worker group, to the
end of the first call to all, with the CPU seconds of all processes; then wall and CPU microseconds of each repetition of an empty call
to all, and of a call of one half of the workers whose result is taken by a call of the other half, through the driver (``blocking``)
and as futures. ``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`` changes how verl makes bytes of a batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

TICKS = os.sysconf("SC_CLK_TCK")


class Toy(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        pass

    @register(Dispatch.ONE_TO_ALL)
    def width(self, columns: int, rows: int) -> None:
        torch.set_num_threads(1)
        self.payload = torch.ones(rows, columns)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def produce(self, rows: DataProto) -> DataProto:
        return DataProto.from_dict({"payload": self.payload[: len(rows)]})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def consume(self, rows: DataProto) -> DataProto:
        assert rows.batch["payload"].shape[1] == self.payload.shape[1]
        return DataProto.from_dict({"done": torch.ones(len(rows))})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce_later(self, rows: DataProto) -> DataProto:
        return DataProto.from_dict({"payload": self.payload[: len(rows)]})


def tree_cpu_s() -> float:
    """CPU seconds of this process and of all that descend from it: Ray's daemons and workers."""
    children, used = defaultdict(list), {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(int(ticks) for ticks in fields[11:13]) / TICKS
    total, todo = 0.0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0.0)
        todo += children[pid]
    return total


def measure(body: Callable[[], object], repeats: int) -> dict[str, float]:
    """Of all repetitions together the CPU time: a tick of the kernel's clock is longer than one of them."""
    wall = []
    for i in range(-2, repeats):
        if i == 0:
            cpu = tree_cpu_s()
        begin = time.perf_counter()
        body()
        wall.append((time.perf_counter() - begin) * 1e6)
    kept = torch.tensor(wall[2:])
    spent = (tree_cpu_s() - cpu) / repeats * 1e6
    return {"median_us": float(kept.median()), "p90_us": float(kept.quantile(0.9)), "all_cpu_us": spent}


def one_move(produce: Callable[[Any], Any], consume: Callable[[Any], Any], prompts: Any) -> None:
    consume(produce(prompts))


def main() -> None:
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ranks, half = case["ranks"], case["ranks"] // 2
    ray.init(num_cpus=2 * ranks, include_dashboard=False, log_to_driver=False, logging_level="error")
    group_begun = time.time()
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    toy = RayClassWithInitArgs(ray.remote(Toy))
    every = RayWorkerGroup(pool, toy, device_name="cpu")
    every.nothing()
    now = time.time()
    report: dict[str, Any] = {
        "start": {"program_s": now - case["begun"], "group_s": now - group_begun, "cpu_s": tree_cpu_s()},
        "empty": measure(every.nothing, 4 * case["repeats"]),
        "moves": [],
    }
    halves = slice(half), slice(half, 2 * half)
    a, b = (RayWorkerGroup.from_detached(None, every.worker_names[of], every.workers[of], toy) for of in halves)
    for rows, mebibytes in case["sizes"]:
        for group in (a, b):
            group.width((mebibytes << 20) // 4 // rows, rows)
        prompts = DataProto.from_dict({"prompt_ids": torch.zeros(rows, 40, dtype=torch.int64)})
        for way, produce in (("blocking", a.produce), ("futures", a.produce_later)):
            took = measure(partial(one_move, produce, b.consume, prompts), case["repeats"])
            report["moves"].append({"rows": rows, "mebibytes": mebibytes, "way": way, **took})
    Path(sys.argv[2]).write_text(json.dumps(report), encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
