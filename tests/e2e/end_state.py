"""What a `setup-and-train` comes to, whoever disturbs it: helpers of the tests and of the soak."""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.machine import Machine, until

#: Long enough that whoever is called again, a second after the last of MARKS, finds the run at work.
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


def end_state(machine: Machine) -> EndState:
    """Return what the one run of a machine came to; fail unless there is exactly one and nothing is left at work."""
    until(lambda: all(machine.runs().values()), "the end of the run", timeout_s=180)
    [(run, outcome)] = machine.runs().items()
    assert outcome["state"] == "succeeded", outcome
    assert [row["name"] for row in machine.audit() if row["change"] == "start_train"] == [run]
    assert len(json.loads((Path(machine.data.runs) / run / "supervisor.json").read_text())["attempts"]) == 1
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
    else:
        assert (again.returncode, had_run) == (0, False), again.stdout[-3000:] + again.stderr
    assert end_state(machine) == undisturbed, f"killed {delay_s:.2f} s after {mark!r}"
    return f"{delay_s:.2f} s after {mark!r}"
