"""The environment as a setup proves it: two real steps, a receipt, what a person's own lacks; nothing half done."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from controller.boxside import smoke
from controller.boxside.environment import find_overlay, note_candidate, overlay_link, read_candidate
from controller.boxside.setup_plan import SetupPlan
from controller.boxside.train_plan import train_environment
from tests.mother_venv import make_mother, write_lock
from tests.smoke_receipt import PYTHON, ROOT, place_receipt, recipe_json, run_steps, steps_environment
from trainer.gpus import Gpus
from trainer.remedies import find_remedy

pytestmark = pytest.mark.e2e
KEYS = {"gpus": 2, "device": "cpu", "deepspeed": "zero3_offload"}


def request_of(root: Path, python: str = PYTHON, code: Path = ROOT, lock: str = "cpu", **recipe: object) -> dict:
    """Return the requests of the steps that make, build and prove an environment."""
    common = {"root": str(root), "code": str(code), "python": python}
    return {
        "environment": {**common, "lock": lock},
        "kernels": {"root": str(root), "python": python},
        "smoke": {**common, "recipe": recipe_json(**{**KEYS, **recipe})},
    }


def tree(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return every path below a folder: its time of change, and what it holds or where it leads."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (path.lstat().st_mtime_ns, content)
    return found


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


def current(root: Path) -> dict | None:
    path = root / "venvs/current.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_two_steps_leave_a_receipt_that_spares_the_next_setup_and_nothing_else(root):
    place_receipt(root, **KEYS)  # made by the same two steps; here it is read
    (receipt,) = (root / "venvs").glob("smoke-*.json")
    made = json.loads(receipt.read_text())
    assert len(made["losses"]) == 2
    assert abs(made["losses"][0] - 5.556) < 0.1  # log(259): a random model over 259 tokens knows nothing
    assert made["proves"]["ranks"] == 2
    before = tree(root)
    requests = request_of(root)
    del requests["kernels"]
    said = run_steps(root, requests)
    assert "two steps of a tiny model trained here before" in said["smoke"]
    assert current(root)["python"] == PYTHON
    added = set(tree(root)) - set(before)
    assert added == {"venvs/candidate.json", "venvs/current.json"}


@pytest.mark.parametrize(
    "change",
    [{"deepspeed": "zero2_offload"}, {"precision": "fp32"}, {"lora": {"r": 4}}, {"gpus": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_is_of_one_preset_precision_method_and_number_of_ranks(root, change):
    place_receipt(root, **KEYS)
    (receipt,) = (root / "venvs").glob("smoke-*.json")
    proves = json.loads(receipt.read_text())["proves"]
    candidate = {"python": PYTHON, "packages": proves["packages"], "versions": proves["versions"], "overlay": None}

    def path_of(**keys):
        recipe = recipe_json(**keys)
        place = smoke.choose_place(recipe, Gpus(False, None))
        return smoke.receipt_path(str(root), smoke._proves(candidate, recipe, place, str(ROOT)))

    assert path_of(**KEYS) == str(receipt)
    assert path_of(**{**KEYS, **change}) != str(receipt)


# --- what a person's own environment lacks

LACKS = ("pydantic", "pydantic-core", "PyYAML", "charset-normalizer")
LOCKED = (*LACKS, "annotated-types", "typing-extensions", "typing-inspection", "numpy")


@pytest.fixture(scope="module")
def mother(tmp_path_factory):
    return make_mother(tmp_path_factory.mktemp("mother") / "venv", without=LACKS)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    write_lock(folder / "lock.txt", folder, LOCKED)
    return folder


@pytest.fixture
def code(tmp_path, wheels):
    """Our code as a release, with a lock file that needs no network."""
    folder = tmp_path / "code"
    (folder / "configs/environments").mkdir(parents=True)
    for name in ("corpus_builder", "trainer", "controller", "configs/deepspeed"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "configs/environments/cpu.txt").write_text((wheels / "lock.txt").read_text())
    return folder


def step(name, request, tmp_path, **environ):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request))
    return subprocess.run(
        [sys.executable, "-m", "controller.boxside", "step", name, str(path)], cwd=ROOT, text=True, timeout=300,
        env=steps_environment(**environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_what_a_mother_lacks_lies_beside_it_and_a_model_trains(root, code, mother, tmp_path):
    untouched = tree(mother.parents[1])
    requests = request_of(root, str(mother), code, gpus=1, deepspeed="none")
    del requests["kernels"]
    said = run_steps(root, requests)
    assert "what it lacks: pydantic, yaml, charset_normalizer" in said["environment"]
    assert f"pydantic {metadata.version('pydantic')}" in said["environment"]
    assert "trained: 2 steps" in said["smoke"]
    noted = current(root)
    assert noted["python"] == str(mother)
    overlay = Path(noted["overlay"])
    assert overlay.parent == root / "venvs"
    assert {path.name for path in overlay.iterdir()} >= {"pydantic", "pydantic_core", "yaml", "charset_normalizer"}
    assert not (overlay / "numpy").exists()
    made = tree(overlay)
    assert make_overlay_of(root, mother, requests["environment"]) == overlay  # made once
    assert tree(overlay) == made
    assert tree(mother.parents[1]) == untouched
    plan = corpus_step(root, mother)
    assert plan["env"]["PYTHONPATH"].split(":")[-1] == overlay_link(str(root), str(mother))
    imported = [str(mother), "-c", "import corpus_builder.build, yaml; print(yaml.__file__)"]
    done = subprocess.run(imported, cwd=ROOT, env={**os.environ, **plan["env"]}, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parents[1].resolve() == overlay, done.stderr
    run = train_environment(str(mother), str(ROOT), find_overlay(str(root), str(mother)))
    assert run["PYTHONPATH"] == f"{ROOT}:{overlay}"


def corpus_step(root, python):
    """Return the corpus step of a setup with this interpreter."""
    plan = SetupPlan(
        data="/d", root=str(root), digest="0" * 8, id="s", owner="o", action="a", requests={"corpus": {}},
        pythons={"corpus": str(python)}, secrets={}, request_digest="", overlay=overlay_link(str(root), str(python)),
    )  # fmt: skip
    (found,) = plan.spec()["steps"]
    return {**found, "env": {**found["env"], "PYTHONPATH": found["env"]["PYTHONPATH"].replace(plan.code, str(ROOT))}}


@pytest.mark.parametrize("installer", ["uv", "pip", "system pip"])
def test_any_installer_fills_the_overlay(root, code, mother, installer, tmp_path):
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    tools = tmp_path / "tools"
    tools.mkdir()
    if installer == "uv":
        (tools / "uv").symlink_to(uv)
    python = mother
    if installer == "system pip":
        python = make_mother(tmp_path / "bare", without=(*LACKS, "pip"))
    untouched = tree(python.parents[1])
    assert untouched
    request = request_of(root, str(python), code)["environment"]
    overlay = make_overlay_of(root, python, request, PATH=f"{tools}:/usr/bin:/bin")
    assert (overlay / "yaml/__init__.py").exists()
    assert tree(python.parents[1]) == untouched


def make_overlay_of(root, python, request, **environ):
    """Make the overlay alone, without the minutes of importing torch."""
    script = (
        "import json, sys; from controller.boxside import overlay, setup_steps as steps;"
        "request = json.load(sys.stdin);"
        "print('OVERLAY', overlay.make_overlay(request['root'], request['python'],"
        " lambda: steps.read_lock_file(request['code'], request['lock']), steps._install_beside))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(request), cwd=ROOT, env=steps_environment(**environ),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return Path(done.stdout.splitlines()[-1].removeprefix("OVERLAY "))


def test_an_overlay_that_fails_leaves_none(root, code, mother, wheels, tmp_path):
    write_lock(code / "configs/environments/cpu.txt", wheels, LOCKED, digest="0" * 64)
    done = step("environment", request_of(root, str(mother), code)["environment"], tmp_path)
    assert done.returncode == 4
    assert '"code": "environment_failed"' in done.stdout
    assert list((root / "venvs").iterdir()) == []


def test_large_packages_are_refused_by_name(root, code, tmp_path):
    python = make_mother(tmp_path / "bare", without=("torch", "deepspeed", "PyYAML"))
    done = step("environment", request_of(root, str(python), code)["environment"], tmp_path)
    assert done.returncode == 4
    assert "environment_unusable" in done.stdout
    assert "reason.lacks: torch, deepspeed" in done.stdout
    assert not (root / "venvs").exists()


def test_whatever_is_installed_later_makes_it_another_environment(root, tmp_path):
    python = make_mother(tmp_path / "venv", without=())
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    noted = []
    for version in ("1.0", "1.0", "1.1"):
        folder = site / "quiet-0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: quiet\nVersion: {version}\n")
        note_candidate(str(root), str(python), {}, None)
        noted.append(read_candidate(str(root), str(python))["packages"])
    assert noted[0] == noted[1] != noted[2]


def test_a_mother_that_lacks_nothing_has_no_overlay(root, tmp_path):
    link = Path(overlay_link(str(root), PYTHON))
    link.parent.mkdir(mode=0o700)
    (root / "venvs/overlay-old").mkdir()
    link.symlink_to("overlay-old")
    assert str(make_overlay_of(root, PYTHON, request_of(root)["environment"])) == "None"
    assert not link.is_symlink()  # an older one is in nobody's way any more


# --- what fails


def proved(root):
    """Have this repository's environment in use, by its receipt; return the requests of its steps."""
    place_receipt(root, **KEYS)
    (receipt,) = (root / "venvs").glob("smoke-*.json")
    note_candidate(str(root), PYTHON, json.loads(receipt.read_text())["proves"]["versions"], None)
    requests = request_of(root)
    assert "trained here before" in run_steps(root, {"smoke": requests["smoke"]})["smoke"]
    return requests


def test_a_failed_installation_leaves_the_environment_in_use(root, code, wheels, tmp_path):
    """A lock file whose sha256 no file has, by real venv and pip; the environment before still trains."""
    requests = proved(root)
    before = current(root)
    write_lock(code / "configs/environments/cpu.txt", wheels, LOCKED, digest="0" * 64)
    done = step("environment", {**requests["environment"], "python": None, "code": str(code)}, tmp_path)
    assert done.returncode == 4
    assert find_remedy(done.stdout).code == "packages_changed"
    assert current(root) == before
    assert not list(root.glob("venvs/*/complete.json"))
    assert "trained here before" in run_steps(root, {"smoke": requests["smoke"]})["smoke"]


def test_an_environment_that_cannot_train_is_not_taken_into_use(root, tmp_path):
    """A DeepSpeed preset that is not there: the real trainer refuses, within seconds."""
    requests = proved(root)
    before = current(root)
    done = step(
        "smoke", {**requests["smoke"], "recipe": recipe_json(**KEYS | {"deepspeed": "/no/preset.json"})}, tmp_path
    )
    assert done.returncode == 4
    assert '"code": "smoke_failed"' in done.stdout
    assert "config_unreadable path=/no/preset.json" in done.stdout.splitlines()[-1]
    assert current(root) == before
    assert not (root / "venvs/smoke-scratch").exists()
