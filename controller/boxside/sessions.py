"""Starts a supervisor that outlives the connection: in a tmux session, or by setsid where there is no tmux.

Runs on the box: standard library and Python 3.8 only. Side effects: processes. tmux gets words, never a shell
string, and an environment that holds nothing secret: its server keeps what its first client had. Sessions are
always addressed as `=name`; `-t name` alone would match by prefix.
"""

import os
import subprocess
import sys
import time
from typing import Dict, List, Optional, Sequence

#: What a supervisor may inherit. The rest of an environment is nobody's setting and somebody's secret.
KEPT_NAMES = frozenset(
    (
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TMPDIR", "TMUX_TMPDIR", "CC", "CXX",
        "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
        "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
        "PIP_CACHE_DIR", "PIP_CONFIG_FILE", "HF_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR",
    )
)  # fmt: skip
KEPT_PREFIXES = ("LC_", "CUDA_", "NCCL_", "NVIDIA_", "GLOO_")
_TMUX_TIMEOUT_S = 20


def kept_environment() -> Dict[str, str]:
    """Return the part of our environment that a supervisor inherits."""
    return {name: value for name, value in os.environ.items() if name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)}


def supervisor_argv(code: str, spec_path: str) -> List[str]:
    """Return the words that supervise `spec_path` with the code of a release."""
    return ["/usr/bin/env", "PYTHONPATH=" + code, sys.executable or "python3", "-m", "trainer.supervise", spec_path]


def start_session(name: str, argv: Sequence[str], *, cwd: str) -> str:
    """Start `argv` and return `tmux` or `setsid`, by which it was done.

    A session of that name whose supervisor is dead is ended; one that supervises something else is left alone.
    """
    for _ in range(2):
        answer = _tmux("new-session", "-d", "-s", name, "-x", "200", "-y", "50", *argv, cwd=cwd)
        if answer is None:
            break
        if answer.returncode == 0:
            return "tmux"
        if "duplicate session" not in answer.stderr or _is_supervising(name):
            break
        _tmux("kill-session", "-t", "=" + name)
    subprocess.Popen(
        list(argv),
        cwd=cwd,
        env=kept_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return "setsid"


def _tmux(*words: str, cwd: Optional[str] = None) -> "Optional[subprocess.CompletedProcess[str]]":
    """Return tmux's answer, None where there is no tmux or it hangs."""
    try:
        return subprocess.run(
            ["tmux", *words],
            cwd=cwd,
            env=kept_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=_TMUX_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _is_supervising(name: str) -> bool:
    """Whether a pane of the session runs a supervisor (of another data folder; ours is known by its lock)."""
    time.sleep(0.5)  # one that has just let its lock go is on its way out
    answer = _tmux("list-panes", "-s", "-t", "=" + name, "-F", "#{pane_pid}")
    pids = answer.stdout.split() if answer is not None and answer.returncode == 0 else []
    return any(b"trainer.supervise" in _command_line(pid) for pid in pids)


def _command_line(pid: str) -> List[bytes]:
    try:
        with open(os.path.join("/proc", pid, "cmdline"), "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
