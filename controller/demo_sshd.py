"""A private OpenSSH server on loopback, so that a demo and the tests reach a real box over real SSH.

Throw-away keys, a configuration of its own, nobody but the current user may log in, and the user's home is a folder
given here. Side effects: a process and files under `folder`; as root also the empty folder /run/sshd, which sshd
insists on. Needs OpenSSH's `sshd` and `ssh-keygen`; standard library only.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from corpus_builder.errors import ProjectError
from trainer.locks import start_ticks

PRIVILEGE_FOLDER = Path("/run/sshd")
HOST = "127.0.0.1"
START_TIMEOUT_S = 10
STOP_TIMEOUT_S = 5
PORT_ATTEMPTS = 5


def find_sshd() -> str | None:
    """Return the path of `sshd`, which must be started by its absolute path; None when there is none."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")


class DemoSshd:
    """A server that runs while the `with` block does.

    Args:
        folder: For keys, configuration and log; made if need be, 0700.
        home: The home of whoever logs in; default an empty `home` in `folder`.
        environment: More variables for whoever logs in.
        host_key_types: The keys that the server has, as `ssh-keygen -t` names them.

    Raises:
        ProjectError: `environment_failed`: there is no sshd, or it does not start.
    """

    host = HOST

    def __init__(
        self,
        folder: Path,
        *,
        home: Path | None = None,
        environment: Mapping[str, str] | None = None,
        host_key_types: Sequence[str] = ("ed25519",),
    ) -> None:
        self.folder = folder.resolve()
        self.home = (home or self.folder / "home").resolve()
        self.user = getpass.getuser()
        self.port = 0
        self._environment = {"HOME": str(self.home), **(environment or {})}
        self._host_key_types = host_key_types
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoSshd:
        program = find_sshd()
        if program is None:
            raise _failed(self.folder, "reason.no_sshd")
        if os.geteuid() == 0:
            PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)
        for made in (self.folder, self.home):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        for kind in self._host_key_types:
            make_key(self._host_key(kind), kind)
        make_key(self._user_key, "ed25519")
        shutil.copyfile(self._user_key.with_suffix(".pub"), self.folder / "authorized_keys")
        self._start(program)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _stop(self._process)
            self._process = None

    @property
    def pid(self) -> int:
        """The process that listens."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def private_key(self) -> str:
        """The key that may log in."""
        return self._user_key.read_text("ascii")

    def public_key(self, kind: str) -> str:
        """Return a host key as `type base64`."""
        return " ".join(self._host_key(kind).with_suffix(".pub").read_text("ascii").split()[:2])

    @property
    def known_hosts(self) -> str:
        """The lines that pin all of the host's keys."""
        return "".join(f"[{HOST}]:{self.port} {self.public_key(kind)}\n" for kind in self._host_key_types)

    def settings(self) -> dict[str, str]:
        """Return the settings that reach this server."""
        return {
            "ZY_GPU_HOST": HOST,
            "ZY_GPU_PORT": str(self.port),
            "ZY_GPU_USER": self.user,
            "ZY_GPU_KEY": self.private_key,
            "ZY_GPU_KNOWN_HOSTS": self.known_hosts,
        }

    @property
    def _user_key(self) -> Path:
        return self.folder / "user_ed25519"

    def _host_key(self, kind: str) -> Path:
        return self.folder / f"host_{kind}"

    def _start(self, program: str) -> None:
        """Start on a free port; another one is tried when somebody takes it in between."""
        config, log = self.folder / "sshd_config", self.folder / "sshd.log"
        for _ in range(PORT_ATTEMPTS):
            self.port = _free_port()
            config.write_text(self._config(), "utf-8")
            with log.open("wb") as file:
                command = [program, "-D", "-e", "-f", str(config)]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            if _answers(process, self.port):
                self._process = process
                return
            _stop(process)
        said = log.read_text("utf-8", "replace").strip().splitlines()
        raise _failed(self.folder, "reason.sshd_start: " + (said[-1] if said else "reason.said_nothing"))

    def _config(self) -> str:
        lines = [
            f"Port {self.port}",
            f"ListenAddress {HOST}",
            *(f'HostKey "{self._host_key(kind)}"' for kind in self._host_key_types),
            f'PidFile "{self.folder / "sshd.pid"}"',
            f'AuthorizedKeysFile "{self.folder / "authorized_keys"}"',
            "StrictModes no",  # the folder may lie below a world-writable one
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            f"AllowUsers {self.user}",
            "SetEnv " + " ".join(f'"{name}={text}"' for name, text in self._environment.items()),
            "AllowTcpForwarding yes",
            "X11Forwarding no",
            "PrintMotd no",
            "PrintLastLog no",
            "Subsystem sftp internal-sftp",
            "MaxStartups 100:30:200",
        ]
        return "\n".join(lines) + "\n"


def make_key(path: Path, kind: str) -> None:
    """Make a key pair without a passphrase, unless there is one."""
    if path.exists():
        return
    size = ["-b", "2048"] if kind == "rsa" else []  # throw-away: made in 0.1 s instead of a second
    command = ["ssh-keygen", "-q", "-t", kind, *size, "-N", "", "-C", "throw-away", "-f", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise _failed(path.parent, f"reason.no_key_made ({type(error).__name__})") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    give_up = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=START_TIMEOUT_S) as connection:
            if connection.recv(4) == b"SSH-":
                return process.poll() is None
        time.sleep(0.01)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the connections that it still serves: each is a session of its own."""
    served = _children(process.pid)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in served:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    give_up = time.monotonic() + STOP_TIMEOUT_S
    while any(start_ticks(pid) is not None for pid in served) and time.monotonic() < give_up:
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except OSError:
        return []


def _failed(folder: Path, reason: str) -> ProjectError:
    return ProjectError("environment_failed", path=str(folder), reason=reason)
