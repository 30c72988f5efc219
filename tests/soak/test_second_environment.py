"""Another transformers than the one of the development environment: 4.57, the last before 5.

Boxes with Ubuntu 22.04's Python 3.10 can't run the newest 5.x, and a template or a mask that differs between versions
would be wrong without a word. Side effects: installs three pinned packages, once, into the git-ignored cache folder.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tiny_run import ROOT, make_run, tiny_samples
from tests.tokenizers_real import CACHE
from trainer.base_model import find_model_faults
from trainer.progress import Progress, parse_line

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
#: transformers 4.57.6 and the versions that it asks for; everything else comes from the development environment.
PACKAGES = {"transformers": "4.57.6", "tokenizers": "0.22.2", "huggingface_hub": "0.36.2"}
#: Labels, masks, templates, what is learned from them, and what a result says to whoever serves it.
TESTS = (
    "tests/corpus_builder/test_frame_and_mask.py",
    "tests/corpus_builder/test_frames_other.py",
    "tests/trainer/test_encode.py",
    "tests/trainer/test_dataset.py",
    "tests/trainer/test_loss.py",
    "tests/trainer/test_head_loss.py",
    "tests/trainer/test_final.py",
    "tests/trainer/test_arguments.py",
)
WRITE_BASE = """
import pathlib, sys
from tests.tiny_run import tiny_samples, write_base_model
write_base_model(pathlib.Path(sys.argv[1]), tiny_samples())
"""


@pytest.fixture(scope="module")
def search_path() -> str:
    """PYTHONPATH of the second environment; its packages are installed when they are missing."""
    folder = CACHE / "second-environment" / "-".join(f"{name}-{version}" for name, version in PACKAGES.items())
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pinned = [f"{name}=={version}" for name, version in PACKAGES.items()]
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *pinned, "--target"]
            subprocess.run([*command, f"{scratch}/packages"], check=True, capture_output=True, timeout=600)
            shutil.move(f"{scratch}/packages", folder)
    return os.pathsep.join((str(folder), str(ROOT)))


def run(search_path: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the second environment, from the repository's root."""
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=os.environ | environment | {"PYTHONPATH": search_path},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip


def test_the_second_environment_is_the_one_that_is_meant(search_path):
    code = "import transformers, tokenizers, huggingface_hub as hub\n"
    code += "print(transformers.__version__, tokenizers.__version__, hub.__version__)"
    done = run(search_path, "-c", code)
    assert done.stdout.split() == list(PACKAGES.values()), done.stderr


def test_masks_encoding_and_loss_are_right_there_too(search_path):
    done = run(search_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not e2e and not soak", *TESTS)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"^(\d+) passed", done.stdout.splitlines()[-1])
    assert passed is not None, done.stdout[-2000:]
    print(f"\n{passed.group()} with transformers {PACKAGES['transformers']}")
    assert int(passed.group(1)) > 300
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("keys", [{}, {"packing": True}, {"lora": {"r": 4}}], ids=["padded", "packed", "lora"])
def test_a_training_of_two_steps(search_path, keys, tmp_path):
    base = tmp_path / "base"
    written = run(search_path, "-c", WRITE_BASE, str(base))
    assert written.returncode == 0, written.stderr[-4000:]
    steps = {"num_train_epochs": 1, "tokens_per_step": 800 if keys.get("packing") else 600}
    tiny = make_run(tmp_path / "data", base, tiny_samples(), **steps, **keys)
    done = run(search_path, "-m", "trainer.train", tiny.paths.recipe, **tiny.environment())
    assert done.returncode == 0, done.stderr[-4000:]
    points = [item for line in done.stdout.splitlines() for item in parse_line(line) if isinstance(item, Progress)]
    assert [(point.step, point.total) for point in points] == [(1, 2), (2, 2)]
    assert find_model_faults(tiny.paths.final) == []
    assert Path(tiny.paths.final, "chat_template.jinja").is_file()
