"""What a loss curve says: curves as runs make them, noise and all."""

import math
import random

import pytest

from trainer.curve import AS_EXPECTED, FLAT, RISING, TOO_SHORT, judge_curve


def curve(shape, *, count=75, noise=0.0, seed=0):
    chance = random.Random(seed)
    return [(step, shape(step / count) + chance.gauss(0, noise)) for step in range(1, count + 1)]


def falling(share):
    """About the first pipeline's runs: 3.0 to 1.5, most of it early."""
    return 1.5 + 1.5 * math.exp(-4 * share)


SHAPES = {
    "seed": (falling, AS_EXPECTED),
    "slow but steady": (lambda share: 1.2 - 0.3 * share, AS_EXPECTED),
    "stairs of epochs": (lambda share: 2.4 - 0.4 * int(share * 4.999), AS_EXPECTED),
    "down to nothing": (lambda share: 3 * math.exp(-9 * share), AS_EXPECTED),
    "nothing learned": (lambda share: 2.0, FLAT),
    "hardly anything": (lambda share: 2.0 - 0.1 * share, FLAT),
    "upwards from the start": (lambda share: 2.0 + share, RISING),
    "down and up again": (lambda share: 3.0 - 3 * share if share < 0.5 else 1.5 + 2 * (share - 0.5), RISING),
    "a cliff at the end": (lambda share: falling(share) + 4 * (share > 0.8), RISING),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    shape, wanted = SHAPES[name]
    assert judge_curve(curve(shape)) == wanted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["seed", "nothing learned", "down and up again"])
def test_noise_of_single_batches_changes_no_verdict(name, seed):
    shape, wanted = SHAPES[name]
    assert judge_curve(curve(shape, noise=0.15, seed=seed)) == wanted


@pytest.mark.parametrize("count", [16, 75])
def test_nothing_but_noise_is_neither_learning_nor_rising(count):
    verdicts = [judge_curve(curve(lambda share: 2.0, count=count, noise=0.6, seed=seed)) for seed in range(200)]
    assert verdicts.count(FLAT) >= 194


def test_single_batches_that_leap_change_nothing():
    points = curve(falling)
    points[40], points[74] = (41, 30.0), (75, 12.0)
    assert judge_curve(points) == AS_EXPECTED


@pytest.mark.parametrize(("count", "wanted"), [(0, TOO_SHORT), (1, TOO_SHORT), (11, TOO_SHORT), (12, AS_EXPECTED)])
def test_a_few_points_are_no_curve(count, wanted):
    assert judge_curve(curve(falling, count=count)) == wanted


def test_what_is_no_number_is_no_point():
    points = curve(falling, count=14)
    points[5], points[7] = (6, math.nan), (8, None)
    assert judge_curve(points) == AS_EXPECTED
    points[9] = (10, math.inf)
    assert judge_curve(points) == TOO_SHORT


def test_steps_that_are_said_again_after_a_resume_count_once():
    points = curve(falling)
    assert judge_curve(points[:60] + points[40:]) == judge_curve(points)
    assert judge_curve(points[:6] * 3) == TOO_SHORT
