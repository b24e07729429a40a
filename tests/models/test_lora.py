"""Low-rank adapters: PEFT's log-probs and gradients on the same weights, in every family; which part of them a rank holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoints import save_checkpoint
from rlhf_spmd.checkpoint.adapters import STATE, SavedAdapters, find_adapters
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.kernels import Ops, choose_ops
from rlhf_spmd.models.adapters import merge
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.lora import ALL_LINEAR, AdapterPart, LoraConfig, check_peft_config, is_adapter, with_stored_settings
from rlhf_spmd.models.quantized import BLOCK, rounded
from rlhf_spmd.models.sharding import check_lora, plan_params
from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_spec
from rlhf_spmd.models.weights import ADAPTER_FILE, check_adapter, check_pretrained, init_adapters, load_pretrained
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS, LENGTHS, SHORT_FAMILIES, make_batch, make_model
from tiers import tiers

FAMILIES = {
    "llama": LoraConfig(rank=3, alpha=5.0),
    "llama-tied-bias": LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj", "v_proj", "down_proj"]),
    "qwen3-tied": LoraConfig(rank=4, alpha=6.0, use_rslora=True),
    "phi3": LoraConfig(rank=4),
    "gemma2": LoraConfig(rank=2, target_modules=["o_proj", "up_proj"]),
    "qwen3-moe": LoraConfig(rank=2, target_modules=["k_proj", "o_proj"]),
    "qwen3-5": LoraConfig(rank=2, target_modules=["in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "o_proj", "up_proj"]),
    "deepseek-v3": LoraConfig(rank=2, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
}


def exact_norm(norm: nn.Module) -> Any:
    """transformers' in the dtype of its input: its own is in float32."""
    plus = float(any(family in type(norm).__name__ for family in ("Gemma", "Qwen3_5")))
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return lambda x: F.rms_norm(x, (x.shape[-1],), norm.weight + plus, eps)


def exact_linear(linear: nn.Module) -> Any:
    """bitsandbytes' own product is in bfloat16 on CPUs."""
    from bitsandbytes import functional

    weight: Any = linear.weight
    values = functional.dequantize_4bit(weight.data, weight.quant_state)
    return lambda x: F.linear(x, values, linear.bias)  # type: ignore[arg-type]


def by_peft(path: Path, lora: LoraConfig, out: Path, dtype: torch.dtype, **loading: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the labels, and the gradients of A and B of their weighted sum. Writes the adapter, with B drawn, to ``out``."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    # eager attention has softcaps, and a softmax in float32
    attention = "eager" if "gemma2" in str(path) or dtype == torch.float32 else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention, **loading)
    kept = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "target_modules": lora.target_modules}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **kept), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.2).to(dtype)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm(module)  # type: ignore[method-assign]
        if type(module).__module__.startswith("bitsandbytes.nn"):
            module.forward = exact_linear(module)  # type: ignore[method-assign]
    model.save_pretrained(out)
    ids, labels = make_batch(model.config.vocab_size)
    rows = []
    for some, targets in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
        rows.append(model(some[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    log_probs = torch.cat(rows)
    (log_probs * weights_of(log_probs)).sum().backward()
    grads = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), grads


WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 128, "v_head_dim": 32}
SOME = {
    "llama": (["q_proj", "o_proj", "down_proj"], ["qkv", "out", "down"]),
    "deepseek-v3": (FAMILIES["deepseek-v3"].target_modules, ["latent.q_a", "latent.q_b", "latent.kv_a", "latent.kv_b", "out"]),
}


@pytest.mark.parametrize(
    ("family", "bits", "dropout"),
    [
        ("llama", 4, 0.5),
        ("deepseek-v3", 8, 0.0),
        pytest.param("llama", 8, 0.0, marks=pytest.mark.long),
        pytest.param("deepseek-v3", 4, 0.5, marks=pytest.mark.long),
    ],
)
def test_gradients_through_fewer_bits_are_those_of_their_values(tmp_path: Path, family: str, bits: int, dropout: float) -> None:
    """A model that has the values that the bits stand for as its weights gives the same bits of everything."""
    pytest.importorskip("bitsandbytes")
    sizes = {**WIDE, "num_key_value_heads": 4, **LATENT} if family == "deepseek-v3" else WIDE
    path = make_model(tmp_path / "model", {**CONFIGS[family], **sizes})
    targets, matrices = SOME[family]
    lora = LoraConfig(rank=4, dropout=dropout, target_modules=targets)
    narrow, wide = (build(path, replace(lora, bits=b), torch.float32) for b in (bits, None))
    assert sorted(narrow.quantized) == sorted(f"layers.{i}.{name}.weight" for i in range(4) for name in matrices)
    for name, matrix in narrow.quantized.items():
        wide.get_parameter(name).data = matrix.values()
        assert sum(buffer.nbytes for buffer in matrix.buffers()) == math.prod(matrix.shape) * (bits / 8 + 4 / 64)
    found = []
    for decoder in (narrow, wide):
        for name, param in decoder.named_parameters():
            if name.endswith("lora.b"):
                param.data = torch.linspace(-0.2, 0.2, param.numel()).view_as(param)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            log_probs = log_probs_of(decoder)
            (log_probs * weights_of(log_probs)).sum().backward()
        decoder.enable_adapters(False)
        with torch.no_grad():
            alone = log_probs_of(decoder)
        grads = [param.grad for name, param in decoder.named_parameters() if is_adapter(name)]
        found.append([log_probs.detach(), alone, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))  # type: ignore[arg-type]
    assert not torch.equal(found[0][0], found[0][1])


def weights_of(log_probs: Tensor) -> Tensor:
    return torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)


def build(path: Path, lora: LoraConfig, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), dtype, "cpu", lora=lora)
    load_pretrained(decoder, path)
    init_adapters(decoder, lora, seed=5)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return decoder


def log_probs_of(decoder: Decoder) -> Tensor:
    ids, labels = make_batch(decoder.spec.vocab_size)
    return decoder(ids, PackedAttention(LENGTHS), lambda d, hidden: token_log_probs(d, hidden, labels)[0])


def compare(decoder: Decoder, want: Tensor, grads: dict[str, Tensor], most: float) -> Tensor:
    """Checks log-probs, and each gradient relative to its largest element; returns the log-probs."""
    got = log_probs_of(decoder)
    (got * weights_of(got)).sum().backward()
    assert (got.detach() - want).abs().max() < most
    missing = set(grads)
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name), name
        for box in decoder.shards[name].boxes if parameter.grad is not None else ():
            expected = grads[box.name]
            difference = (parameter.grad[box.local_slices] - expected[box.global_slices]).abs().max()
            assert difference < most * expected.abs().max(), box.name
            missing.discard(box.name)
    assert not missing
    return got.detach()


# transformers' experts and delta rule have no float64, where only the formula can differ
CASES = [
    *((family, torch.float64, 1e-12) for family in ("llama", "llama-tied-bias", "qwen3-tied", "phi3")),
    ("gemma2", torch.float64, 2e-6),
    ("qwen3-moe", torch.float32, 1e-4),
    ("qwen3-5", torch.float32, 3e-3),
    ("deepseek-v3", torch.float32, 1e-4),
]


@pytest.mark.parametrize(("family", "dtype", "most"), CASES)
def test_log_probs_and_gradients_are_those_of_peft(tmp_path: Path, family: str, dtype: torch.dtype, most: float) -> None:
    path, lora = make_model(tmp_path / family, CONFIGS[family]), FAMILIES[family]
    want, grads = by_peft(path, lora, tmp_path / "adapter", dtype)
    decoder = build(path, replace(lora, path=str(tmp_path / "adapter")), dtype)
    got = compare(decoder, want, grads, most)
    with torch.no_grad():
        assert torch.equal(log_probs_of(decoder), got), "the pass without gradients has other bits"
        decoder.enable_adapters(False)
        assert not torch.equal(log_probs_of(decoder), got)
        base = Decoder(read_spec(path), "lm", 0, 1, solo(), dtype, "cpu")
        load_pretrained(base, path)
        assert torch.equal(log_probs_of(base), log_probs_of(decoder)), "without adapters it is not the model itself"


@pytest.mark.parametrize("family", tiers(["llama", "gemma2", "qwen3-tied", "phi3"], SHORT_FAMILIES[:3]))
def test_beside_four_bits_log_probs_and_gradients_are_those_of_peft(tmp_path: Path, family: str) -> None:
    """Whose base is bitsandbytes' Linear4bit, in NF4. A base in 32 bits is far away."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    path = make_model(tmp_path / family, {**CONFIGS[family], **WIDE})
    lora = replace(FAMILIES[family], target_modules=ALL_LINEAR)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    want, grads = by_peft(path, lora, tmp_path / "adapter", torch.float32, quantization_config=four)
    narrow, plain = (build(path, replace(lora, path=str(tmp_path / "adapter"), bits=bits), torch.float32) for bits in (4, None))
    compare(narrow, want, grads, 1e-4)
    assert (log_probs_of(plain) - want).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_merged_with_the_bits_of_the_whole_matrix(dtype: torch.dtype) -> None:
    """Devices that are not exact add products in place, with other bits."""
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((70, 48), (6, 48), (55, 3)))
    ops = choose_ops(dtype, torch.device("cpu"))
    parts = [AdapterPart(slice(0, 3), slice(0, 25), slice(0, 25)), AdapterPart(slice(3, 6), slice(25, 55), slice(40, 70))]
    whole = merge(ops, weight, a, b, parts, 0.7)
    rows = [merge(ops, weight[first:last], a, b, parts, 0.7, first) for first, last in ((0, 1), (1, 30), (30, 66), (66, 70))]
    assert torch.equal(torch.cat(rows), whole)
    want = weight.double()
    want[:25] += 0.7 * b[:25].double() @ a[:3].double()
    want[40:] += 0.7 * b[25:].double() @ a[3:].double()
    torch.testing.assert_close(whole.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(whole[25:40], weight[25:40])
    in_place = merge(Ops(), weight, a, b, parts, 0.7)
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(in_place.double(), want, **close)


ADAPTER = LoraConfig(rank=2, alpha=8.0)


def stored_adapter(
    out: Path, config: dict[str, Any], head: Tensor | None = None, model: dict[str, Any] = CONFIGS["llama"]
) -> LoraConfig:
    """Ones under PEFT's names, and a head of values beside them."""
    plan = plan_params(spec_from_config(model, "test"), "none", 0, 1, 0, 1, lora=ADAPTER)
    boxes = [box for name, shard in plan.items() if is_adapter(name) for box in shard.boxes]
    out.mkdir()
    tensors = {box.name: torch.ones(box.shape) for box in boxes}
    save_file(tensors | ({} if head is None else {"base_model.model.score.weight": head}), out / ADAPTER_FILE)
    (out / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return LoraConfig(rank=2, alpha=8.0, path=str(out))


@pytest.mark.parametrize(
    ("config", "ours", "words"),
    [
        ({"r": 4}, {}, "rank=2, but .* has r=4"),
        ({"lora_alpha": 16}, {}, "alpha=8.0, but .* has lora_alpha=16"),
        ({"use_rslora": True}, {}, "use_rslora=False, but .* has use_rslora=True"),
        ({"alpha_pattern": {"q_proj": 4}}, {}, r"has alpha_pattern=\{'q_proj': 4\}"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "has rank_pattern="),
        ({"use_dora": True}, {}, "has use_dora=True"),
        ({"fan_in_fan_out": True}, {}, "has fan_in_fan_out=True"),
        ({"bias": "all"}, {}, "has bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "loftq"}, {}, "has init_lora_weights='loftq'"),
        ({"layer_replication": [[0, 2], [1, 3]]}, {}, "has layer_replication="),
        ({"alora_invocation_tokens": [1]}, {}, "has alora_invocation_tokens="),
        ({"use_qalora": True}, {}, "has use_qalora=True"),
        ({"peft_type": "ADALORA"}, {}, "has peft_type='ADALORA'"),
        ({"of_a_later_peft": {"scale": 2}}, {}, "has of_a_later_peft="),
        ({}, {"alpha": 16.0}, "alpha=16.0, but .* has lora_alpha=8"),  # PEFT's own
        ({}, {"use_rslora": True}, "use_rslora=True, but .* has use_rslora=False"),
    ],
)
def test_what_an_adapter_may_say_of_itself(tmp_path: Path, config: dict[str, Any], ours: dict[str, Any], words: str) -> None:
    spec = spec_from_config(CONFIGS["llama"], "test")
    plain = {"alpha_pattern": {}, "use_dora": False, "bias": "none", "rank_pattern": None, "of_a_later_peft": None}
    plain |= {"init_lora_weights": "gaussian", "qalora_group_size": 16, "megatron_core": "megatron.core", "lora_dropout": 0.1}
    check_adapter(spec, stored_adapter(tmp_path / "plain", plain), "lm", "models.actor.lora")
    with pytest.raises(ValueError, match=words):
        check_adapter(spec, replace(stored_adapter(tmp_path / "adapter", config), **ours), "lm", "models.actor.lora")


def test_a_usual_adapter_of_the_installed_peft_is_taken() -> None:
    peft = pytest.importorskip("peft")
    config = {
        "base_model_name_or_path": "x",
        **peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict(),
    }
    check_peft_config({**config, "peft_type": "LORA"}, ADAPTER, "adapter_config.json", "models.actor.lora")


def test_an_adapter_beside_a_model_is_not_passed_over(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", CONFIGS["llama"])
    check_pretrained(read_spec(path), path, "lm")
    (path / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ValueError, match="adapter_config\\.json lies beside the model"):
        check_pretrained(read_spec(path), path, "lm")


@pytest.mark.parametrize("bits", [None, 4])
def test_a_reward_model_begins_with_the_head_beside_its_adapter(tmp_path: Path, bits: int | None) -> None:
    model = {**CONFIGS["llama"], **WIDE}
    path = make_model(tmp_path / "model", model)
    spec, head = read_spec(path), torch.arange(float(read_spec(path).hidden_size))[None]
    lora = replace(stored_adapter(tmp_path / "adapter", {}, head, model), bits=bits)
    with pytest.raises(ValueError, match=r"score\.weight"):
        check_adapter(spec, lora, "lm", "models.actor.lora")
    check_adapter(spec, lora, "value", "models.reward.lora")
    decoder = Decoder(spec, "value", 0, 1, solo(), torch.float32, "cpu", lora=lora)
    load_pretrained(decoder, path, missing_head_ok=True)
    before = {name: matrix.values() for name, matrix in decoder.quantized.items()}
    init_adapters(decoder, lora, seed=5)
    assert torch.equal(decoder.value_weight, head)
    assert all(torch.equal(matrix.values(), before[name]) for name, matrix in decoder.quantized.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_the_nearest(dtype: torch.dtype) -> None:
    """Of all that a byte can be in a block; also of 0 and of numbers that are no normal ones."""
    functional = pytest.importorskip("bitsandbytes").functional
    values = torch.randn(40, 2 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0], values[1, :BLOCK] = 0.0, 1e-41
    blocks = values.float().view(-1, BLOCK)
    numbers = blocks.abs().amax(1)[:, None] * functional.create_dynamic_map()
    nearest = (blocks[:, :, None] - numbers[:, None]).abs().amin(2)
    found = rounded(values.float(), 8).view(-1, BLOCK)
    torch.testing.assert_close((found - blocks).abs(), nearest, rtol=1e-6, atol=1e-6)
    assert torch.equal(rounded(values, 8), found.to(dtype).view_as(values))


def saved(path: Path, run_dir: Path) -> tuple[Decoder, SavedAdapters]:
    """A model with adapters that add something, and these from its checkpoint."""
    trained, generator = build(path, LoraConfig(rank=3, alpha=9.0), torch.float32), torch.Generator().manual_seed(0)
    values = {name: parameter.data for name, parameter in trained.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for parameter in values.values():
            parameter.normal_(std=0.02, generator=generator)
    held = {"actor": RoleState({name: trained.shards[name] for name in values}, values)}
    state = {STATE: {"actor": {"rank": 3, "alpha": 9.0}}}
    adapters = find_adapters(save_checkpoint(run_dir, 1, held, state, solo()), "actor")
    assert adapters is not None
    return trained, adapters


def test_the_adapter_of_a_language_model_of_one_that_sees(tmp_path: Path) -> None:
    """PEFT finds its matrices in transformers' whole model, and none of the vision tower; it can be begun with."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    path, out = tmp_path / "model", tmp_path / "adapter"
    text = {key: value for key, value in CONFIGS["gemma3"].items() if key not in ("architectures", "model_type")}
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    ids = dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), text["vocab_size"] - 1)
    config = Gemma3Config(text_config=text, vision_config={**eyes, "patch_size": 14}, mm_tokens_per_image=4, **ids)
    Gemma3ForConditionalGeneration(config).save_pretrained(path)
    trained, adapters = saved(path, tmp_path / "run")
    adapters.write(out, path)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), out)
    found = {name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name}
    with safe_open(out / ADAPTER_FILE, framework="pt") as stored:
        assert set(found) == set(stored.keys()) and not any("vision" in name for name in found)
        assert all(torch.equal(tensor, stored.get_tensor(name)) for name, tensor in found.items())
    lora = LoraConfig(rank=3, alpha=9.0, path=str(out))
    check_adapter(read_spec(path), lora, "lm", "models.actor.lora")
    again = build(path, lora, torch.float32)
    assert all(torch.equal(x, again.get_parameter(name)) for name, x in trained.named_parameters())
    # it is added to the weights before they are rounded
    narrow, wide = (Decoder(read_spec(path), "lm", 0, 1, solo(), dtype, "cpu") for dtype in (torch.bfloat16, torch.float32))
    for decoder in (narrow, wide):
        load_pretrained(decoder, path)
        adapters.add_to(decoder.spec, RoleState(decoder.shards, dict(decoder.named_parameters())), path)
    assert all(torch.equal(x, wide.get_parameter(name).bfloat16()) for name, x in narrow.named_parameters())
    qkv = trained.layers[0].qkv
    with torch.no_grad():
        assert torch.equal(wide.layers[0].qkv.weight, qkv.lora.merged(qkv.weight, qkv.lora.a, qkv.lora.b))


def test_dropout_is_drawn_again_where_layers_are_computed_again(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", CONFIGS["llama"])
    found = []
    for checkpointing in ("none", "selective", "full"):
        decoder = build(path, LoraConfig(rank=4, dropout=0.5), torch.float64)
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora.b"):
                nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
        decoder.keep_activations(checkpointing)
        torch.manual_seed(7)
        log_probs = log_probs_of(decoder)
        log_probs.sum().backward()
        found.append([log_probs.detach()] + [p.grad for p in decoder.parameters() if p.grad is not None])
        with torch.no_grad():
            assert not torch.allclose(log_probs_of(decoder), log_probs), "dropout does nothing"
    for other in found[1:]:
        assert all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(other, found[0], strict=True))


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ({}, {"r": 4, "lora_alpha": 32}, {"rank": 4, "alpha": 32}),
        ({}, {"r": 4}, {"rank": 4, "alpha": 8}),  # PEFT's default
        ({}, {"r": 2, "use_rslora": True, "target_modules": ["v_proj", "q_proj"]}, {"rank": 2, "alpha": 8, "use_rslora": True}),
        (
            {"alpha": 3.0, "dropout": 0.1},
            {"r": 4, "lora_alpha": 32},
            {"rank": 4, "alpha": 3.0, "dropout": 0.1},
        ),  # refused later
    ],
)
def test_an_adapters_rank_is_its_files(given: dict[str, Any], stored: dict[str, Any], expected: dict[str, Any]) -> None:
    modules = {"target_modules": sorted(stored["target_modules"])} if "target_modules" in stored else {}
    found = with_stored_settings(LoraConfig(path="x", **given), stored, "x/adapter_config.json")
    assert found == LoraConfig(path="x", **expected, **modules)


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        (
            "llama",
            {"rank": 1, "target_modules": ["q_proj", "w1"]},
            "no matrix 'w1'; its layers have down_proj, gate_proj, k_proj",
        ),
        ("qwen3-moe", {"rank": 1, "target_modules": ["gate_proj"]}, "some layers have none of these"),
        ("llama", {"rank": 4, "dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        ("llama", {"rank": -1}, "rank=-1: must be at least 0"),
    ],
)
def test_settings_that_are_refused(family: str, lora: dict[str, Any], words: str) -> None:
    def check() -> None:
        check_section(LoraConfig(**lora), "models.actor.lora")
        check_lora(spec_from_config(CONFIGS[family], "test"), LoraConfig(**lora), "models.actor.lora")

    with pytest.raises(ValueError, match=words):
        check()
