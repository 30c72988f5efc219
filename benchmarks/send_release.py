"""Our code and 500 documents to the box, beside `rsync -a` of the same files, near and 60 ms away.

Ours is what it adds to an action, whose connection is open by then: hashing here, one request, every file proved there,
one rename. `rsync -a` is the process that a workflow would run in its place, its own login included; it is also shown
through a connection that is open already (OpenSSH's ControlMaster). Every round is another release to an empty place.
What goes when the box has the release is counted in bytes at the proxy: the question whether it has it, the agent in
it. Needs `rsync` (Debian: rsync). Side effects: an sshd and a proxy on loopback, a temporary folder.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.generated import Writer
from benchmarks.measure import Claim, best_wall_of, report
from controller.box import SshBox
from controller.demo_sshd import DemoSshd
from controller.release import CODE_ROOT, Release, gather
from controller.settings import Settings
from corpus_builder.plan import Plan
from tests.tcp_proxy import TcpProxy

ROUNDS = 7
FILES = 500
RTT_S = 0.060
LIMIT = 0.5


class Sent:
    """Sends one release after another: a document of each says which."""

    def __init__(self, folder: Path, where: str, code_root: Path = CODE_ROOT) -> None:
        self._code_root = code_root
        self.repository, self.root = folder / "repository", folder / where
        self._plan = Plan.model_validate(
            {
                "name": "sent",
                "speakers": {"user": ["A"], "assistant": ["B"]},
                "sources": [
                    {
                        "kind": "soul",
                        "globs": ["docs/*.md"],
                        "questions": {"whole": ["What is in {path}?"], "section": ["{section}"]},
                    }
                ],
            }
        )
        self._count = 0

    def gather(self) -> Release:
        """Return what is sent now."""
        return gather(self._code_root, self.repository, self._plan)

    def send(self, box: SshBox) -> None:
        """Send another release, as `setup-only` does."""
        self._count += 1
        (self.repository / "docs" / "0.md").write_text(f"# Round {self._count} of {self.root.name}\n", "utf-8")
        release = self.gather()
        listing = {"root": str(self.root), "digest": release.digest, "files": release.files()}
        box.ask("receive_release", listing, timeout_s=60, stream=release.stream())

    def ask(self, box: SshBox) -> None:
        """Ask as `setup-only` does before it sends: the box has the release."""
        where = {"root": str(self.root), "data": str(self.root / "data"), "digest": self.gather().digest}
        if not box.ask("facts", where, timeout_s=60)["release_present"]:
            raise RuntimeError("the box has not got the release")


def write_documents(folder: Path) -> None:
    """Write FILES documents of a few thousand characters."""
    (folder / "docs").mkdir(parents=True)
    writer = Writer(5)
    for number in range(FILES):
        text = "\n\n".join(f"## Part {part}\n\n{writer.paragraph(3, 6)}" for part in range(4))
        (folder / "docs" / f"{number}.md").write_text(f"# Document {number}\n\n{text}\n", "utf-8")


def stage(release: Release, folder: Path) -> None:
    """Lay the release out as rsync would find it."""
    for entry in release.entries:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(entry.local, folder / entry.path)


@contextmanager
def master(ssh: list[str], there: str, socket: Path) -> Iterator[list[str]]:
    """Yield the words of an `ssh` that uses a connection which is open for as long as the block lasts."""
    shared = [*ssh, "-o", f"ControlPath={socket}"]
    subprocess.run([*shared, "-o", "ControlMaster=yes", "-f", "-N", there], check=True, stderr=subprocess.DEVNULL)
    try:
        yield shared
    finally:
        subprocess.run([*shared, "-O", "exit", there], check=True, capture_output=True)


def measure(sshd: DemoSshd, folder: Path, port: int, sent_bytes: Callable[[], int]) -> dict[str, float]:
    """Return the seconds of the best round of each, and the bytes that go when the box has the release."""
    known, key, there = folder / f"known_hosts-{port}", folder / "key", f"{sshd.user}@{sshd.host}"
    known.write_text(sshd.known_hosts.replace(f":{sshd.port} ", f":{port} "))
    key.write_text(sshd.private_key)
    key.chmod(0o600)
    options = ("BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={known}")
    ssh = ["ssh", "-F", "/dev/null", "-i", str(key), "-p", str(port)]
    ssh += [word for option in options for word in ("-o", option)]
    environ = {**sshd.settings(), "ZY_GPU_PORT": str(port), "ZY_GPU_KNOWN_HOSTS": known.read_text()}
    sent, rounds = Sent(folder, f"root-{port}", folder / "staged" / "code"), count()

    def rsync(words: list[str]) -> Callable[[], object]:
        def run() -> None:
            target = f"{there}:{folder}/rsync-{port}-{next(rounds)}/"
            subprocess.run(["rsync", "-a", "-e", shlex.join(words), f"{folder}/staged/", target], check=True)

        return run

    with SshBox(Settings.from_environment(environ).ssh()) as box, master(ssh, there, folder / f"m{port}") as shared:
        sides = {"ours": lambda: sent.send(box), "rsync": rsync(ssh), "rsync, open": rsync(shared)}
        found = best_wall_of(sides, ROUNDS)
        before = sent_bytes()
        sent.ask(box)
        again = sent_bytes() - before
        asked = best_wall_of({"question": lambda: sent.ask(box)}, ROUNDS)
    return {**found, **asked, "again": again}


def main() -> int:
    """Measure, print and write the page."""
    if shutil.which("rsync") is None:
        sys.exit("benchmarks.send_release needs rsync")
    with tempfile.TemporaryDirectory() as name, DemoSshd(Path(name) / "ssh") as sshd:
        folder = Path(name)
        write_documents(folder / "repository")
        release = Sent(folder, "staged").gather()
        stage(release, folder / "staged")
        with TcpProxy(sshd.port) as proxy:
            near = measure(sshd, folder, proxy.port, lambda: proxy.carried["forth"])
        with TcpProxy(sshd.port, delay_s=RTT_S / 2) as proxy:
            far = measure(sshd, folder, proxy.port, lambda: proxy.carried["forth"])
    whole = sum(entry.size for entry in release.entries)
    claims = [
        Claim(f"code + {FILES} files / `rsync -a`, 60 ms round trip", far["ours"] / far["rsync"], LIMIT, at_most=True),
        Claim("bytes sent when nothing changed, of the release", far["again"] / whole, 0.05, at_most=True),
    ]
    whats = {
        "ours": "ours",
        "rsync": "`rsync -a`",
        "rsync, open": "`rsync -a` through an open connection",
        "question": "the question when nothing changed",
    }
    numbers = [
        ("the release", f"{len(release.entries)} files, {whole / 1e6:.1f} MB"),
        *(
            (f"{what}, {where}", f"{1000 * times[side]:.0f} ms")
            for where, times in (("60 ms", far), ("loopback", near))
            for side, what in whats.items()
        ),
        ("ours / `rsync -a` through an open connection, 60 ms", f"{far['ours'] / far['rsync, open']:.2f}"),
        ("ours / `rsync -a`, loopback", f"{near['ours'] / near['rsync']:.2f}"),
        ("sent when nothing changed", f"{far['again'] / 1e3:.0f} kB"),
    ]
    about = (__doc__ or "").split("Side effects")[0].strip()
    return report("send_release", about=about, packages=("paramiko",), claims=claims, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
