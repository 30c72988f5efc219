"""tmux, where a box has none and lets us install it: `ZY_ALLOW_INSTALL=1`, and root or sudo without a password.

Runs on the box: standard library and Python 3.8 only. Side effects: the system's package manager, and nothing else:
without the setting a line is said. A failure is no failure of the setup: state never depends on tmux.
"""

import os
import shutil
import subprocess
from typing import Any, List, Mapping, Optional, Tuple

from controller.boxside.commands import clean_environment, run_command, say

#: Package manager -> how it installs, and how it learns first what there is to install; the first that is there.
MANAGERS: Tuple[Tuple[str, List[str], Optional[List[str]]], ...] = (
    ("apt-get", ["install", "-y", "--no-install-recommends"], ["update"]),
    ("dnf", ["install", "-y"], None),
    ("yum", ["install", "-y"], None),
    ("apk", ["add", "--no-cache"], None),
    ("zypper", ["--non-interactive", "install", "--no-recommends"], None),
    ("pacman", ["-S", "--noconfirm", "--needed"], ["-Sy"]),
)
_TIMEOUT_S = 300


def install_tmux(request: Mapping[str, Any]) -> None:
    """Install tmux where that is allowed and can be done; say what holds the run either way."""
    if shutil.which("tmux") is not None:
        return
    if not request["allow"]:
        say("setup", "no tmux here: setsid holds what runs; ZY_ALLOW_INSTALL=1 has tmux installed")
        return
    prefix = privilege()
    manager = next((row for row in MANAGERS if shutil.which(row[0]) is not None), None)
    if prefix is None or manager is None:
        reason = "no package manager known" if manager is None else "neither root nor sudo without a password"
        say("setup", "tmux cannot be installed ({reason}): setsid holds what runs", reason=reason)
        return
    name, words, refresh = manager
    say("setup", "installing tmux with {name}", name=name)
    is_done = _run([*prefix, name, *words, "tmux"])
    if not is_done and refresh is not None:
        is_done = _run([*prefix, name, *refresh]) and _run([*prefix, name, *words, "tmux"])
    if is_done and shutil.which("tmux") is not None:
        say("setup", "tmux is installed: the training will run in it")
    else:
        say("setup", "tmux could not be installed: setsid holds what runs")


def privilege() -> Optional[List[str]]:
    """Return the words in front of a command that root must run, None where we are not let."""
    if os.getuid() == 0:
        return []
    return ["sudo", "-n"] if _run(["sudo", "-n", "true"]) else None


def _run(argv: List[str]) -> bool:
    try:
        return run_command(argv, dict(clean_environment(), DEBIAN_FRONTEND="noninteractive"), _TIMEOUT_S) == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
