"""Greedy tokens are transformers' for every family, in every layout, page size, pool of 5% of the need, and in tiny chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import alone, load
from ranks import run_ranks
from small_models import CONFIGS, make_model

from rlhf_spmd.generation import GenerationConfig, GenerationStats, Generator, Request, SamplingConfig
from rlhf_spmd.models.spec import read_eos_ids
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

NEW_TOKENS = 5
MIN_GAP = 5e-3  # between the two largest logits, which differ from transformers' by some 1e-5: no draw lies on the edge
LENGTHS = (66, 61, 58, 70)  # longer than every window, and across the end of a page of 64
PAGES = (1, 7, 64)
MOST_UNLIKE = ("llama-tied-bias", "phi3", "gemma3", "qwen3-moe")


@dataclass(frozen=True)
class Expected:
    """``greedy[prompt]``: the tokens that transformers adds."""

    path: str
    greedy: dict[tuple[int, ...], list[int]]

    def requests(self) -> list[Request]:
        """Two rows of each prompt, of different limits."""
        prompts = list(self.greedy)
        return [Request(2 * i + j, i, p, NEW_TOKENS - 2 * j) for i, p in enumerate(prompts) for j in range(2)]

    def config(self, page_size: int, tight: bool) -> GenerationConfig:
        """``tight``: pages for a twentieth of what all rows need, which holds one of the longest and little else."""
        needs = [-(-(len(r.prompt_ids) + r.max_new_tokens - 1) // page_size) for r in self.requests()]
        pages = sum(needs) // 20
        assert pages >= max(needs)
        return GenerationConfig(
            page_size=page_size, num_pages=pages if tight else None, max_num_seqs=24, max_num_batched_tokens=25
        )


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    root = tmp_path_factory.mktemp("families")
    return {name: expect(make_model(root / name, config)) for name, config in CONFIGS.items()}


def expect(path: Path) -> Expected:
    """Three prompts of each of LENGTHS and two short ones, of those whose draws are far from ties."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(17)
    greedy: dict[tuple[int, ...], list[int]] = {}
    for length in (*LENGTHS, 1, 3):
        ids = torch.randint(3, model.config.vocab_size, (8, length), generator=generator)
        options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **options)
        best = torch.stack(found.logits).topk(2).values
        clear = ((best[..., 0] - best[..., 1]).amin(0) > MIN_GAP).nonzero()[: 3 if length > 3 else 1, 0]
        for prompt, new in zip(ids[clear].tolist(), found.sequences[clear, length:].tolist(), strict=True):
            greedy[tuple(prompt)] = new[: new.index(2) + 1] if 2 in new else new
    assert len(greedy) == 3 * len(LENGTHS) + 2, f"{path.name}: too many near-ties"
    return Expected(str(path), greedy)


def generate(world: World | None, layout: Layout, cases: list[tuple[Expected, GenerationConfig]]) -> list[GenerationStats]:
    """Checks the tokens of each case on this rank."""
    mesh = alone()[1] if world is None else build_mesh(world, list(range(world.size)), layout)
    found = []
    for expected, config in cases:
        generator = Generator(load(expected.path, mesh), mesh, config, read_eos_ids(expected.path))
        requests = expected.requests()
        completions = generator.generate(requests, SamplingConfig(temperature=0.0), 0, 0)
        for request, completion in zip(requests, completions, strict=True):
            wanted = expected.greedy[tuple(request.prompt_ids)][: request.max_new_tokens]
            assert completion.token_ids == wanted, f"{Path(expected.path).name}, {layout}, {config}: row {request.row_id}"
        found.append(generator.stats)
    return found


@pytest.mark.parametrize("page_size", PAGES)
def test_every_family_with_a_pool_of_a_twentieth_in_tiny_chunks(families: dict[str, Expected], page_size: int) -> None:
    stats = generate(None, Layout(), [(one, one.config(page_size, tight=True)) for one in families.values()])
    assert all(one.preemptions > 0 for one in stats), [one.preemptions for one in stats]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2)], ids=str)
def test_every_family_in_every_layout(families: dict[str, Expected], layout: Layout) -> None:
    """The page sizes take turns; a tight pool has room for one lane only, so two stages without tp get two lanes once more. Stages
    of slices: the families whose layers differ most."""
    chosen = [families[name] for name in (MOST_UNLIKE if layout.size == 4 else families)]
    cases = [(one, one.config(PAGES[i % 3], tight=True)) for i, one in enumerate(chosen)]
    if layout == Layout(pp=2):
        cases += [(one, one.config(PAGES[(i + 1) % 3], tight=False)) for i, one in enumerate(chosen)]
    for stats in run_ranks(layout.size, generate, layout, cases):
        assert all(one.preemptions > 0 for one in stats[: len(chosen)]), [one.preemptions for one in stats]
        assert all(one.lanes == layout.pp for one in stats[len(chosen) :])
