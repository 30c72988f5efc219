"""`zy status` as a whole process, beside `ssh host true`: on loopback, and through a proxy that adds 60 ms.

Both log in to the same private sshd with the same ed25519 key and a pinned host key. `ssh` comes with OpenSSH and is
told to read no configuration. Side effects: an sshd and a proxy on loopback, a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Claim, best_wall_of, report
from controller.demo_sshd import DemoSshd
from tests.tcp_proxy import TcpProxy

ROUNDS = 15
RTT_S = 0.060
LOOPBACK_LIMIT = 2.5
RTT_LIMIT = 1.3


def main() -> int:
    """Measure, print and write the page."""
    with tempfile.TemporaryDirectory() as name, DemoSshd(Path(name) / "ssh") as sshd:
        folder = Path(name)
        near = measure(sshd, folder, sshd.port)
        with TcpProxy(sshd.port, delay_s=RTT_S / 2) as proxy:
            far = measure(sshd, folder, proxy.port)
    claims = [
        Claim("`zy status` / `ssh host true`, loopback", near["zy"] / near["ssh"], LOOPBACK_LIMIT, at_most=True),
        Claim("`zy status` / `ssh host true`, 60 ms round trip", far["zy"] / far["ssh"], RTT_LIMIT, at_most=True),
    ]
    numbers = [
        (f"{what}, {where}", f"{1000 * times[key]:.0f} ms")
        for where, times in (("loopback", near), ("60 ms", far))
        for key, what in (("zy", "`zy status`"), ("ssh", "`ssh host true`"), ("import", "of it: Python and imports"))
    ]
    about = f"Whole processes, best of {ROUNDS} rounds in turn. The proxy ends TCP itself and delays each direction."
    return report("status", about=about, packages=("paramiko",), claims=claims, numbers=numbers)


def measure(sshd: DemoSshd, folder: Path, port: int) -> dict[str, float]:
    """Return the seconds of the best round of each, by the clock on the wall."""
    known = folder / f"known_hosts-{port}"
    known.write_text(sshd.known_hosts.replace(f":{sshd.port} ", f":{port} "))
    key = folder / "key"
    key.write_text(sshd.private_key)
    key.chmod(0o600)
    settings = {
        **sshd.settings(),
        "ZY_GPU_PORT": str(port),
        "ZY_GPU_KNOWN_HOSTS": known.read_text(),
        "ZY_LANG": "en",
        "ZY_CODING_TRAIN_DATA": str(folder / "data"),
        "ZY_CODING_TRAIN_ROOT": str(folder / "root"),
    }
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.getcwd(), **settings}
    options = ("BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={known}")
    ssh = ["ssh", "-F", "/dev/null", "-i", str(key), "-p", str(port)]
    ssh += [word for option in options for word in ("-o", option)]
    return best_wall_of(
        {
            "zy": caller([sys.executable, "-m", "controller.cli", "status"], environment),
            "ssh": caller([*ssh, f"{sshd.user}@{sshd.host}", "true"], environment),
            "import": caller([sys.executable, "-c", "import controller.invocation, controller.box"], environment),
        },
        ROUNDS,
    )


def caller(command: list[str], environment: dict[str, str]) -> Callable[[], object]:
    """Return a function that runs `command` to its end and raises if it fails."""
    return lambda: subprocess.run(command, env=environment, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
