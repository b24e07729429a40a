"""Adapters of a model that ``serve`` has beside it: each request is answered as if by the model that has its adapter merged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate_runs import model as model  # a fixture
from generators import transformers_greedy
from rlhf_spmd import serve
from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.served_adapters import ServedAdapters, read_adapter
from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.sharding import plan_whole_model
from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_spec
from rlhf_spmd.models.weights import ADAPTER_FILE
from rlhf_spmd.parallel.launch import Launch
from serving import arrive, ask, program, service_of, turn_until_idle

ADAPTERS = {
    "poet": LoraConfig(rank=2, alpha=8.0),
    "clerk": LoraConfig(rank=3, alpha=6.0, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True),
}
PROMPT = "The quick brown fox jumps"  # more than a page


def write_adapter(path: Path, model: Path, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """Writes PEFT's directory; the tensors by name."""
    plan = plan_whole_model(read_spec(model), "none", lora)
    boxes = sorted({(box.name, box.shape) for name, shard in plan.items() if is_adapter(name) for box in shard.boxes})
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in boxes}
    path.mkdir()
    save_file(tensors, path / ADAPTER_FILE)
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules}
    (path / ADAPTER_CONFIG).write_text(json.dumps(config | {"use_rslora": lora.use_rslora}))
    return tensors


def write_merged(path: Path, model: Path, lora: LoraConfig, adapter: Mapping[str, torch.Tensor]) -> None:
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] += (lora.scale * b.double() @ a.double()).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapters' directories, and under ``merged`` the model with each."""
    directory = tmp_path_factory.mktemp("adapters")
    (directory / "merged").mkdir()
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        tensors = write_adapter(directory / name, model, lora, seed)
        write_merged(directory / "merged" / name, model, lora, tensors)
    return {name: directory / name for name in (*ADAPTERS, "merged")}


@pytest.fixture
def service(model: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> services.Service:
    service = service_of(model, monkeypatch)
    spec = read_spec(model)
    settings = {name: read_adapter(spec, str(paths[name]), name) for name in ADAPTERS}
    service.adapters = ServedAdapters(service.engine.generator.decoder, settings)
    return service


def answers_of(service: services.Service, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests that come together."""
    replies = [arrive(service, number, prompt=PROMPT, logprobs=0, **body) for number, body in enumerate(bodies)]
    service.turn()
    turn_until_idle(service)
    answers = []
    for reply in replies:
        part = reply.get_nowait()
        assert part is not None and part[0] == 200, part
        answers.append(part[1])
    return answers


BODIES: list[dict[str, Any]] = [{"max_tokens": 12}, {"max_tokens": 0, "echo": True}, {"max_tokens": 3, "echo": True}]


def test_each_request_has_its_adapter(
    service: services.Service, model: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come together, in an order that needs another adapter each time; also prompts that are only scored."""
    names = ["small", *ADAPTERS, "small", *ADAPTERS]
    bodies = [{"model": name, **body} for body in BODIES for name in names]
    answers = answers_of(service, bodies)
    assert [answer["model"] for answer in answers] == [body["model"] for body in bodies]
    sources = {"small": model} | {name: paths["merged"] / name for name in ADAPTERS}
    expected = {name: answers_of(service_of(path, monkeypatch), BODIES) for name, path in sources.items()}
    texts = set()
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        reference = expected[body["model"]][number // len(names)]["choices"][0]
        choice = answer["choices"][0]
        assert choice["text"] == reference["text"]
        texts.add((number // len(names), choice["text"]))
        values = [torch.tensor(each["logprobs"]["token_logprobs"][-3:]) for each in (choice, reference)]
        if body["model"] == "small":
            assert values[0].equal(values[1])  # bit for bit: what was added is gone, not taken off
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    assert len(texts) == 3 + 1 + 3  # a prompt that is only scored has one text


def test_a_server_on_two_ranks_has_adapters(model: Path, paths: dict[str, Path]) -> None:
    settings = [f"adapters.{name}={paths[name]}" for name in ADAPTERS]
    with program(model, "served_model_name=small", *settings) as address:
        models = ask(address, "/models")[1]["data"]
        assert [(each["id"], each.get("parent")) for each in models] == [("small", None), ("poet", "small"), ("clerk", "small")]
        assert ask(address, "/models/clerk")[1] == models[2]
        message = "the model 'baker' is not here; there is small, poet, clerk"
        assert ask(address, "/models/baker")[1]["message"] == message
        assert ask(address, "/completions", {"prompt": "a", "model": "baker"})[1]["message"] == message
        ids = [ord(character) - 29 for character in PROMPT]
        for name in ("poet", "clerk", "small"):
            path = model if name == "small" else paths["merged"] / name
            body = {
                "model": name,
                "prompt": ids,
                "temperature": 0,
                "max_tokens": 12,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            status, answer = ask(address, "/completions", body)
            assert status == 200 and answer["model"] == name
            assert answer["choices"][0]["token_ids"] == transformers_greedy(str(path), [ids], 12, eos_token_id=-1)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["adapters.poet=NOWHERE"], "NOWHERE/adapter_config.json"),
        (["adapters.small=NOWHERE", "served_model_name=small"], "adapters.small: the model has this name"),
    ],
)
def test_adapters_that_cannot_be_are_refused(model: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        serve.prepare(None, [f"model.path={model}", *settings], Launch(size=1))
    assert "\n" not in str(refusal.value)
