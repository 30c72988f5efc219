"""Points of a run -> what its loss curve says, and what was found on held-out samples. Pure.

Runs on the box too: standard library and Python 3.8 only.

>>> judge_curve([(step, 1.5 + 1.5 * 0.97 ** step) for step in range(1, 100)])
'as_expected'
>>> judge_curve([(step, 2.0) for step in range(1, 100)])
'flat'
"""

import math
from statistics import median
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

AS_EXPECTED, FLAT, RISING, TOO_SHORT = VERDICTS = ("as_expected", "flat", "rising", "too_short")

#: The curve is cut into so many windows of equal length; each speaks by its median, which one bad batch cannot move.
WINDOWS = 4
#: A median of fewer points than this is a single point's word.
POINTS_PER_WINDOW = 3
#: Least fall from first to last window, of the first. The first pipeline's runs went from about 3.0 to 1.5, a half
#: (issue 4, item 9): a fifth of that is the least that is still learning.
LEAST_FALL = 0.1
#: Greatest rise from the lowest window to the last, of the first: half of the fall that counts.
GREATEST_RISE = 0.05
#: A difference of medians must be so many times its own standard error. Three windows are compared with the last, and
#: the error itself is an estimate: of flat curves of nothing but noise, 8 of 100 were not called flat at 2, 1 at 3.
SIGMAS = 3.0


def judge_curve(points: Sequence[Tuple[int, Optional[float]]]) -> str:
    """Return one of VERDICTS for the training loss of a run.

    Args:
        points: (step, loss) in the order in which they were said; a step that is said again, after a resume, counts
            as said last. An unknown or non-finite loss is no point.
    """
    by_step: Dict[int, float] = {step: loss for step, loss in points if loss is not None and _is_number(loss)}
    losses = [by_step[step] for step in sorted(by_step)]
    if len(losses) < WINDOWS * POINTS_PER_WINDOW:
        return TOO_SHORT
    medians = [median(window) for window in _windows(losses)]
    first, lowest, last = medians[0], min(medians), medians[-1]
    doubt = SIGMAS * _error_of_difference(losses)
    if last - lowest > max(GREATEST_RISE * first, doubt):
        return RISING
    if first - last < max(LEAST_FALL * first, doubt):
        return FLAT
    return AS_EXPECTED


def _windows(losses: List[float]) -> List[List[float]]:
    borders = [round(len(losses) * place / WINDOWS) for place in range(WINDOWS + 1)]
    return [losses[borders[place] : borders[place + 1]] for place in range(WINDOWS)]


def _error_of_difference(losses: List[float]) -> float:
    """Return the standard error of the difference of two windows' medians.

    Noise is read from neighbours, so that the slope itself does not count as noise: the median of |b - a| is
    0.6745 sqrt(2) sigma of a normal distribution; a median of n has the error sqrt(pi / 2) sigma / sqrt(n).
    """
    jumps = [abs(losses[at] - losses[at - 1]) for at in range(1, len(losses))]
    sigma = median(jumps) / (0.6745 * math.sqrt(2))
    return math.sqrt(2) * math.sqrt(math.pi / 2) * sigma / math.sqrt(len(losses) / WINDOWS)


def describe_learning(points: Sequence[Tuple[int, Optional[float], Mapping[str, float]]]) -> Dict[str, Any]:
    """Return what a run's progress lines tell of its learning, ready for JSON.

    Args:
        points: (step, loss, extras) of each line, in their order.

    Returns:
        `curve`: one of VERDICTS. `held_out`: None where nobody looked, else `first`, `best` and `last` look, each
        {"step", "losses": {"all": nats per trained token, class: …}}. `skipped`: steps that the loss scaler skipped,
        over all attempts.
    """
    looks = [_look(step, extras) for step, _, extras in points if _is_number(extras.get("eval_loss"))]
    skipped: Dict[float, int] = {}
    for _, _, extras in points:
        attempt = extras.get("attempt", 0)
        skipped[attempt] = max(skipped.get(attempt, 0), int(extras.get("skipped", 0)))
    best = min(looks, key=lambda look: float(look["losses"]["all"])) if looks else None
    return {
        "curve": judge_curve([(step, loss) for step, loss, _ in points]),
        "held_out": {"first": looks[0], "best": best, "last": looks[-1]} if looks else None,
        "skipped": sum(skipped.values()),
    }


def _look(step: int, extras: Mapping[str, float]) -> Dict[str, Any]:
    by_class = {key[len("eval_loss_") :]: value for key, value in extras.items() if key.startswith("eval_loss_")}
    return {"step": step, "losses": dict({"all": extras["eval_loss"]}, **by_class)}


def _is_number(value: object) -> bool:
    """Whether a value is one to reckon with; journals write nan and inf as words."""
    return isinstance(value, (int, float)) and math.isfinite(value)
