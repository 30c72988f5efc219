"""The way to the box under bad networks, odd logins and a laptop's own ssh: a real sshd, real shells, a real agent."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from controller.box import SshBox
from controller.demo_sshd import make_key
from controller.dial import Dialed
from controller.host_keys import fingerprint
from controller.link import Patience, learn_host_keys
from controller.settings import Settings, Ssh
from controller.ssh_config import is_laptop, laptop_ssh
from corpus_builder.errors import ProjectError
from tests.servers import DemoSshd, agent_of, free_port
from tests.tcp_proxy import TcpProxy
from tests.test_architecture import ROOT

pytestmark = pytest.mark.e2e

KINDS = ("ed25519", "ecdsa", "rsa")
ECHO = agent_of("def answer(request, stream, out): return {'args': request['args'], 'left': len(stream.read())}")
SLOW = agent_of("import time\ndef answer(request, stream, out): return time.sleep(600) or {}")
QUICK = Patience(ask_after_s=0.2, dead_after_s=0.8)
NOISE = "欢迎使用 GPU 云服务器 ZY_ANSWER_BEGIN（base）"


class OddSshd(DemoSshd):
    """A server with more lines in its configuration, the first of which counts."""

    lines: Sequence[str] = ()

    def _config(self) -> str:
        return "\n".join([*self.lines, super()._config()])


@contextmanager
def odd_sshd(folder: Path, *lines: str, **options: object) -> Iterator[OddSshd]:
    server = OddSshd(folder, **options)  # type: ignore[arg-type]
    server.lines = lines
    with server:
        yield server


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSshd]:
    with DemoSshd(tmp_path_factory.mktemp("sshd"), host_key_types=KINDS) as server:
        yield server


def ssh_of(sshd: DemoSshd, *, port: int | None = None) -> Ssh:
    """Return the way to a server, or to a proxy before it whose port is pinned instead."""
    ssh = Settings.from_environment(sshd.settings()).ssh()
    if port is None:
        return ssh
    return replace(ssh, port=port, known_hosts=ssh.known_hosts.replace(f":{ssh.port} ", f":{port} "))


def never_sleep(delay_s: float) -> None:
    raise AssertionError(f"waited {delay_s} s for something that time does not heal")


def refusal(box: SshBox, **options: object) -> ProjectError:
    with box, pytest.raises(ProjectError) as caught:
        box.ask("op", {}, timeout_s=300, **options)  # type: ignore[arg-type]
    return caught.value


# --- bad networks


def then_silence(proxy: TcpProxy) -> Iterator[bytes]:
    yield b"x"
    proxy.fall_silent()


def test_a_link_that_falls_silent_is_noticed_while_an_answer_is_awaited(sshd):
    """The proxy's own kernel goes on acknowledging: only a question that stays unanswered tells."""
    with TcpProxy(sshd.port) as proxy:
        box = SshBox(ssh_of(sshd, port=proxy.port), bundle=SLOW, patience=QUICK)
        error = refusal(box, stream=then_silence(proxy))
    assert (error.code, error.values["reason"]) == ("connection_lost", "reason.link_cut")


def test_a_link_that_falls_silent_is_noticed_in_the_middle_of_a_stream(sshd):
    with TcpProxy(sshd.port) as proxy:

        def stream() -> Iterator[bytes]:
            for count in range(4000):
                if count == 10:
                    proxy.fall_silent()
                yield b"x" * 2**16

        box = SshBox(ssh_of(sshd, port=proxy.port), bundle=ECHO, patience=QUICK)
        assert refusal(box, stream=stream()).code == "connection_lost"


def test_a_slow_answer_over_a_living_link_is_no_dead_link(sshd):
    slow = agent_of("import time\ndef answer(request, stream, out): return time.sleep(3) or {'here': 1}")
    with SshBox(ssh_of(sshd), bundle=slow, patience=QUICK) as box:
        assert box.ask("op", {}, timeout_s=60) == {"here": 1}


def test_after_silence_the_next_question_gets_a_new_link(sshd):
    echo = agent_of("def answer(request, stream, out): return {'left': len(stream.read())}")
    with TcpProxy(sshd.port) as proxy, SshBox(ssh_of(sshd, port=proxy.port), bundle=echo, patience=QUICK) as box:
        with pytest.raises(ProjectError):
            box.ask("op", {}, timeout_s=300, stream=then_silence(proxy))
        proxy.heal()
        assert box.ask("op", {}, timeout_s=20) == {"left": 0}
        assert proxy.accepted == 2


@pytest.mark.parametrize("came_back", [1, 200, 1200])
def test_a_connection_reset_anywhere_in_the_login_is_worth_another_try(sshd, came_back):
    """1 byte: in the version line; 200: in the key exchange; later: in the login. None of it speaks of the key."""
    with TcpProxy(sshd.port) as proxy:
        proxy.drop_after(came_back)
        waited: list[float] = []

        def heal_later(delay_s: float) -> None:
            waited.append(delay_s)
            proxy.heal()

        with SshBox(ssh_of(sshd, port=proxy.port), bundle=ECHO, sleep=heal_later) as box:
            assert box.ask("op", {}, timeout_s=20)["left"] == 0
    assert waited == [1.0]


def test_a_connection_that_is_reset_every_time_is_given_up_after_three_attempts(sshd):
    with TcpProxy(sshd.port) as proxy:
        proxy.drop_after(200)
        waited: list[float] = []
        error = refusal(SshBox(ssh_of(sshd, port=proxy.port), bundle=ECHO, sleep=waited.append))
        assert (error.code, waited, proxy.accepted) == ("box_unreachable", [1.0, 3.0], 3)


def test_a_wrong_key_and_a_refused_login_get_no_second_attempt(sshd, tmp_path):
    make_key(tmp_path / "other", "ed25519")
    with TcpProxy(sshd.port) as proxy:
        ssh = ssh_of(sshd, port=proxy.port)
        line = f"[127.0.0.1]:{proxy.port} " + " ".join((tmp_path / "other.pub").read_text().split()[:2])
        mismatch = refusal(SshBox(replace(ssh, known_hosts=line), bundle=ECHO, sleep=never_sleep))
        stranger = replace(ssh, key=(tmp_path / "other").read_text())
        refused = refusal(SshBox(stranger, bundle=ECHO, sleep=never_sleep))
        assert (mismatch.code, refused.code, proxy.accepted) == ("host_key_mismatch", "login_refused", 2)


def test_a_connection_that_was_begun_early_is_the_one_that_is_used(sshd):
    with TcpProxy(sshd.port) as proxy:
        ssh = ssh_of(sshd, port=proxy.port)
        dialed = Dialed("127.0.0.1", proxy.port, ssh.known_hosts)
        with SshBox(ssh, bundle=ECHO, sleep=never_sleep, dialed=dialed) as box:
            assert box.ask("op", {}, timeout_s=20)["left"] == 0
            assert proxy.accepted == 1
            proxy.drop_all()
            assert box.ask("op", {}, timeout_s=20)["left"] == 0  # the next one is an ordinary one
    assert proxy.accepted == 2


def test_an_early_connection_that_failed_counts_as_the_first_attempt(sshd):
    waited: list[float] = []
    port = free_port()
    dialed = Dialed("127.0.0.1", port, "")
    box = SshBox(replace(ssh_of(sshd), port=port), bundle=ECHO, sleep=waited.append, dialed=dialed)
    assert (refusal(box).code, waited) == ("box_unreachable", [1.0, 3.0])


@pytest.mark.parametrize(("lang", "code"), [("en", 0), ("de", 2)])
def test_a_quick_action_connects_once_and_early(sshd, tmp_path, lang, code):
    """The connection stands before the settings are checked; where they are wrong nobody logs in over it."""
    with TcpProxy(sshd.port) as proxy:
        ssh = ssh_of(sshd, port=proxy.port)
        settings = sshd.settings() | {
            "ZY_GPU_PORT": str(proxy.port),
            "ZY_GPU_KNOWN_HOSTS": ssh.known_hosts,
            "ZY_CODING_TRAIN_DATA": str(tmp_path / "data"),
            "ZY_CODING_TRAIN_ROOT": str(tmp_path / "root"),
            "ZY_LANG": lang,
        }
        log = sshd.folder / "sshd.log"
        logins = log.read_text().count("Accepted")
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", "status"],
            env=settings | {"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, proxy.accepted) == (code, 1), done.stderr
        assert log.read_text().count("Accepted") - logins == (code == 0)


@pytest.mark.parametrize("action", ["status", "doctor"])
def test_what_is_no_ssh_server_is_said_without_a_traceback(sshd, tmp_path, action):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    there, _ = server.accept()
                    with there:
                        there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        settings = sshd.settings() | {"ZY_GPU_PORT": str(server.getsockname()[1]), "ZY_LANG": "en"}
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", action],
            env=settings | {"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        server.shutdown(socket.SHUT_RDWR)
    assert (done.returncode, "no SSH server" in done.stdout + done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr


# --- odd logins


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "fish", "tcsh", "dash"])
def test_every_login_shell_passes_the_request_on_unchanged(tmp_path, shell):
    """ForceCommand hands sshd's own words to the shell, as the login shell of the account would get them."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} on this machine")
    home = tmp_path / "home"
    say = f"echo -n '{NOISE}'\n"
    for name in (".bashrc", ".zshenv", ".tcshrc", ".config/fish/config.fish"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(say, "utf-8")
    force = f'ForceCommand exec {found} -c "$SSH_ORIGINAL_COMMAND"'
    with odd_sshd(tmp_path / "ssh", force, home=home) as server, SshBox(ssh_of(server), bundle=ECHO) as box:
        assert box.ask("op", {"a": "中 '\"$x!"}, timeout_s=20, stream=[b"x" * 10_000]) == {
            "args": {"a": "中 '\"$x!"},
            "left": 10_000,
        }


CONDA = """
__conda_setup="$(echo 'export CONDA_SHLVL=1')"
eval "$__conda_setup"
conda() { echo "环境 $1"; }
conda activate base
echo '（base）' >&2
printf '\\033]0;标题\\007\\xc4\\xe3\\xba\\xc3\\xff\\xfe'
stty -ixon
cd /
"""


def test_conda_and_broken_bytes_in_bashrc_are_harmless(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text(CONDA, "utf-8")
    with DemoSshd(tmp_path / "ssh", home=home) as server, SshBox(ssh_of(server), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def test_a_bashrc_that_becomes_another_shell_is_harmless(tmp_path):
    """The oh-my-zsh habit: `exec zsh` in .bashrc; sshd's command then goes to nobody, and that is said."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("exec true\n")
    with DemoSshd(tmp_path / "ssh", home=home) as server:
        error = refusal(SshBox(ssh_of(server), bundle=ECHO))
    assert (error.code, error.values["exit_code"]) == ("answer_unreadable", 0)


def test_a_banner_in_any_encoding_is_harmless(tmp_path):
    banner = tmp_path / "banner"
    banner.write_bytes("警告：未经授权禁止登录\r\n".encode("gbk") + NOISE.encode() + b"\xff\xfe\n" * 200)
    with odd_sshd(tmp_path / "ssh", f'Banner "{banner}"') as server, SshBox(ssh_of(server), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def can_unshare() -> bool:
    words = ["unshare", "--mount", "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def password_sshd(tmp_path: Path) -> Iterator[OddSshd]:
    """A server that takes passwords only; its /etc/shadow is its own, in a mount namespace of its own."""
    if not can_unshare() or shutil.which("openssl") is None:
        pytest.skip("needs root, openssl, and a mount namespace for a shadow file of its own")
    shadow = tmp_path / "shadow"
    words = ["openssl", "passwd", "-6", "-stdin"]
    hashed = subprocess.run(words, input="正确的 password\n", capture_output=True, check=True, text=True).stdout.strip()
    shadow.write_text(f"root:{hashed}:19000:0:99999:7:::\n")

    class WithShadow(OddSshd):
        def _start(self, program: str) -> None:
            wrapper = tmp_path / "sshd"
            wrapper.write_text(f'#!/bin/sh\nmount --bind "{shadow}" /etc/shadow && exec {program} "$@"\n')
            wrapper.chmod(0o700)
            outer = tmp_path / "outer"
            outer.write_text(f'#!/bin/sh\nexec unshare --mount "{wrapper}" "$@"\n')
            outer.chmod(0o700)
            super()._start(str(outer))

    server = WithShadow(tmp_path / "ssh")
    server.lines = ("PasswordAuthentication yes", "PubkeyAuthentication no", "PermitRootLogin yes")
    with server:
        yield server


def test_a_password_opens_a_box_that_offers_nothing_else(password_sshd):
    ssh = replace(ssh_of(password_sshd), key=None, password="正确的 password")
    with SshBox(ssh, bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0
    with SshBox(replace(ssh, key=ssh_of(password_sshd).key), bundle=ECHO) as box:  # a key beside it does no harm
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def test_a_wrong_password_is_refused_once_and_never_said(password_sshd):
    error = refusal(
        SshBox(replace(ssh_of(password_sshd), key=None, password="falsch-geheim"), bundle=ECHO, sleep=never_sleep)
    )
    assert error.code == "login_refused"
    assert "falsch" not in str(error)


def as_one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def as_from_a_form(text: str) -> str:
    return "\r\n".join("   " + line for line in text.strip().splitlines())


@pytest.mark.parametrize("form", [str, as_one_line, as_from_a_form, str.strip])
@pytest.mark.parametrize(
    "words", ["ed25519", "ecdsa", "rsa", "rsa -m PEM", "ecdsa -m PEM", "rsa -m PKCS8", "ed25519 locked"]
)
def test_every_kind_of_key_logs_in_however_it_was_pasted(sshd, tmp_path, words, form):
    """RSA signs by rsa-sha2: this sshd takes nothing older."""
    kind, _, more = words.partition(" ")
    passphrase = "open sesame" if more == "locked" else ""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(tmp_path / "key")]
    command += [] if passphrase else more.split()
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    with (sshd.folder / "authorized_keys").open("a") as file:
        file.write((tmp_path / "key.pub").read_text())
    ssh = replace(ssh_of(sshd), key=form((tmp_path / "key").read_text()), passphrase=passphrase or None)
    with SshBox(ssh, bundle=ECHO, sleep=never_sleep) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_hashed_names_of_another_port_pin_the_host(sshd, tmp_path, kind):
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {sshd.public_key(kind)}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], capture_output=True, check=True)
    assert known.read_text().startswith("|1|")
    text = f"junk\n@cert-authority * ssh-ed25519 x\n{known.read_text()}"
    with SshBox(replace(ssh_of(sshd), known_hosts=text), bundle=ECHO, sleep=never_sleep) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0
        assert len(box.problems) == 2


# --- learning the keys


def test_every_offered_key_is_learnt_without_a_login(sshd):
    logins = (sshd.folder / "sshd.log").read_text().count("Accepted")
    keys = learn_host_keys(sshd.host, sshd.port)
    assert {f"{key.get_name()} {key.get_base64()}" for key in keys} == {sshd.public_key(kind) for kind in KINDS}
    assert (sshd.folder / "sshd.log").read_text().count("Accepted") == logins


# --- a laptop's own ssh


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "laptop" / ".ssh").mkdir(parents=True)
    return tmp_path / "laptop"


def laptop(home: Path, host: str, **environ: str) -> Ssh:
    around = {"HOME": str(home), "ZY_GPU_HOST": host, **environ}
    settings = Settings.from_environment(around)
    assert is_laptop(settings, around)
    return laptop_ssh(settings, around)


def write_ssh(home: Path, config: str, **files: str) -> None:
    for name, text in {"config": config, **files}.items():
        (home / ".ssh" / name).write_text(text)
        (home / ".ssh" / name).chmod(0o600)


def test_an_alias_leads_to_host_port_user_key_and_the_persons_own_pins(sshd, home):
    noise = "@cert-authority * ssh-ed25519 x\nold.example ssh-dss AAAA\n"
    write_ssh(
        home,
        f"Host gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {sshd.user}\n  IdentityFile {home}/.ssh/mine\n",
        mine=sshd.private_key,
        known_hosts=noise + sshd.known_hosts,
    )
    with SshBox(laptop(home, "gpu"), bundle=ECHO) as box:
        assert box.problems == ()
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def test_a_host_that_the_persons_known_hosts_does_not_hold_is_refused(sshd, home):
    write_ssh(home, f"Host gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n", id_ed25519=sshd.private_key)
    assert refusal(SshBox(laptop(home, "gpu"), bundle=ECHO, sleep=never_sleep)).code == "host_key_unknown"


def test_a_settings_pin_wins_over_the_persons_known_hosts(sshd, home, tmp_path):
    make_key(tmp_path / "other", "ed25519")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    write_ssh(
        home,
        f"Host gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n",
        id_ed25519=sshd.private_key,
        known_hosts=f"[127.0.0.1]:{sshd.port} {other}\n",
    )
    assert refusal(SshBox(laptop(home, "gpu"), bundle=ECHO, sleep=never_sleep)).code == "host_key_mismatch"
    with SshBox(laptop(home, "gpu", ZY_GPU_KNOWN_HOSTS=sshd.known_hosts), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real ssh-agent; its socket is in the environment."""
    sock = str(tmp_path / "agent.sock")
    with subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL) as process:
        try:
            while not os.path.exists(sock) and process.poll() is None:
                os.sched_yield()
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            yield sock
        finally:
            process.terminate()


@pytest.mark.parametrize("is_files_only", [False, True])
def test_a_key_that_only_the_agent_can_open_logs_in(sshd, home, agent, is_files_only):
    """The file beside it is locked by a passphrase that nobody has; IdentitiesOnly picks by its .pub."""
    key = home / ".ssh" / "mine"
    write_ssh(home, "", mine=sshd.private_key, known_hosts=sshd.known_hosts)
    subprocess.run(["ssh-add", "-q", str(key)], check=True, capture_output=True)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "lost words", "-f", str(key)], check=True, capture_output=True)
    only = f"  IdentitiesOnly {'yes' if is_files_only else 'no'}\n  IdentityFile {key}\n"
    write_ssh(home, f"Host gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n{only}")
    (home / ".ssh" / "mine.pub").write_text((sshd.folder / "user_ed25519.pub").read_text())
    with SshBox(laptop(home, "gpu", SSH_AUTH_SOCK=agent), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0
    error = refusal(SshBox(laptop(home, "gpu"), bundle=ECHO, sleep=never_sleep))
    assert (error.code, error.values["reason"]) == ("login_refused", "reason.key_locked")


def test_proxy_jump_by_alias_from_an_included_file_is_gone_through_with_its_own_key(sshd, home, tmp_path):
    with DemoSshd(tmp_path / "jump") as jump:
        write_ssh(
            home,
            f"Include conf.d/*\nHost gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump door\n",
            id_ed25519=sshd.private_key,
            door_key=jump.private_key,
            known_hosts=sshd.known_hosts + jump.known_hosts,
        )
        (home / ".ssh" / "conf.d").mkdir()
        (home / ".ssh" / "conf.d" / "door").write_text(
            f"Host door\n  HostName 127.0.0.1\n  Port {jump.port}\n  IdentityFile {home}/.ssh/door_key\n"
        )
        ssh = laptop(home, "gpu")
        assert [port for _, _, port in ssh.route()] == [jump.port, sshd.port]
        with SshBox(ssh, bundle=ECHO) as box:
            assert box.ask("op", {}, timeout_s=20)["left"] == 0
        assert "Accepted publickey" in (jump.folder / "sshd.log").read_text()


def test_nothing_to_log_in_with_is_said_as_that(sshd, home):
    write_ssh(home, f"Host gpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n", known_hosts=sshd.known_hosts)
    error = refusal(SshBox(laptop(home, "gpu"), bundle=ECHO, sleep=never_sleep))
    assert (error.code, error.values["reason"]) == ("login_refused", "reason.login_nothing")


def test_the_refusal_of_a_changed_key_shows_both_fingerprints_and_how_to_learn_the_right_one(sshd):
    from corpus_builder.say import LANGUAGES, format_error

    pin = "SHA256:" + "A" * 43
    error = refusal(SshBox(replace(ssh_of(sshd), known_hosts=pin), bundle=ECHO, sleep=never_sleep))
    shown = [fingerprint(key.asbytes()) for key in learn_host_keys(sshd.host, sshd.port)]
    for lang in LANGUAGES:
        said = format_error(error, lang)
        assert pin in said
        assert any(one in said for one in shown)
        assert "ssh-keygen -lf" in said


def test_a_port_that_nobody_listens_on_is_tried_again(sshd):
    waited: list[float] = []
    error = refusal(SshBox(replace(ssh_of(sshd), port=free_port()), bundle=ECHO, sleep=waited.append))
    assert (error.code, waited) == ("box_unreachable", [1.0, 3.0])
