"""What a `setup-and-train` comes to, whoever disturbs it: helpers of the tests and of the soak."""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.e2e.machine import Machine, until

TRAIN = ("setup-and-train", "--confirm", "--watch-minutes", "8", "--set", "num_train_epochs=3")
#: What a controller says on its way, by which the moment of its end is drawn; "" is its very start.
MARKS = (
    "", "step_started step=check", "step_started step=environment", "[corpus]", "step_finished step=corpus",
    "name=packed", "name=started",
)  # fmt: skip


@dataclass(frozen=True)
class EndState:
    """What a person gets: the corpus and the weights, by their sha256."""

    samples: str
    weights: str


def end_state(machine: Machine, *, runs: int = 1) -> EndState:
    """Return what the newest run of a machine came to.

    Fails unless there are exactly `runs`, each started once, alone and to its end, and nothing is left at work.
    """
    until(lambda: all(machine.runs().values()), "the end of the run", timeout_s=180)
    found = machine.runs()
    assert len(found) == runs, found
    assert all(outcome["state"] == "succeeded" for outcome in found.values()), found
    assert [row["name"] for row in machine.audit() if row["change"] == "start_train"] == sorted(found)
    folders = [Path(machine.data.runs) / run for run in sorted(found)]
    for folder in folders:
        assert len(json.loads((folder / "supervisor.json").read_text())["attempts"]) == 1
    for before, after in pairwise(folders):
        assert (before / "outcome.json").stat().st_mtime_ns <= (after / "spec.json").stat().st_mtime_ns, "two at a time"
    until(lambda: not machine.processes(), "the end of all processes")
    final = Path(machine.data.version_final("tiny_v1")) / "model.safetensors"
    return EndState(sha256(Path(machine.data.samples)), sha256(final))


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dispatch_twice(machine: Machine) -> EndState:
    """Dispatch a `setup-and-train` twice at the same instant; return what the one that trains comes to."""
    with machine.started(*TRAIN) as one, machine.started(*TRAIN) as other:
        said = [child.communicate(timeout=300)[0] for child in (one, other)]
    assert sorted([one.returncode, other.returncode]) == [0, 8], said
    refused = said[0] if one.returncode == 8 else said[1]
    assert next(iter(machine.runs())) in refused, refused
    return end_state(machine)


def kill_controller(machine: Machine, undisturbed: EndState, draw: random.Random) -> str:
    """Kill a `setup-and-train` at a moment that is drawn, call it again, and compare what comes of it.

    Returns:
        The moment, in words.
    """
    mark, delay_s = draw.choice(MARKS), draw.uniform(0, 0.5)
    with machine.started(*TRAIN) as child:
        assert child.stdout is not None
        assert not mark or any(mark in line for line in child.stdout), "it ended before its time"
        time.sleep(delay_s)  # the moment is what is drawn, nothing is waited for
        child.kill()
    had_run = bool(machine.runs())
    again = machine.zy(*TRAIN)
    if again.returncode == 8:  # the training goes on by itself, and a second one is refused by its name
        assert next(iter(machine.runs())) in again.stderr, again.stderr
        runs = 1
    else:
        assert again.returncode == 0, again.stdout[-3000:] + again.stderr
        runs = 2 if had_run else 1  # the first one had ended, and another one was asked for
    assert end_state(machine, runs=runs) == undisturbed, f"killed {delay_s:.2f} s after {mark!r}"
    return f"{delay_s:.2f} s after {mark!r}"
