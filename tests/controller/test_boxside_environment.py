"""Environments: which lock file, made once from it by real venv and pip, never half used; and the steps around."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from controller.boxside import setup_steps
from controller.boxside.environment import (
    COMPLETE,
    NEEDED,
    environment_digest,
    find_current,
    lock_name,
    make_environment,
    note_candidate,
    probe,
    python_of,
    read_candidate,
    split_stages,
)
from controller.boxside.setup_plan import digest_request, offloads_optimizer
from controller.lock_environments import NAMES, requirements
from corpus_builder.errors import NAMED, ProjectError, parse_error_line, privacy_class
from trainer.gpus import Gpus, parse_gpus
from trainer.run_paths import RootPaths

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds

ROOT = Path(__file__).parents[2]
PACKAGES = {name: "PyYAML" if name == "yaml" else name for name in NEEDED}


def write_wheel(folder: Path, module: str, package: str) -> None:
    """Write a wheel that holds one module with a version: what pip installs, without the network."""
    info = f"{package}-1.5.dist-info"
    files = {
        f"{module}.py": "__version__ = '1.5'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{package}-1.5-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for module, package in PACKAGES.items():
        write_wheel(folder, module, package)
    return folder


def lock_text(wheels: Path, names: list[str]) -> str:
    first, *others = names
    head = f"# a comment\n--no-index\n--find-links {wheels}\n"
    return f"{head}{first}==1.5\n# stage: 2 --no-build-isolation\n{head}" + "".join(f"{name}==1.5\n" for name in others)


@pytest.fixture
def release(tmp_path, wheels):
    """A code folder with a whole lock file and one that names a package nobody has."""
    folder = tmp_path / "code/configs/environments"
    folder.mkdir(parents=True)
    (folder / "cpu.txt").write_text(lock_text(wheels, list(PACKAGES.values())))
    (folder / "broken.txt").write_text(lock_text(wheels, ["no-such-package"]))
    return tmp_path / "code"


def run_step(name, request, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(request))
    out = io.StringIO()
    with redirect_stdout(out):
        code = setup_steps.run_step(name, str(path))
    return code, out.getvalue()


def test_an_environment_is_made_once_and_half_made_ones_anew(release, tmp_path):
    root = tmp_path / "root"
    request = {"root": str(root), "code": str(release), "python": None, "lock": "cpu"}
    folder = Path(RootPaths(str(root)).venv(environment_digest((release / "configs/environments/cpu.txt").read_text())))
    folder.mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    (root / "venvs").chmod(0o700)
    (folder / "half").write_text("made")
    code, said = run_step("environment", request, tmp_path)
    assert code == 0, said
    assert "[environment] pip, stage 2" in said
    assert "[environment] deepspeed 1.5, numpy 1.5" in said
    assert not (folder / "half").exists()
    assert json.loads((folder / COMPLETE).read_text())["versions"]["torch"] == "1.5"
    assert read_candidate(str(root), python_of(str(folder)))["versions"]["torch"] == "1.5"
    assert find_current(str(root)) is None  # until it has trained two steps (test_boxside_smoke.py)
    before = {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, said = run_step("environment", request, tmp_path)
    assert "pip" not in said
    assert probe(python_of(str(folder)))["torch"] == "1.5"  # writes nothing, not even what it compiles
    assert {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_failed_installation_leaves_the_old_one_in_use(release, tmp_path, capfd):
    root = tmp_path / "root"
    (root / "venvs").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    (root / "venvs/current.json").write_text(json.dumps({"python": "/old/bin/python"}))
    request = {"root": str(root), "code": str(release), "python": None, "lock": "broken"}
    code, _ = run_step("environment", request, tmp_path)
    error = next(found for found in map(parse_error_line, capfd.readouterr().err.splitlines()) if found)
    assert (code, error.code, error.values["reason"]) == (4, "environment_failed", "pip, stage 1: exit code 1")
    assert find_current(str(root)) == "/old/bin/python"
    assert not list(root.glob(f"venvs/*/{COMPLETE}"))


def test_an_environment_that_cannot_train_says_what_it_lacks(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(ProjectError) as failure:
        probe(str(fake))
    assert failure.value.code == "environment_unusable"
    assert failure.value.values["reason"] == "ModuleNotFoundError: No module named 'torch'"
    assert privacy_class(failure.value.values["reason"]) == NAMED
    with pytest.raises(ProjectError, match="environment_unusable"):
        probe(str(tmp_path / "none"))


def gpus(*capabilities):
    return Gpus(True, [{"compute_capability": capability} for capability in capabilities])


@pytest.mark.parametrize(
    ("found", "name"),
    [(Gpus(False, None), "cpu"), (gpus(), "cpu"), (gpus("7.0", "7.0"), "volta"), (gpus(None), "volta"),
     (gpus("7.5"), "volta"), (gpus("8.0"), "ampere"), (gpus("9.0", "8.6"), "ampere"), (gpus("9.0", "7.0"), "volta")],
)  # fmt: skip
def test_the_gpus_choose_the_lock_file(found, name):
    assert lock_name(found) == name


def test_gpus_older_than_volta_have_none():
    with pytest.raises(ProjectError, match=r"compute capability 6\.1"):
        lock_name(gpus("6.1"))


def test_gpus_that_do_not_answer_are_not_taken_for_none():
    with pytest.raises(ProjectError, match="does not answer") as failure:
        lock_name(Gpus(True, None))
    assert failure.value.code == "environment_failed"


def test_stages_of_a_lock_file():
    stages = split_stages("# head\ntorch==2\n\nnumpy==1\n# stage: 2 --no-build-isolation --no-deps\ndeepspeed==0.19\n")
    assert [(stage.options, stage.lines) for stage in stages] == [
        ([], ["torch==2", "numpy==1"]), (["--no-build-isolation", "--no-deps"], ["deepspeed==0.19"]),
    ]  # fmt: skip
    with pytest.raises(ProjectError, match="more than options"):
        split_stages("# stage: 2 evil-package\nx==1\n")


@pytest.mark.parametrize("name", NAMES)
def test_shipped_lock_files_are_whole(name):
    """Everything that the trainer imports is there, known by its sha256, DeepSpeed last; on a CPU torch is open."""
    *others, last = split_stages((ROOT / f"configs/environments/{name}.txt").read_text("utf-8"))
    assert last.options == ["--no-build-isolation"]
    assert last.lines[0].startswith("deepspeed==")
    opened = [stage.lines for stage in others if not stage.is_hashed]
    assert opened == ([["torch==2.13.0"]] if name == "cpu" else [])
    pinned = {line.partition("==")[0] for stage in [*others, last] for line in stage.lines if "==" in line}
    assert {"torch", "transformers", "pydantic", "pyyaml", "tokenizers", "numpy", "pyarrow", "peft"} <= pinned
    blocks = [block for stage in [*others, last] if stage.is_hashed for block in requirements("\n".join(stage.lines))]
    assert len(blocks) > 40
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    assert not any(block.startswith(("nvidia", "triton")) for block in blocks) or name != "cpu"


def test_volta_gets_a_torch_whose_wheel_has_its_code():
    """The flags in libtorch_cuda.so of the wheels, read once: docs/environments.md keeps the receipt."""
    lock = (ROOT / "configs/environments/volta.txt").read_text("utf-8")
    assert re.search(r"^torch==(\S+)", lock, re.MULTILINE)[1] == "2.10.0"
    receipt = (ROOT / "docs/environments.md").read_text("utf-8")
    assert re.search(r"torch 2\.10\.0 .*sm_70", receipt)


def hashed_lock(wheels: Path, *, digest: str | None = None) -> str:
    lines = [f"--no-index\n--find-links {wheels}"]
    for package in PACKAGES.values():
        (wheel,) = wheels.glob(f"{package}-*.whl")
        sha256 = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{package}==1.5 \\\n    --hash=sha256:{sha256}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_is_hashed_is_installed_by_either(installer, wheels, tmp_path, monkeypatch):
    uv = shutil.which("uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert uv is not None
    monkeypatch.setenv("PATH", f"{os.path.dirname(uv)}:/usr/bin:/bin" if installer == "uv" else "/usr/bin:/bin")
    ran = []

    def run(argv, words):
        ran.append(words)
        subprocess.run(argv, check=True, capture_output=True)

    python = make_environment(str(tmp_path), hashed_lock(wheels), run)
    assert ran == ["venv", f"{installer}, stage 1"]
    assert set(probe(python)) == set(NEEDED)


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_file_of_another_digest_is_refused(installer, wheels, tmp_path):
    path = tmp_path / "lock.txt"
    path.write_text(hashed_lock(wheels, digest="0" * 64))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    uv = f"{os.path.dirname(sys.executable)}:" if installer == "uv" else ""
    argv = [sys.executable, "-m", "controller.boxside.environment", str(path), str(tmp_path / "venv/bin/python")]
    done = subprocess.run(
        argv, cwd=ROOT, env=os.environ | {"PATH": f"{uv}/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"{installer}, stage 1" in done.stdout
    assert "hash" in (done.stdout + done.stderr).lower()


def test_kernels_are_built_with_the_environments_tools_first(tmp_path, capfd):
    fake = tmp_path / "bin/python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "PATH $PATH"\nexit "$CODE"\n')
    fake.chmod(0o755)
    os.environ["CODE"] = "0"
    (tmp_path / "root/venvs").mkdir(parents=True)
    noted = {"python": str(fake), "packages": "", "versions": {}, "overlay": None}
    (tmp_path / "root/venvs/candidate.json").write_text(json.dumps(noted))
    request = {"root": str(tmp_path / "root"), "python": str(fake)}
    try:
        code, said = run_step("kernels", request, tmp_path)
        assert code == 0
        assert said.splitlines()[-1] == "[environment] CPU Adam is ready"
        assert capfd.readouterr().out.startswith(f"PATH {tmp_path}/bin:")
        os.environ["CODE"] = "3"
        code, said = run_step("kernels", request, tmp_path)
    finally:
        del os.environ["CODE"]
    assert code == 4
    assert "exit code 3" in capfd.readouterr().err


def test_presets_say_whether_they_need_cpu_adam(tmp_path):
    assert offloads_optimizer(str(ROOT), "zero3_offload")
    assert not offloads_optimizer(str(ROOT), "none")
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 2}}')
    assert not offloads_optimizer(str(ROOT), str(own))


def test_the_check_step_wants_room_and_a_whole_model(tmp_path, monkeypatch, capfd):
    request = {"data": str(tmp_path / "data"), "root": str(tmp_path / "root"), "base_model_dir": str(tmp_path / "none")}
    assert run_step("check", request, tmp_path)[0] == 2
    monkeypatch.setattr(setup_steps, "check_base_model", lambda folder: None)
    code, said = run_step("check", request, tmp_path)
    assert code == 0
    assert said.startswith("[check] base model whole; ")
    monkeypatch.setattr(setup_steps, "RESERVE_GIB", 1e9)
    assert run_step("check", request, tmp_path)[0] == 4
    assert "box_disk_full" in capfd.readouterr().err
    assert run_step("no-such-step", request, tmp_path)[0] == 2


def test_the_same_request_is_told_from_another_one():
    request = {"setup_id": "a", "owner": "x", "plan": {"name": "p"}, "secrets": {"ZY_DIALOG_URL": "https://h/a?sig=1"}}
    same = {**request, "setup_id": "b", "owner": "y", "secrets": {"ZY_DIALOG_URL": "https://h/a?sig=2"}}
    assert digest_request(request, "https://h/a?sig=1") == digest_request(same, "https://h/a?sig=2")
    assert digest_request(request, "https://h/a") != digest_request(request, "https://h/b")
    assert digest_request(request, None) != digest_request({**request, "plan": {"name": "q"}}, None)


CAPTURED = """0, NVIDIA H200, 143771, 12, 0, 9.0
1, Tesla V100-SXM2-32GB, 32768, [N/A], [Not Supported], [N/A]
2, Tesla V100-SXM2-32GB, 32768, 3, 0
NVIDIA-SMI has failed
"""


def test_rows_of_nvidia_smi():
    rows = parse_gpus(CAPTURED)
    assert [(row["memory_mib"], row["used_mib"], row["utilization"], row["compute_capability"]) for row in rows] == [
        (143771, 12, 0, "9.0"), (32768, None, None, None), (32768, 3, 0, None),
    ]  # fmt: skip


def test_the_interpreter_of_this_repository_is_a_mother():
    assert python_of(sys.executable) == sys.executable
    assert python_of("/opt/mother") == "/opt/mother/bin/python"


def test_an_interpreter_that_cannot_tell_its_packages_is_no_candidate(tmp_path):
    """What it has is a part of the receipt's name: an answer that failed would stand for any."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ProjectError, match="environment_unusable") as caught:
        note_candidate(str(tmp_path / "root"), str(python), {}, None)
    assert "broken" in str(caught.value)
    assert not list(tmp_path.glob("root/venvs/candidate.json"))
