"""Two dispatches at the same instant, and a controller killed at any moment: again and again, each on empty folders."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.end_state import dispatch_twice, kill_controller
from tests.e2e.machine import Machine, running_machine
from tests.servers import find_sshd

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
ROUNDS = 20


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        yield running.at("", recipe="alone.yaml")


@pytest.mark.parametrize("rounds", [ROUNDS], indirect=True)
def test_of_two_dispatches_exactly_one_trains_and_always_the_same(machine: Machine, rounds: Iterator[random.Random]):
    states = set()
    for _ in rounds:
        states.add(dispatch_twice(machine.at("two")))
        shutil.rmtree(machine.folder / "two")
    assert len(states) == 1


@pytest.mark.parametrize("rounds", [ROUNDS], indirect=True)
def test_a_killed_controller_that_is_called_again_changes_nothing(machine: Machine, rounds: Iterator[random.Random]):
    undisturbed = dispatch_twice(machine.at("undisturbed"))
    for draw in rounds:
        print(kill_controller(machine.at("killed"), undisturbed, draw))
        shutil.rmtree(Path(machine.folder, "killed"))
