"""Every model family in every kind of layout against transformers: log-probs, gradients, greedy tokens and exports.

    export PYTHONPATH=tests:tests/helpers
    python scripts/results/families.py
    python scripts/results/families.py --only olmo2 gpt-oss --json families.json

Takes about fifteen minutes on two cores. The models are the tiny ones of ``tests/helpers/small_models.py``, one per family or feature;
experts are in parallel where there are any. ``score``: the largest difference of a log-prob in float64; ``score32``: in float32.
``gradient``: the largest difference of a gradient in float64, as a share of the largest. ``generate``: rows of greedy tokens in
float32 that differ, of 7. ``export``: tensors of the exported directory that differ in a bit. A layout that a family refuses has its
reason.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import ranks
from checkpoints import save_checkpoint
from double_transformers import double_model, whole_gradients, wide
from engine_runs import boxes_of, log_probs_at
from generators import SMALL, ragged_requests, transformers_greedy
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.generation import Generator, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.stored import read_eos_ids, read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.train_engine import MicroBatch, TrainEngine
from small_models import CONFIGS, LENGTHS, make_batch, make_model

VOCABULARY = 301
LAYOUTS = {
    "1 rank": Layout(),
    "tp2": Layout(tp=2),
    "tp2 sequence parallel": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "dp2 zero3": Layout(dp=2, zero=3),
    "cp2": Layout(cp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep2 zero3": Layout(dp=2, zero=3, ep=2),
}
COLUMNS = ("score", "score32", "gradient", "generate", "export")
Row = dict[str, Any]


def batch() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sequences, the token whose log-prob counts after each of theirs, and its weight in the loss. Token 0 is padding, which has no
    gradient in transformers."""
    ids, labels = make_batch(VOCABULARY)
    weights = torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    first, second, third = (part.split(LENGTHS) for part in (ids.clamp(min=1), labels, weights))
    return list(first), list(second), list(third)


def reference(path: Path) -> tuple[dict[torch.dtype, list[Tensor]], dict[str, Tensor]]:
    """transformers' log-probs by dtype, and the gradients in float64 by the names on disk."""
    rows, labels, weights = batch()

    def log_probs(model: Any) -> list[Tensor]:
        logits = (model(row[None]).logits[0].log_softmax(-1) for row in rows)
        return [part.gather(1, of[:, None])[:, 0] for part, of in zip(logits, labels, strict=True)]

    model = double_model(path)
    with wide():
        exact = log_probs(model)
        torch.cat([part * weight for part, weight in zip(exact, weights, strict=True)]).sum().backward()
        gradients = whole_gradients(model)
    with torch.no_grad():
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        rounded = log_probs(transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval())
    return {torch.float64: [part.detach() for part in exact], torch.float32: rounded}, gradients


def measure_on_rank(world: Any, path: str, layout: Layout, out: str) -> Row:
    """What this rank has: log-probs by dtype, boxes of gradients, greedy tokens by row. Rank 0's checkpoint is exported to ``out``."""
    mesh, spec = build_mesh(world, range(layout.size), layout), read_spec(path)
    parts = batch()
    mine = [part[mesh.dp_rank :: layout.dp] for part in parts]
    tokens, labels, weights = (torch.cat(part) for part in mine)
    packed = [MicroBatch(tokens, torch.tensor([len(row) for row in mine[0]]))]

    def score(decoder: Decoder, hidden: Tensor, _: MicroBatch) -> Tensor:
        return log_probs_at(decoder, hidden, torch.arange(len(tokens)), labels)

    found: Row = {"scores": {}}
    for dtype in (torch.float32, torch.float64):
        engine = TrainEngine(spec, path, "lm", mesh, OptimConfig(), dtype=dtype, device=torch.device("cpu"))
        (scored,) = engine.forward(packed, score)
        found["scores"][dtype] = scored
    engine.forward_backward(packed, lambda *given: ((score(*given) * weights).sum(), {}))
    found["gradients"] = boxes_of(engine, engine._summed_gradients())
    saved = {"actor": RoleState(engine.param_shards(), engine.local_tensors())}
    checkpoint = save_checkpoint(Path(f"{out}.run"), 1, saved, {}, mesh.pool)
    if world.rank == 0:
        export_hugging_face(checkpoint, "actor", Path(path), Path(out))
    generation = Layout(layout.pp, layout.tp, layout.copies)
    mesh = build_mesh(world, range(layout.size), generation)
    decoder = Decoder(spec, "lm", mesh.pp_rank, generation.pp, mesh.tp, torch.float32, "cpu")
    load_pretrained(decoder, path)
    generator = Generator(decoder, mesh, SMALL, read_eos_ids(path))
    requests = [row for row in ragged_requests(samples=1) if row.group_id % generation.dp == mesh.dp_rank]
    completions = generator.generate(requests, SamplingConfig(temperature=0.0), 0, 0)
    return {**found, "greedy": {one.row_id: one.token_ids for one in completions}, "dp_rank": layout.coordinate(world.rank).dp}


def compare(found: Sequence[Row], layout: Layout, want: Any, gradients: dict[str, Tensor], greedy: list[list[int]]) -> Row:
    """The columns but ``export``."""
    off = {torch.float64: 0.0, torch.float32: 0.0}
    for rank in found:
        for dtype, scored in rank["scores"].items():
            if scored is not None:
                theirs = torch.cat(want[dtype][rank["dp_rank"] :: layout.dp])
                off[dtype] = max(off[dtype], float((scored - theirs).abs().max()))
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    worst, seen = 0.0, {name: torch.zeros(grad.shape, dtype=torch.bool) for name, grad in gradients.items()}
    for rank in found:
        for name, _, slices, grad in rank["gradients"]:
            if name in gradients:
                worst = max(worst, float((grad - gradients[name][slices]).abs().max()) / scale)
                seen[name][slices] = True
    assert all(covered.all() for covered in seen.values()), [name for name, covered in seen.items() if not covered.all()]
    tokens = {row: ids for rank in found for row, ids in rank["greedy"].items()}
    wrong = sum(tokens[row] != theirs for row, theirs in enumerate(greedy))
    return {"score": off[torch.float64], "score32": off[torch.float32], "gradient": worst, "generate": wrong}


def differing(source: Path, exported: Path) -> int:
    """Tensors of one directory that are not those of the other, to the bit."""
    written, again = (load_file(path / "model.safetensors") for path in (source, exported))
    return sum(name not in again or not torch.equal(tensor, again[name]) for name, tensor in written.items()) + len(
        again.keys() - written.keys()
    )


def measure(name: str, directory: Path) -> list[Row]:
    """The rows of a family, one per layout."""
    import families  # by its name, which ranks can import

    config = copy.deepcopy({**CONFIGS[name], "vocab_size": VOCABULARY})
    path = make_model(directory / name, config)
    want, gradients = reference(path)
    greedy = transformers_greedy(str(path), [list(row.prompt_ids) for row in ragged_requests(samples=1)], 30)
    rows, spec = [], read_spec(path)
    for kind, layout in LAYOUTS.items():
        if layout.ep > 1 and spec.experts is None:
            continue
        row: Row = {"family": name, "layout": kind}
        out = directory / f"{name}.{kind.replace(' ', '_')}"
        try:
            check_layout(spec, "layout", tp=layout.tp, cp=layout.cp, ep=layout.ep)
            found = ranks.run_ranks(layout.size, families.measure_on_rank, str(path), layout, str(out))
        except ValueError as error:
            row["refused"] = str(error)
        except AssertionError as error:
            row["failed"] = str(error).strip().splitlines()[-1]
        else:
            row |= {**compare(found, layout, want, gradients, greedy), "export": differing(path, out)}
        rows.append(row)
        print(line(row), flush=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(f"{out}.run", ignore_errors=True)
    return rows


def line(row: Row) -> str:
    values = [f"{row[key]:.1e}" if isinstance(row.get(key), float) else str(row.get(key, "")) for key in COLUMNS]
    return (
        f"{row['family']:<18}{row['layout']:<24}"
        + "".join(f"{value:>10}" for value in values)
        + row.get("refused", row.get("failed", ""))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="NAME", help="these models")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"{'family':<18}{'layout':<24}" + "".join(f"{column:>10}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as directory:
        rows = [row for name in args.only for row in measure(name, Path(directory))]
    if args.json:
        lines = [
            json.dumps([row.get(key, "refused" if "refused" in row else "failed") for key in ("family", "layout", *COLUMNS)])
            for row in rows
        ]
        args.json.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    missing = [row for row in rows if "failed" in row]
    if missing:
        sys.exit(f"{len(missing)} failed: " + ", ".join(f"{row['family']} {row['layout']}" for row in missing))


if __name__ == "__main__":
    main()
