"""Soak: each test repeats until its share of SOAK_MIN minutes is spent, with a seed that is printed."""

import os
import random
import time
from collections.abc import Iterator

import pytest

LEAST_ROUNDS = 3


@pytest.fixture
def rounds(request) -> Iterator[random.Random]:
    """Yield one seeded generator per round; SOAK_SEED repeats a run, an indirect parameter is the least of rounds."""
    least = getattr(request, "param", LEAST_ROUNDS)
    tests = sum(1 for item in request.session.items if "rounds" in getattr(item, "fixturenames", ()))
    share_s = 60 * float(os.environ.get("SOAK_MIN", "1")) / max(1, tests)
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().getrandbits(32))

    def go() -> Iterator[random.Random]:
        give_up, count = time.monotonic() + share_s, 0
        while count < least or time.monotonic() < give_up:
            yield random.Random(f"{seed}-{count}")
            count += 1
        print(f"\n{request.node.name}: {count} rounds, SOAK_SEED={seed}")

    print(f"\n{request.node.name}: SOAK_SEED={seed}")
    return go()
