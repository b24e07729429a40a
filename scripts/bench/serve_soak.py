"""A server under clients that stream, read slowly, go away and read nothing, for minutes; a table and JSON. Exit code 1 if it fails.

    python scripts/bench/serve_soak.py [--minutes 2] [--clients 64] [--model DIR] [--out FILE]

A greedy prompt is asked throughout and must have the same tokens each time. In the end no request, row and page may be in use. The
memory of the server is read when all clients have begun, half-way and at the end. Without ``--model`` the model is a random one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import environment, machine_facts, run_parts, save, table
from rlhf_spmd.models.weights import write_random_model

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
PROBE = {"prompt": [5, 6, 7, 8] * 9, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
KINDS = ("whole", "stream", "slow", "gone early", "gone in the middle", "reads nothing")
NUM_PROBES = 4
IDLE_S = 60.0  # within which the server must be idle when the clients have ended
MAX_GROWTH = 1.1  # of the server's memory from half-way to the end


class Soak:
    """What the clients of ``port`` have met. ``counts``: requests that ended as they should, by kind; ``failures``: the others."""

    def __init__(self, port: int, ends: float) -> None:
        self.port = port
        self.ends = ends
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.probe_tokens: list[int] | None = None

    async def connect(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        return reader, writer

    async def ask(self, kind: str, draw: random.Random) -> None:
        """One request, whose client behaves as ``kind`` says."""
        body: dict[str, Any] = {
            "prompt": [draw.randrange(3, 300) for _ in range(draw.randrange(1, 200))],
            "seed": draw.randrange(99),
        }
        body |= {
            "max_tokens": draw.randrange(1, 120),
            "temperature": draw.choice((0, 0.7, 1.0)),
            "stream": kind not in KINDS[:1],
        }
        body |= draw.choice(({}, {}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"presence_penalty": 0.5}, {"top_p": 0.9}))
        body |= {"n": draw.choice((1, 1, 4))} if body["temperature"] else {}
        reader, writer = await self.connect(body)
        try:
            if kind == "gone early":
                await asyncio.sleep(draw.random() * 0.3)
            elif kind == "reads nothing":
                await asyncio.sleep(draw.random() * 10)
            elif kind == "gone in the middle":
                await reader.read(200)
            else:
                raw = b""
                while part := await reader.read(300 if kind == "slow" else -1):
                    raw += part
                    await asyncio.sleep(0.02 if kind == "slow" else 0)
                head, _, content = raw.partition(b"\r\n\r\n")
                ended = b"[DONE]" in content[-64:] if body["stream"] else b'"usage"' in content
                if b" 200 " not in head[:20] or not ended:
                    self.failures.append(f"{kind}: {head[:40]!r} ... {content[-200:]!r}")
            self.counts[kind] += 1
        finally:
            writer.close()

    async def client(self, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < self.ends:
            try:
                async with asyncio.timeout(120):
                    await self.ask(KINDS[draw.randrange(len(KINDS))], draw)
            except (OSError, TimeoutError) as error:
                self.failures.append(f"client {number}: {error!r}")

    async def probe(self) -> None:
        """Ask the same greedy prompt and compare the tokens, those of the first answer."""
        while time.monotonic() < self.ends:
            reader, writer = await self.connect(PROBE)
            answer = json.loads((await reader.read(-1)).partition(b"\r\n\r\n")[2])
            writer.close()
            tokens = answer["choices"][0]["token_ids"]
            self.probe_tokens = self.probe_tokens or tokens
            self.counts["probe"] += 1
            if tokens != self.probe_tokens:
                self.failures.append(f"probe {self.counts['probe']}: {tokens} in place of {self.probe_tokens}")
            await asyncio.sleep(0.2)

    async def metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read(-1)).decode()
        writer.close()
        return {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{[^\n]*\} (\S+)$", text, re.M)}

    async def run(self, num_clients: int, rss_mib: Callable[[], float]) -> dict[str, Any]:
        """Return what was measured."""
        begun = time.monotonic()
        minutes = (self.ends - begun) / 60
        memory: list[float] = []

        async def read_memory() -> None:
            await asyncio.sleep(min(15.0, 10 * minutes))
            memory.append(rss_mib())
            await asyncio.sleep(max(30 * minutes - (time.monotonic() - begun), 0))
            memory.append(rss_mib())

        probes = [self.probe() for _ in range(NUM_PROBES)]
        await asyncio.gather(*probes, read_memory(), *(self.client(number) for number in range(num_clients)))
        seconds = time.monotonic() - begun
        memory.append(rss_mib())
        in_use = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        idle_by = time.monotonic() + IDLE_S
        while (metrics := await self.metrics()) and any(metrics[name] for name in in_use) and time.monotonic() < idle_by:
            await asyncio.sleep(0.2)
        self.failures += [f"{name} is {metrics[name]} in the end" for name in in_use if metrics[name]]
        if memory[2] > MAX_GROWTH * memory[1]:
            self.failures.append(f"memory grew from {memory[1]:.0f} to {memory[2]:.0f} MiB")
        tokens_per_s = metrics["generation_tokens_total"] / seconds
        names = ("start_mib", "middle_mib", "end_mib")
        counts = {kind.replace(" ", "_"): self.counts[kind] for kind in (*KINDS, "probe")}
        return {"seconds": seconds, "tokens_per_s": tokens_per_s, **dict(zip(names, memory, strict=True)), **counts}


def serve_soak(minutes: float = 2.0, clients: int = 64, model: Path | None = None, out: Path | None = None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "model"
            write_random_model(model, MODEL, seed=1)
        command = [sys.executable, "-m", "rlhf_spmd", "serve", f"model.path={model}", "port=0", "generation.max_num_seqs=16"]
        log = Path(folder) / "log"
        with log.open("w") as file:
            server = subprocess.Popen(command, stderr=file, env=environment())
        try:
            while not (address := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)

            def rss_mib() -> float:
                status = Path(f"/proc/{server.pid}/status").read_text()
                return float(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

            soak = Soak(int(address[1]), time.monotonic() + 60 * minutes)
            report = asyncio.run(soak.run(clients, rss_mib))
            server.send_signal(signal.SIGTERM)
            ending = time.monotonic()
            if code := server.wait(30):
                soak.failures.append(f"the server ended with code {code}: {log.read_text()[-500:]}")
            report["end_s"] = time.monotonic() - ending
        finally:
            server.kill()
            server.wait()
    print(table([report], "seconds tokens_per_s start_mib middle_mib end_mib end_s"))
    print(table([report], " ".join(kind.replace(" ", "_") for kind in (*KINDS, "probe"))))
    print(*soak.failures[:20], f"{len(soak.failures)} failures", sep="\n")
    save({"bench": "serve_soak", "machine": machine_facts(), "clients": clients, **report, "failures": soak.failures}, out)
    return int(bool(soak.failures))


if __name__ == "__main__":
    run_parts(serve_soak)
