"""What an action's page gets beside the box: the wish, who asks, who reads along, and the clock. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from controller.inputs import Inputs
from controller.settings import Settings
from corpus_builder import say

SEES = {"public": say.SEE_PUBLIC, "named": say.SEE_NAMES, "text": say.SEE_ALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of one action.

    `sees` is the highest privacy class of those who can read the output; `echo` shows one line of the box's logs;
    `mask` tells the runner a derived secret before anything could print it.
    """

    settings: Settings
    inputs: Inputs
    environ: Mapping[str, str]
    owner: str
    commit: str = ""
    run_url: str = ""
    lang: str = "zh"
    sees: str = "public"
    is_dry_run: bool = False
    is_local: bool = False  # this machine is the box
    setting_faults: Mapping[str, str] = field(default_factory=dict)  # what is wrong with a setting; the doctor's alone
    grace_s: int = 600
    echo: Callable[[str], None] = print
    mask: Callable[[str], None] = field(default=lambda value: None)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    utc_now: Callable[[], str] = field(default=lambda: time.strftime("%Y%m%d-%H%M%S", time.gmtime()))

    @property
    def see(self) -> frozenset[str]:
        """The privacy classes that may be said."""
        return SEES[self.sees]

    @property
    def places(self) -> dict[str, str]:
        """Where everything lies on the box."""
        return {"data": self.settings.data, "root": self.settings.root}

    @property
    def mother_python(self) -> str | None:
        """The Python of an environment that the person brings, None for our own."""
        venv = self.settings.mother_venv
        return None if venv is None else f"{venv}/bin/python"

    @property
    def audit(self) -> dict[str, str]:
        """Who asks, for `audit.jsonl` on the box."""
        return {"owner": self.owner, "action": self.inputs.action, "commit": self.commit, "run_url": self.run_url}
