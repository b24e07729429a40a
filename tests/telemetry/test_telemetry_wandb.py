"""W&B never holds a run up: disabled, offline, online without a network, online with a server that never answers."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from rlhf_spmd.telemetry.logger import LoggerConfig, MetricLogger
from rlhf_spmd.telemetry.run_dir import METRICS_FILE

pytest.importorskip("wandb")


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of the account or the network of this machine: settings, cache and netrc in the test's directory."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def run_three_steps(run_dir: Path, mode: str, timeout_s: float = 20.0) -> tuple[float, float]:
    """Seconds that the run spent in the logger during its steps, and at its end."""
    run_dir.mkdir(exist_ok=True)
    start = time.monotonic()
    logger = MetricLogger(run_dir, LoggerConfig(wandb=mode, wandb_timeout_s=timeout_s), "name", {"run": {"seed": 1}}, None)
    for step in (1, 2, 3):
        logger.log(step, {"reward/mean": step / 10, "actor/kl": float("nan")})
    logged = time.monotonic()
    logger.close()
    logger.close()
    return logged - start, time.monotonic() - logged


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_disabled_starts_nothing(tmp_path: Path, wandb_home: pytest.MonkeyPatch) -> None:
    run_three_steps(tmp_path / "run", "disabled")
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.slow
def test_offline_writes_a_run_that_can_be_synced(tmp_path: Path, wandb_home: pytest.MonkeyPatch) -> None:
    during, _ = run_three_steps(tmp_path / "run", "offline")
    assert during < 2.0
    [binary] = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = binary.read_bytes()
    assert b"reward/mean" in content
    assert (tmp_path / "run" / "wandb" / "run_id").read_text().strip() in binary.name


@pytest.mark.slow
def test_online_without_a_network_goes_on_offline(
    tmp_path: Path, wandb_home: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb_home.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    wandb_home.setenv("WANDB_API_KEY", "0" * 40)
    during, at_end = run_three_steps(tmp_path / "run", "online", timeout_s=2.0)
    assert during < 2.0 and at_end < 40.0
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert "going on offline" in capfd.readouterr().err
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
def test_online_with_a_server_that_never_answers(tmp_path: Path, wandb_home: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        wandb_home.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        wandb_home.setenv("WANDB_API_KEY", "0" * 40)
        during, at_end = run_three_steps(tmp_path / "run", "online", timeout_s=2.0)
    assert during < 2.0 and at_end < 40.0
    assert steps_of(tmp_path / "run") == [1, 2, 3]


@pytest.mark.slow
def test_online_without_an_account_asks_nobody(
    tmp_path: Path, wandb_home: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb_home.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    _, at_end = run_three_steps(tmp_path / "run", "online", timeout_s=2.0)
    assert at_end < 40.0
    assert "going on offline" in capfd.readouterr().err


def test_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match=r"logger\.wandb='onlin'.*online, offline, disabled"):
        LoggerConfig(wandb="onlin").check("logger")
