"""One question to the box with the agent in it, beside the same question to an agent that was uploaded before.

Ours sends the agent's modules with every request and leaves nothing on the box. The other way keeps them in a file
there: it would have to be uploaded, proved and cleared away, and could not be used on a full or read-only disk. Both
questions go through one open connection, to the same operation, on loopback and through a proxy that adds 60 ms.
Side effects: an sshd and a proxy on loopback, a temporary folder.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Claim, best_wall_of, report
from controller.box import SshBox
from controller.boxside import importer
from controller.demo_sshd import DemoSshd
from controller.release import agent_bundle
from controller.settings import Settings
from tests.tcp_proxy import TcpProxy

ROUNDS = 25
RTT_S = 0.060
#: Chosen: what nobody would notice who waits for an action.
LIMIT = 1.1
READS_FILE = """

_install = install


def install(sources):
    import json, zlib
    with open({path!r}, "rb") as file:
        _install(json.loads(zlib.decompress(file.read())))
"""


def cached_bundle(path: Path) -> bytes:
    """Return a bundle of one module, which loads the others from `path`; as if they had been uploaded there."""
    path.write_bytes(agent_bundle())
    source = inspect.getsource(importer) + READS_FILE.format(path=str(path))
    return zlib.compress(json.dumps({importer.__name__: source}).encode(), 9)


def measure(sshd: DemoSshd, folder: Path, port: int) -> dict[str, float]:
    """Return the seconds of the best round of each."""
    pins = sshd.known_hosts.replace(f":{sshd.port} ", f":{port} ")
    environ = {**sshd.settings(), "ZY_GPU_PORT": str(port), "ZY_GPU_KNOWN_HOSTS": pins}
    ssh = Settings.from_environment(environ).ssh()
    small = cached_bundle(folder / f"agent-{port}")
    where = {"data": str(folder / "data"), "root": str(folder / "root")}

    def ask(box: SshBox) -> Callable[[], object]:
        return lambda: box.ask("status", where, timeout_s=60)

    with SshBox(ssh) as ours, SshBox(ssh, bundle=lambda: small) as cached:
        return best_wall_of({"ours": ask(ours), "cached": ask(cached)}, ROUNDS)


def main() -> int:
    """Measure, print and write the page."""
    with tempfile.TemporaryDirectory() as name, DemoSshd(Path(name) / "ssh") as sshd:
        near = measure(sshd, Path(name), sshd.port)
        with TcpProxy(sshd.port, delay_s=RTT_S / 2) as proxy:
            far = measure(sshd, Path(name), proxy.port)
    claims = [
        Claim("agent by stdin / cached upload, 60 ms round trip", far["ours"] / far["cached"], LIMIT, at_most=True),
        Claim("agent by stdin / cached upload, loopback", near["ours"] / near["cached"], LIMIT, at_most=True),
    ]
    numbers = [("the agent", f"{len(agent_bundle()) / 1e3:.1f} kB")]
    numbers += [
        (f"{side}, {where}", f"{1000 * times[side]:.1f} ms")
        for where, times in (("60 ms", far), ("loopback", near))
        for side in ("ours", "cached")
    ]
    about = (__doc__ or "").split("Side effects")[0].strip()
    return report("agent", about=about, packages=("paramiko",), claims=claims, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
