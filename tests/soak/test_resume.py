"""A run that is killed at any moment, again and again, ends with the weights of one that nothing disturbs."""

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_run import OnLine, TinyRun, kill_all, make_run, tiny_samples, write_base_model
from trainer.progress import Progress

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
LEAST_SEEDS = 10
TAIL_STEPS = 8  # no kill is drawn for the last ones: the run would end before it
MOMENT_S = 0.1  # about two steps and a save of so small a model
KEYS = {
    "packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": 8,
    "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": True,
}  # fmt: skip
SAMPLES = tiny_samples(22) + [replace(sample, split="validation") for sample in tiny_samples(27)[22:]]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base") / "base", tiny_samples())


def kill_somewhere(draw: random.Random) -> OnLine:
    """Return what kills a launch at a drawn step and a moment later: at a border, within a step or within a save."""
    target: list[int] = []

    def act(item: object, child: "subprocess.Popen[str]") -> None:
        if not isinstance(item, Progress):
            return
        if not target:
            target.append(draw.randrange(item.step, max(item.step + 1, item.total - TAIL_STEPS)))
        if item.step >= target[0]:
            time.sleep(draw.uniform(0, MOMENT_S))
            kill_all(child)

    return act


def undisturbed(folder: Path, base_dir: Path, *, alone: bool) -> TinyRun:
    run = make_run(folder, base_dir, SAMPLES, **KEYS)
    ended = run.launch(alone=alone)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    return run


def survive(run: TinyRun, draw: random.Random, *, alone: bool) -> int:
    """Kill a run twice at drawn moments, let it end, and return how often it was killed."""
    kills = 0
    for _ in range(2):
        ended = run.launch(alone=alone, on_line=kill_somewhere(draw))
        kills += ended.exit_code == -signal.SIGKILL
        assert ended.exit_code in (0, -signal.SIGKILL), ended.stderr[-4000:]
    ended = run.launch(alone=alone)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    return kills


def at_least(count: int, draws: Iterator[random.Random]) -> Iterator[random.Random]:
    """Yield the draws, and go on from the first one's seed until there were `count`."""
    first = next(draws)
    more = [random.Random(first.getrandbits(32)) for _ in range(count)]
    yield from more
    yield from itertools.islice(draws, 1, None)


def test_one_process_ends_with_the_same_bits(rounds, base_dir, tmp_path):
    whole = undisturbed(tmp_path / "whole", base_dir, alone=True)
    wanted = (Path(whole.paths.final) / "model.safetensors").read_bytes()
    kills = 0
    for number, draw in enumerate(at_least(LEAST_SEEDS, rounds)):
        run = make_run(tmp_path / str(number), base_dir, SAMPLES, **KEYS)
        kills += survive(run, draw, alone=True)
        assert (Path(run.paths.final) / "model.safetensors").read_bytes() == wanted
    assert kills >= LEAST_SEEDS, "kills must come while the run is alive"


def test_two_ranks_end_with_the_same_weights(rounds, base_dir, tmp_path):
    from safetensors.torch import load_file

    whole = undisturbed(tmp_path / "whole", base_dir, alone=False)
    wanted = load_file(Path(whole.paths.final) / "model.safetensors")
    for number, draw in enumerate(rounds):
        run = make_run(tmp_path / str(number), base_dir, SAMPLES, **KEYS)
        survive(run, draw, alone=False)
        found = load_file(Path(run.paths.final) / "model.safetensors")
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6
