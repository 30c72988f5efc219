"""Of any number of takers at the same instant one wins, however often they try and die."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.test_architecture import ROOT
from trainer.locks import read_lock

TAKER = (
    "import os, sys, time\n"
    "from trainer.locks import *\n"
    "while time.monotonic() < float(sys.argv[2]): pass\n"
    "try:\n"
    "    take_lock(sys.argv[1], Lock('o', 'a', str(os.getpid()), identify(os.getpid())))\n"
    "    print('won', flush=True)\n"
    "except Exception as error:\n"
    "    print('lost', type(error).__name__, flush=True)\n"
    "sys.stdin.readline()\n"
)


@pytest.mark.soak
def test_one_taker_wins_and_a_killed_holder_blocks_nobody(rounds, tmp_path):
    path = str(tmp_path / "run.json")
    for draw in rounds:
        argv = [sys.executable, "-c", TAKER, path, str(time.monotonic() + 0.3)]
        takers = [
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for _ in range(draw.randrange(2, 6))
        ]
        said = [taker.stdout.readline().split() for taker in takers]
        assert sorted(word[0] for word in said) == ["lost"] * (len(takers) - 1) + ["won"]
        assert all(word == ["won"] or word[1] == "ProjectError" for word in said)
        for taker in takers:  # the holder dies without a word; its lock stays behind
            os.kill(taker.pid, signal.SIGKILL)
            taker.communicate()
        assert read_lock(path) is not None
