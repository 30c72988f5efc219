"""The request to stop one work: a file that all of its processes read, and signals where no file can be written.

Runs on the box too: standard library and Python 3.8 only. Side effects: signal handlers, the stop file.
SIGTERM and SIGINT ask for what the kind can do, a checkpoint or the end; NOW_SIGNAL asks for the end at once.
"""

import os
import signal
from typing import Optional

from trainer.journal import CHECKPOINT, NOW, request_stop
from trainer.run_paths import RunPaths

NOW_SIGNAL = signal.SIGUSR2


class StopRequest:
    """What was asked for so far. `unwritten`: how many signals no file could tell at once."""

    def __init__(self, paths: RunPaths, gentlest: str) -> None:
        self.unwritten = 0
        self._paths = paths
        self._gentlest = gentlest  # what SIGTERM means
        self._told: Optional[str] = None  # by a signal, while no file could say it

    def listen(self) -> None:
        """Hear the signals from now on."""
        for number in (signal.SIGTERM, signal.SIGINT, NOW_SIGNAL):
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: object) -> None:
        """Write the file, so that every rank reads it; remember what was asked for where that is refused."""
        mode = NOW if number == NOW_SIGNAL else self._gentlest
        if self._told == NOW or (mode != NOW and os.path.exists(self._paths.stop)):
            return
        self._told = mode
        self.unwritten += not self._write()

    def _write(self) -> bool:
        try:
            request_stop(self._paths, str(self._told))
            return True
        except OSError:
            return False

    def mode(self) -> Optional[str]:
        """Return `checkpoint`, `now`, or None. A request that no file could take is tried again: ranks wait for it."""
        try:
            with open(self._paths.stop, encoding="ascii", errors="replace") as file:
                written = CHECKPOINT if file.read().strip() == CHECKPOINT else NOW
            return NOW if self._told == NOW else written
        except OSError:
            if self._told is not None:
                self._write()
            return self._told
