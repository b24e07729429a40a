"""Draw breaks of the source with cosmic-ray, as a list for mutations.py.

pip install cosmic-ray && python scripts/results/draw_mutations.py --each 8 --seed 40

Prints JSON: by package of src/rlhf_spmd, ``--each`` breaks in the order in which they were drawn. A file is drawn by its length, then
an operator of cosmic-ray, then a place for it. Annotations and Triton's kernels are left out. mutations.json has the first break of
each package that neither fails at once wherever the line is run, nor leaves all values as they are.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
from collections import defaultdict
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SOURCE = Path(__file__).resolve().parent.parent.parent / "src" / "rlhf_spmd"
LEFT_OUT = ("Variable", "RemoveDecorator", "ExceptionReplacer")  # operators that need arguments or change no value
Span = tuple[tuple[int, int], tuple[int, int]]


def typed_spans(code: str) -> list[Span]:
    """Return where annotations and checks of types are, whose operators compute nothing."""
    nodes: list[ast.expr] = []
    for node in ast.walk(ast.parse(code)):
        nodes += filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "cast"):
            nodes.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in nodes]


def draw(path: Path, names: list[str], rng: random.Random) -> dict[str, str] | None:
    """Return one break of a file; None if the drawn operator has no place there."""
    code, name = path.read_text(), rng.choice(names)
    operator = get_operator(name)()
    positions = [position for node in ast_nodes(get_ast(code)) for position in operator.mutation_positions(node)]
    if not positions:
        return None
    number = rng.randrange(len(positions))
    start, end = (tuple(place) for place in positions[number])
    if any(first <= start and end <= last for first, last in typed_spans(code)):
        return None
    broken = mutate_code(code, operator, number)
    try:
        ast.parse(broken or "")
    except SyntaxError:
        return None
    if broken in (None, code):
        return None
    before, after = code.splitlines(True), broken.splitlines(True)
    changes = [
        change for change in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if change[0] != "equal"
    ]
    first = changes[0][1]
    old, new = "".join(before[first : changes[-1][2]]), "".join(after[changes[0][3] : changes[-1][4]])
    while code.count(old) > 1:
        first -= 1
        old, new = before[first] + old, before[first] + new
    return {"name": f"{path.relative_to(SOURCE)}: {name.rpartition('/')[2]}, line {start[0]}", "old": old, "new": new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--seed", type=int, default=40)
    arguments = parser.parse_args()
    packages = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if not path.name.startswith("triton"):
            packages[path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "programs"].append(path)
    names = [name for name in operator_names() if not any(word in name for word in LEFT_OUT)]
    rng = random.Random(arguments.seed)
    drawn: dict[str, list[dict[str, str]]] = {}
    for package, files in packages.items():
        lengths = [path.stat().st_size for path in files]
        drawn[package] = []
        while len(drawn[package]) < arguments.each:
            path = rng.choices(files, lengths)[0]
            mutation = draw(path, names, rng)
            if mutation is not None:
                drawn[package].append({**mutation, "file": str(path.relative_to(SOURCE))})
    print(json.dumps(drawn, indent=1))


if __name__ == "__main__":
    main()
