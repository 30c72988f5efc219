"""The house stands: imports point down, heavy libraries stay in their rooms, box files run on Python 3.8."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.release import AGENT_MODULES

ROOT = Path(__file__).parents[1]
FLOORS = {"corpus_builder": set(), "trainer": {"corpus_builder"}, "controller": {"trainer", "corpus_builder"}}
#: `*`: upper floors import only these from below.
CONTRACTS = {
    "corpus_builder": {
        "errors", "log_lines", "say", "sample", "config", "plan", "suite", "manifest", "frame", "mask", "archive",
        "archive_limits", "fast_tokens", "text_ids", "token_bytes",
    },
    "trainer": {
        "recipe", "run_paths", "run_state", "progress", "remedies", "locks", "base_model", "build_locks", "children",
        "journal", "gpus", "curve", "on_end",
        "tiny_model",
    },
}  # fmt: skip
#: Third-party and heavy modules -> the only files that import them.
ONLY_IN = {
    "paramiko": {f"controller/{name}.py" for name in ("box", "link", "host_keys", "private_keys", "ssh_config", "way")},
    "boto3": {"controller/objects.py", "controller/demo_storage.py"},
    "qcloud_cos": {"controller/objects.py"},
    "click": {"controller/cli.py"},
}
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "peft", "accelerate", "paramiko", "click"}
#: `†`: files that also run on the box with the system's Python.
ON_THE_BOX = tuple(f"{name.replace('.', '/')}.py" for name in AGENT_MODULES)


def sources() -> list[Path]:
    found = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    assert len(found) >= 20
    return found


def imported(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down():
    breaches = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imported(path)
        if (room := name.split(".")[0]) in FLOORS
        and room not in FLOORS[path.relative_to(ROOT).parts[0]] | {path.relative_to(ROOT).parts[0]}
    ]
    assert breaches == []


def test_upper_floors_import_only_contracts():
    breaches = []
    for path in sources():
        floor = path.relative_to(ROOT).parts[0]
        for name in imported(path):
            room, _, rest = name.partition(".")
            if room in CONTRACTS and room != floor and rest and rest.split(".")[0] not in CONTRACTS[room]:
                breaches.append(f"{path.relative_to(ROOT)} imports {name}")
    assert breaches == []


def test_contract_modules_import_nothing_heavy():
    files = [ROOT / floor / f"{name}.py" for floor, names in CONTRACTS.items() for name in sorted(names)]
    breaches = [
        f"{path.name} imports {name}" for path in files for name in imported(path) if name.split(".")[0] in HEAVY
    ]
    assert breaches == []


def test_libraries_stay_in_their_rooms():
    breaches = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imported(path)
        if (library := name.split(".")[0]) in ONLY_IN and str(path.relative_to(ROOT)) not in ONLY_IN[library]
    ]
    assert breaches == []


def box_files() -> list[Path]:
    agent = sorted((ROOT / "controller/boxside").glob("*.py"))
    return [*(ROOT / name for name in ON_THE_BOX), *agent]


@pytest.mark.parametrize("path", box_files(), ids=lambda path: path.stem)
def test_box_files_are_python_3_8_and_standard_library(path):
    import sys

    ast.parse(path.read_text("utf-8"), feature_version=(3, 8))
    for name in imported(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top in FLOORS, f"{path.name} imports {name}"
        if top in FLOORS and top != "controller":
            assert any(name.replace(".", "/").startswith(known[:-3]) for known in ON_THE_BOX), (
                f"{path.name} imports {name}"
            )
        if top == "controller":
            assert name.startswith("controller.boxside"), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", box_files(), ids=lambda path: path.stem)
def test_box_files_use_no_syntax_of_later_versions(path):
    """`feature_version` lets some 3.9+ constructs pass: builtin generics and `X | None` in annotations."""
    tree = ast.parse(path.read_text("utf-8"))
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body), (
        "annotations must be evaluated, so that a later construct fails here and not on the box"
    )
    generics = {"list", "dict", "tuple", "set", "frozenset"}
    late = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in generics)
        or (isinstance(node, ast.Attribute) and node.attr in {"removeprefix", "removesuffix"})
        or (isinstance(node, ast.keyword) and node.arg in {"slots", "kw_only"})
    ]
    assert late == []
