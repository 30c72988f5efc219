"""How a laptop's own ssh would reach the machine: `~/.ssh/config`, key files, ssh-agent, `~/.ssh/known_hosts`.

Only away from GitHub, and only where no key and no password is set: then `ZY_GPU_HOST=gpu` may be an alias, and
whatever `ssh gpu` needs is found where ssh finds it. What is set as a `ZY_` setting wins. Side effects: reads files.

    Host gpu
      HostName 10.0.0.7
      User trainer
      ProxyJump door.example:2200
"""

from __future__ import annotations

import base64
import binascii
import getpass
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from controller.addresses import checked_host, checked_port, checked_user, parse_jump
from controller.host_keys import usable_lines
from controller.settings import Settings, Ssh
from corpus_builder.errors import ProjectError

#: Where ssh looks for keys when no IdentityFile names one, the best first. Source: ssh_config(5).
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
MAX_HOPS = 5


def is_laptop(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether the person's own ssh may be asked: not on a runner, and no key or password is set."""
    is_runner = environ.get("GITHUB_ACTIONS") == "true"
    return not is_runner and settings.gpu_key is None and settings.gpu_password is None


def laptop_ssh(settings: Settings, environ: Mapping[str, str]) -> Ssh:
    """Return how this person's ssh would reach the machine.

    Raises:
        ProjectError: `setting_missing` (no host), `config_unreadable` (`~/.ssh/config` cannot be used).
    """
    if settings.gpu_host is None:
        return settings.ssh()  # which names everything that is missing
    folder = Path(environ.get("HOME") or Path.home()) / ".ssh"
    laptop = Laptop(folder, read_config(folder / "config"))
    stop = laptop.find(settings.gpu_host)
    passphrase = settings.gpu_key_passphrase
    hops = laptop.route(settings.gpu_jump or stop.jump)
    files = tuple(dict.fromkeys(name for one in (stop, *hops) for name in one.key_files))
    is_agent_there = bool(environ.get("SSH_AUTH_SOCK"))
    return Ssh(
        host=stop.host,
        port=settings.gpu_port if "gpu_port" in settings.model_fields_set else stop.port,
        user=settings.gpu_user or stop.user,
        known_hosts=settings.gpu_known_hosts or laptop.known_hosts(),
        jump=None,
        key=None,
        passphrase=passphrase.get_secret_value() if passphrase else None,
        password=None,
        hops=tuple((hop.user, hop.host, hop.port) for hop in hops),
        key_files=files,
        uses_agent=is_agent_there and not stop.is_files_only,
        agent_only=_public_blobs(files) if is_agent_there and stop.is_files_only else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One machine as `~/.ssh/config` knows it. `is_files_only`: IdentitiesOnly, no other key of the agent."""

    host: str
    port: int
    user: str
    jump: str | None
    key_files: tuple[str, ...]
    is_files_only: bool


@dataclass(frozen=True, slots=True)
class Laptop:
    """The person's `~/.ssh`."""

    folder: Path
    config: paramiko.SSHConfig

    def find(self, alias: str) -> Stop:
        """Return what is known of a machine, by its name or its alias."""
        try:
            found: dict[str, Any] = dict(self.config.lookup(alias))
        except ImportError:
            raise self._unusable("reason.match_exec") from None
        if found.get("proxycommand", "none").lower() != "none":
            raise self._unusable("reason.proxy_command")
        default = [str(self.folder / name) for name in DEFAULT_KEYS]
        try:
            return Stop(
                host=checked_host(found["hostname"]),
                port=checked_port(str(found.get("port", "22"))),
                user=checked_user(found.get("user") or getpass.getuser()),
                jump=found.get("proxyjump"),
                key_files=tuple(found.get("identityfile") or default),
                is_files_only=str(found.get("identitiesonly", "no")).lower() == "yes",
            )
        except ValueError as error:
            raise self._unusable(str(error)) from None

    def route(self, jump: str | None, depth: int = 0) -> list[Stop]:
        """Return the machines that `ProxyJump` names, in the order of the way; each may have its own before it."""
        if not jump or jump.lower() == "none":
            return []
        if depth >= MAX_HOPS:
            raise self._unusable("reason.jump_circle")
        stops: list[Stop] = []
        for number, text in enumerate(jump.split(",")):
            try:
                user, alias, port = parse_jump(text.strip())
            except ValueError as error:
                raise self._unusable(str(error)) from None
            stop = self.find(alias)
            has_port = text.strip().rpartition(":")[2].isdigit() and not text.strip().endswith("]")
            before = self.route(stop.jump, depth + 1) if number == 0 else []
            stops += [
                *before,
                Stop(
                    host=stop.host, port=port if has_port else stop.port, user=user or stop.user, jump=None,
                    key_files=stop.key_files, is_files_only=stop.is_files_only,
                ),
            ]  # fmt: skip
        return stops

    def known_hosts(self) -> str:
        """Return the lines of the person's known_hosts that can be used."""
        files = [self.folder / "known_hosts", self.folder / "known_hosts2", Path("/etc/ssh/ssh_known_hosts")]
        return "".join(usable_lines(path.read_text("utf-8", "replace")) for path in files if path.is_file())

    def _unusable(self, reason: str) -> ProjectError:
        return ProjectError("config_unreadable", path=str(self.folder / "config"), reason=reason)


def read_config(path: Path) -> paramiko.SSHConfig:
    """Return `~/.ssh/config` with its includes, an empty one where there is none; raise `config_unreadable`."""
    try:
        return paramiko.SSHConfig.from_text(_with_includes(path) if path.is_file() else "")
    except (paramiko.ConfigParseError, OSError, UnicodeDecodeError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error


def _with_includes(path: Path, depth: int = 0) -> str:
    """Return the text of a file with what it includes: the block that an Include stands in goes on after it."""
    lines: list[str] = []
    block = "Host *"
    for line in path.read_text("utf-8").splitlines():
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() != "include":
            lines.append(line)
        elif depth < MAX_HOPS:
            lines += [_with_includes(found, depth + 1) for name in rest.split() for found in _included(path, name)]
            lines.append(block)
    return "\n".join(lines) + "\n"


def _included(path: Path, name: str) -> list[Path]:
    """Return the files that a pattern names: relative to `~/.ssh`, in the order of their names."""
    home, name = path.parent.parent, name.strip('"')
    pattern = home / name[2:] if name.startswith("~/") else path.parent / name
    folder = Path(pattern.anchor)
    return sorted(found for found in folder.glob(str(pattern.relative_to(folder))) if found.is_file())


def _public_blobs(files: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the public halves that lie beside key files."""
    blobs = []
    for name in files:
        with suppress(OSError, IndexError, binascii.Error):
            blobs.append(base64.b64decode(Path(f"{name.removesuffix('.pub')}.pub").read_text("utf-8").split()[1]))
    return tuple(blobs)
