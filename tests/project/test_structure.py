"""The rules of the house that a program can check: floors, where collectives live, sizes."""

from __future__ import annotations

import ast
import importlib.util
from graphlib import TopologicalSorter

from places import ROOT

SOURCE = ROOT / "src" / "rlhf_spmd"
FLOORS = {
    "config": 0,
    **dict.fromkeys(("telemetry", "objectives", "rewards", "environments", "kernels"), 1),
    **dict.fromkeys(("parallel", "data"), 2),
    **dict.fromkeys(("models", "process", "agents"), 3),
    **dict.fromkeys(("controller", "reshard", "generation", "checkpoint"), 4),
    **dict.fromkeys(("workers", "planner"), 5),
    "algorithms": 6,
    **dict.fromkeys(("training", "inference"), 7),
    "preflight": 8,
}
TOP = 9  # modules of the root package: the programs
# ``process/`` uses torch's store and knows whether there is a process group; it communicates nothing else.
COLLECTIVES = ("parallel/", "process/", "controller/transport.py", "reshard/hybrid.py")


# Parsed before any test runs: behind many other tests in one process CPython 3.11 raised SystemError here (recursion depth mismatch).
MODULES = [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


def imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_a_module_imports_only_from_lower_floors_or_its_own_package() -> None:
    wrong = []
    for file, tree in MODULES:
        package = file.split("/")[0] if "/" in file else ""
        floor = FLOORS[package] if package else TOP
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "rlhf_spmd" or len(parts) < 2:
                continue
            other = parts[1] if parts[1] in FLOORS else ""
            if not other and package:
                wrong.append(f"{file} (F{floor}) imports the program {name}")
            elif other and other != package and FLOORS[other] >= floor:
                wrong.append(f"{file} (F{floor}) imports {name} (F{FLOORS[other]})")
    assert not wrong, "\n".join(sorted(set(wrong)))


# circles of files that are still to be cut; a name that is gone from here must not come back
CIRCLES = ({"notebook", "train"},)
SAME_NAMES = {"Config"}  # of classes that several files still have


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules that it imports, also inside functions and for types only. Names lead through a package's
    ``__init__`` to the module that defines them."""
    trees = {file.removesuffix(".py").replace("/", "."): tree for file, tree in MODULES}
    packages = {name.removesuffix(".__init__"): tree for name, tree in trees.items() if name.endswith("__init__")}

    def origins(tree: ast.Module) -> list[tuple[str, str]]:
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        return [(str(node.module).removeprefix("rlhf_spmd").lstrip("."), alias.name) for node in nodes for alias in node.names]

    exported = {package: {name: module for module, name in origins(tree)} for package, tree in packages.items()}

    def defining(module: str, name: str) -> str:
        inside = f"{module}.{name}".lstrip(".")
        return inside if inside in trees else exported.get(module, {}).get(name, module)

    files = {name: tree for name, tree in trees.items() if not name.endswith("__init__")}
    return {name: {defining(*pair) for pair in origins(tree)} & trees.keys() - {name} for name, tree in files.items()}


def test_files_do_not_import_each_other_in_circles() -> None:
    """Raises CycleError, which names the files."""
    graph = import_graph()
    for circle in CIRCLES:
        for module in circle:
            graph[module] -= circle
    TopologicalSorter(graph).prepare()


def test_a_class_name_is_used_once() -> None:
    places: dict[str, set[str]] = {}
    for file, tree in MODULES:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(file)
    twice = {name: sorted(files) for name, files in places.items() if len(files) > 1 and name not in SAME_NAMES}
    assert not twice, twice


def test_torch_distributed_is_imported_in_few_places() -> None:
    files = {file for file, tree in MODULES if any(name.startswith("torch.distributed") for name in imports(tree))}
    assert {file for file in files if not file.startswith(COLLECTIVES)} == set()


def test_files_and_functions_are_short() -> None:
    long_files, functions = [], []
    for file, tree in MODULES:
        text = (SOURCE / file).read_text()
        if text.count("\n") > (150 if file.startswith("algorithms/") and "\ndef step(" in text else 600):
            long_files.append(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or 0) - node.lineno + 1, f"{file}:{node.lineno} {node.name}"))
    print("longest functions:", *sorted(functions, reverse=True)[:10], sep="\n  ")
    assert not long_files
    assert [where for length, where in functions if length > 80] == []


def test_no_pickle_and_no_remote_code() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        for forbidden in (
            "import pickle",
            "torch.load(",
            "trust_remote_code=True",
            "broadcast_object_list",
            "all_gather_object",
        ):
            assert forbidden not in text, f"{path.name} has {forbidden}"


def test_long_files_run_where_their_subjects_have_changed() -> None:
    """The part of CI that is not the short tier: what a test file and its helpers import, and what the script's table adds."""
    spec = importlib.util.spec_from_file_location("changed_tests", ROOT / "scripts" / "changed_tests.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    bench, versions = (ROOT / "tests" / name for name in ("project/test_bench.py", "training/test_ahead.py"))
    assert {"tests/project/test_bench.py", "scripts/bench/*"} <= script.subjects_of(bench)
    assert "src/rlhf_spmd/controller/versions.py" in script.subjects_of(versions)
    seconds = {"tests/project/test_bench.py": 300.0, "tests/training/test_ahead.py": 30.0}
    assert script.choose({"scripts/bench/data.py"}, [bench, versions], seconds, 600.0) == ([bench], [])
    assert script.choose({"docs/faq.md"}, [bench, versions], seconds, 600.0) == ([], [])
    assert script.choose(None, [bench, versions], seconds, 100.0) == ([versions], [bench]), "no time for one of them"
    assert script.changed_paths("no such commit") is None
    if (ROOT / ".git").exists():  # not in a copy of the sources
        assert script.changed_paths("HEAD") == set()
