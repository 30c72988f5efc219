"""ZY_PROGRESS and ZY_EVENT: the lines by which a trainer tells how it goes (design 4.3). Pure.

Runs on the box too: standard library and Python 3.8 only. Both ends import this module.

    ZY_PROGRESS step=10 total=75 loss=2.1034 lr=9.8e-06 epoch=0.67 total_epochs=5 thr=3.21 loss_soul=2.2 tok=812
    ZY_EVENT name=checkpoint_saved step=100

The parser also takes both variants of the first pipeline (any order; `nan`; int or float epochs), carriage
returns, ANSI colours, prefixes such as `[rank0]:`, and two lines glued together.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Union

PROGRESS_PREFIX = "ZY_PROGRESS"
EVENT_PREFIX = "ZY_EVENT"
EVENTS = (
    "started",
    "resumed",
    "precision",
    "labels_checked",
    "checkpoint_saved",
    "scale_reduced",
    "remedy_applied",
    "nan_stopped",
    "stop_requested",
    "final_saved",
    "gpus_chosen",
    "preflight",
    "engine",
    "packed",
    "evaluated",
    "checkpoint_skipped",
    "stopped_early",
    "merged",
    "finished",
    "step_started",
    "step_finished",
    "on_end",
)

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_HEAD = re.compile(r"(ZY_PROGRESS|ZY_EVENT)[ \t]+")
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\s=]*?)(?=\s|$|ZY_PROGRESS|ZY_EVENT)")
_ORDER = ("step", "total", "loss", "lr", "epoch", "total_epochs", "thr")


@dataclass(frozen=True)
class Progress:
    """One point of a run.

    `loss`: weighted mean in nats per trained token since the last line, None when unknown, else possibly nan or
    inf. `thr`: original samples per second since the last line. `extras`: `loss_<class>`, `tok`, `gnorm`, …
    """

    step: int
    total: int
    loss: Optional[float]
    lr: Optional[float]
    epoch: float
    total_epochs: float
    thr: Optional[float]
    extras: Dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened, e.g. `Event("checkpoint_saved", {"step": "100"})`."""

    name: str
    values: Dict[str, str] = field(default_factory=dict)


def format_number(value: Optional[float]) -> str:
    """Return a number that `float` reads back to about seven digits; None, nan and inf spelled out."""
    if value is None:
        return "unknown"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return "%.7g" % value


def format_progress(progress: Progress) -> str:
    """Return the line of `progress`, without the newline; the inverse of `parse_line`."""
    pairs = ["%s=%s" % (key, format_number(getattr(progress, key))) for key in _ORDER]
    pairs += ["%s=%s" % (key, format_number(value)) for key, value in progress.extras.items()]
    return "%s %s" % (PROGRESS_PREFIX, " ".join(pairs))


def format_event(event: Event) -> str:
    """Return the line of `event`, without the newline. Values hold no white space."""
    for key, value in event.values.items():
        if re.search(r"[\s=]", value) or not value:
            raise ValueError("event value %s=%r needs one word" % (key, value))
    return " ".join([EVENT_PREFIX, "name=%s" % event.name] + ["%s=%s" % pair for pair in event.values.items()])


def parse_line(line: str) -> List[Union[Progress, Event]]:
    """Return the points and events in one line of a log, in order; empty for any other line."""
    clean = _ANSI.sub("", line).replace("\r", " ")
    heads = list(_HEAD.finditer(clean))
    found = []  # type: List[Union[Progress, Event]]
    for head, following in zip(heads, heads[1:] + [None]):
        body = clean[head.end() : following.start() if following else len(clean)]
        pairs = dict(_PAIR.findall(body))
        item = _event(pairs) if head.group(1) == EVENT_PREFIX else _progress(pairs)
        if item is not None:
            found.append(item)
    return found


def _event(pairs: Dict[str, str]) -> Optional[Event]:
    name = pairs.pop("name", "")
    return Event(name, pairs) if name else None


def _progress(pairs: Dict[str, str]) -> Optional[Progress]:
    """Return the point of one body, or None when it has no step: a torn line is no point."""
    step, total = _number(pairs.pop("step", None)), _number(pairs.pop("total", None))
    if step is None or total is None or not math.isfinite(step) or not math.isfinite(total):
        return None
    loss, lr, thr = (_number(pairs.pop(key, None)) for key in ("loss", "lr", "thr"))
    epoch, total_epochs = (_number(pairs.pop(key, None)) for key in ("epoch", "total_epochs"))
    extras = {
        key: number for key, number in ((key, _number(text)) for key, text in pairs.items()) if number is not None
    }
    return Progress(int(step), int(total), loss, lr, epoch or 0.0, total_epochs or 0.0, thr, extras)


def _number(text: Optional[str]) -> Optional[float]:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return None
