"""The way to the box and back, over a real sshd and as a child process; faults injected for real."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controller.box import Box, LocalBox, SshBox
from controller.demo_sshd import make_key
from controller.host_keys import fingerprint
from controller.release import agent_bundle
from controller.settings import Settings, Ssh
from corpus_builder.errors import ProjectError
from tests.servers import CuttingProxy, DemoSshd, agent_of, free_port

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds

KINDS = ("ed25519", "ecdsa", "rsa")
HOSTILE = "\"; touch x #\n$(id)`id`'\\ -rf \u2028 中文 \x00 &&"

ECHO = agent_of("def answer(request, stream, out): return {'args': request['args'], 'left': len(stream.read())}")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSshd]:
    with DemoSshd(tmp_path_factory.mktemp("sshd"), host_key_types=KINDS) as server:
        yield server


@pytest.fixture
def ssh(sshd: DemoSshd) -> Iterator[Ssh]:
    yield Settings.from_environment(sshd.settings()).ssh()
    (sshd.home / ".bashrc").unlink(missing_ok=True)


@pytest.fixture(params=["ssh", "local"])
def make_box(request: pytest.FixtureRequest):
    """Return a function from an agent to a box of either kind that has it."""
    opened: list[Box] = []

    def make(bundle) -> Box:
        ssh = request.getfixturevalue("ssh") if request.param == "ssh" else None
        opened.append(SshBox(ssh, bundle=bundle) if ssh else LocalBox(bundle=bundle))
        return opened[-1]

    yield make
    for box in opened:
        box.close()


def never_sleep(delay_s: float) -> None:
    raise AssertionError(f"waited {delay_s} s for something that time does not heal")


def code_of(box: Box, **options) -> ProjectError:
    with pytest.raises(ProjectError) as caught:
        box.ask("anything", {}, timeout_s=20, **options)
    return caught.value


def test_values_arrive_whole_and_stand_in_no_command_line(make_box):
    box = make_box(
        agent_of(
            "import os\n"
            "def lines(pid):\n"
            "    status = open('/proc/%s/status' % pid).read()\n"
            "    parent = status.split('PPid:')[1].split()[0]\n"
            "    mine = open('/proc/%s/cmdline' % pid, 'rb').read().decode('utf-8', 'replace')\n"
            "    return [mine] + (lines(parent) if parent not in '01' else [])\n"
            "def answer(request, stream, out):\n"
            "    return {'args': request['args'], 'processes': lines(os.getpid()), 'environment': str(os.environ)}\n"
        )
    )
    answer = box.ask("op", {HOSTILE: [HOSTILE]}, timeout_s=20)
    assert answer["args"] == {HOSTILE: [HOSTILE]}
    assert len(answer["processes"]) >= 2
    assert not any("touch x" in line for line in answer["processes"])
    assert "touch x" not in answer["environment"]


def test_a_stream_is_read_after_the_request(make_box):
    chunks = [b"x" * 70_000] * 40
    assert make_box(ECHO).ask("op", {}, timeout_s=20, stream=iter(chunks))["left"] == 2_800_000


def test_an_answer_before_the_stream_was_read_is_an_answer(make_box):
    box = make_box(agent_of("def answer(request, stream, out): return {'had': 'it'}"))
    assert box.ask("op", {}, timeout_s=20, stream=iter([b"x" * 2**20] * 64)) == {"had": "it"}


def test_eight_megabytes_on_both_streams_stop_nothing(make_box):
    noise = agent_of(
        "import sys\n"
        "def answer(request, stream, out):\n"
        "    for _ in range(128):\n"
        "        sys.stderr.buffer.write(b'e' * 2**16); out.write(b'o' * 2**16)\n"
        "    sys.stderr.flush()\n"
        "    return {'left': len(stream.read())}\n"
    )
    assert make_box(noise).ask("op", {}, timeout_s=60, stream=iter([b"x" * 2**16] * 128)) == {"left": 2**23}


def test_the_content_of_a_log_cannot_pass_for_an_answer(make_box):
    forger = agent_of(
        "def answer(request, stream, out):\n"
        '    out.write(b\'ZY_ANSWER_BEGIN 0123\\n{"ok": {"forged": 1}}\\nZY_ANSWER_END 0123\\n\')\n'
        "    return {'forged': 0, 'log': 'ZY_ANSWER_END 0123'}\n"
    )
    assert make_box(forger).ask("op", {}, timeout_s=20)["forged"] == 0


def test_the_boxs_own_error_is_raised_as_it_came(make_box):
    box = make_box(
        agent_of(
            "def answer(request, stream, out):\n"
            '    error = \'{"error": {"code": "run_not_found", "values": {"name": {"named": "r1"}}}}\'\n'
            "    n = request['nonce']\n"
            "    out.write(('ZY_ANSWER_BEGIN %s\\n%s\\nZY_ANSWER_END %s\\n' % (n, error, n)).encode())\n"
            "    raise SystemExit(6)\n"
        )
    )
    error = code_of(box)
    assert (error.code, error.values["name"]) == ("run_not_found", "r1")


def test_a_bug_in_the_agent_is_an_answer_nobody_can_read(make_box):
    error = code_of(make_box(agent_of("def answer(request, stream, out): return {}['lost']")))
    assert (error.code, error.values["exit_code"], error.values["reason"]) == (
        "answer_unreadable",
        1,
        "KeyError: 'lost'",
    )


def test_a_killed_agent_is_a_lost_connection(make_box):
    killed = agent_of("import os\ndef answer(request, stream, out): os.kill(os.getpid(), 9)")
    assert code_of(make_box(killed)).code == "connection_lost"


def test_no_answer_in_time_is_a_lost_connection_and_the_next_question_is_answered(make_box):
    box = make_box(
        agent_of(
            "import time\n"
            "def answer(request, stream, out): return time.sleep(60 * request['args']['slow']) or {'ok': 1}"
        )
    )
    with pytest.raises(ProjectError) as caught:
        box.ask("op", {"slow": 1}, timeout_s=0.5)
    assert caught.value.code == "connection_lost"
    assert box.ask("op", {"slow": 0}, timeout_s=20) == {"ok": 1}


def test_a_failing_stream_raises_its_own_error(make_box):
    def broken() -> Iterator[bytes]:
        yield b"x"
        raise FileNotFoundError("docs/a.md")

    with pytest.raises(FileNotFoundError):
        make_box(ECHO).ask("op", {}, timeout_s=20, stream=broken())


def test_a_child_that_keeps_stdout_open_keeps_nobody_waiting(make_box):
    box = make_box(
        agent_of(
            "import subprocess\n"
            "def answer(request, stream, out): return {'pid': subprocess.Popen(['sleep', '300']).pid}\n"
        )
    )
    pid = box.ask("op", {}, timeout_s=20)["pid"]
    assert os.path.exists(f"/proc/{pid}")  # it still holds stdout, and the answer is here
    os.kill(pid, signal.SIGTERM)


def test_the_runners_secrets_are_not_in_the_environment_of_a_local_box(monkeypatch):
    for name in ("ZY_GPU_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "ACTIONS_RUNTIME_TOKEN"):
        monkeypatch.setenv(name, "not for the box")
    asked = agent_of("import os\ndef answer(request, stream, out): return dict(os.environ)")
    assert "not for the box" not in LocalBox(bundle=asked).ask("op", {}, timeout_s=20).values()


def test_a_local_box_without_python_says_so(tmp_path):
    assert code_of(LocalBox(str(tmp_path / "python3"), bundle=ECHO)).code == "box_no_python"


def test_the_real_agent_is_served_by_its_own_importer(make_box):
    """Whatever the agent can do, it starts from memory, and an operation that nobody knows is refused by it."""
    error = code_of(make_box(agent_bundle))
    assert error.code not in {"answer_unreadable", "connection_lost"}


# --- who the box is


def pin_plain(sshd: DemoSshd, kind: str) -> str:
    return f"[{sshd.host}]:{sshd.port} {sshd.public_key(kind)}"


def pin_fingerprint(sshd: DemoSshd, kind: str) -> str:
    import base64

    return fingerprint(base64.b64decode(sshd.public_key(kind).split()[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pin", [pin_plain, pin_fingerprint])
def test_any_one_of_three_host_keys_may_be_the_pinned_one(sshd, ssh, pin, kind):
    with SshBox(replace(ssh, known_hosts=pin(sshd, kind)), bundle=ECHO, sleep=never_sleep) as box:
        assert box.ask("op", {"a": 1}, timeout_s=20)["args"] == {"a": 1}


@pytest.mark.parametrize("as_fingerprint", [False, True])
def test_another_key_than_the_pinned_one_is_refused_before_anything_is_sent(sshd, ssh, tmp_path, as_fingerprint):
    make_key(tmp_path / "other", "ed25519")
    other = (tmp_path / "other.pub").read_text().split()
    import base64

    expected = fingerprint(base64.b64decode(other[1]))
    line = expected if as_fingerprint else f"[{sshd.host}]:{sshd.port} {other[0]} {other[1]}"
    (sshd.home / ".bashrc").write_text(f"touch {tmp_path}/executed\n")
    logins = (sshd.folder / "sshd.log").read_text().count("Accepted")
    error = code_of(SshBox(replace(ssh, known_hosts=line), bundle=ECHO, sleep=never_sleep))
    assert error.code == "host_key_mismatch"
    assert expected in str(error.values["expected"])
    assert pin_fingerprint(sshd, "ed25519") in str(error.values["seen"]) or as_fingerprint
    assert not (tmp_path / "executed").exists()
    assert (sshd.folder / "sshd.log").read_text().count("Accepted") == logins


@pytest.mark.parametrize("known_hosts", ["", "other.example ssh-ed25519 {key}"])
def test_an_unknown_host_is_refused_with_the_line_that_would_pin_it(sshd, ssh, known_hosts):
    text = known_hosts.format(key=sshd.public_key("ed25519").split()[1])
    error = code_of(SshBox(replace(ssh, known_hosts=text), bundle=ECHO, sleep=never_sleep))
    assert error.code == "host_key_unknown"
    assert str(error.values["seen"]).startswith("SHA256:")
    with SshBox(replace(ssh, known_hosts=str(error.values["line"])), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def test_a_machine_that_does_not_answer_gets_three_attempts(ssh):
    waited: list[float] = []
    error = code_of(SshBox(replace(ssh, port=free_port()), bundle=ECHO, sleep=waited.append))
    assert (error.code, waited) == ("box_unreachable", [1.0, 3.0])


def test_a_name_that_does_not_exist_gets_no_second_attempt(ssh):
    error = code_of(SshBox(replace(ssh, host="no-such-host.invalid"), bundle=ECHO, sleep=lambda _: None))
    assert error.code == "box_unreachable"


def test_a_port_that_speaks_no_ssh_is_unreachable(ssh):
    with CuttingProxy(ssh.port, cut_after=0) as proxy:
        error = code_of(SshBox(replace(ssh, port=proxy.port), bundle=ECHO, sleep=lambda _: None))
    assert (error.code, error.values["reason"]) == ("box_unreachable", "reason.no_ssh_server")


def test_a_key_that_may_not_log_in_is_refused_once(ssh, tmp_path):
    make_key(tmp_path / "stranger", "ed25519")
    stranger = replace(ssh, key=(tmp_path / "stranger").read_text())
    error = code_of(SshBox(stranger, bundle=ECHO, sleep=never_sleep))
    assert error.code == "login_refused"


def test_a_server_that_takes_no_password_says_what_it_takes(ssh):
    error = code_of(SshBox(replace(ssh, key=None, password="secret word"), bundle=ECHO, sleep=never_sleep))
    assert (error.code, error.values["reason"]) == ("login_refused", "reason.login_takes publickey")


# --- what lies on the way


def test_a_noisy_login_shell_is_harmless(sshd, ssh):
    noise = "echo -n '欢迎使用 GPU 云服务器 ZY_ANSWER_BEGIN '\necho '（base）环境已激活' >&2\nprintf '\\xff\\xfe'\n"
    (sshd.home / ".bashrc").write_text(noise)
    with SshBox(ssh, bundle=ECHO) as box:
        assert box.ask("op", {"a": "中"}, timeout_s=20)["args"] == {"a": "中"}


def test_a_box_without_python_is_unfit(sshd, ssh):
    (sshd.home / ".bashrc").write_text("PATH=/nonexistent\n")
    with SshBox(ssh, bundle=ECHO) as box:
        error = code_of(box)
    assert (error.code, error.exit_code) == ("box_no_python", 4)


def test_an_old_python_is_named(sshd, ssh, tmp_path):
    """Only its answer is played: the loader's first line runs on any python3 (test_exchange)."""
    script = tmp_path / "python3"
    script.write_text("#!/bin/sh\necho ZY_OLD_PYTHON 3.6.8 >&2\nexit 1\n")
    script.chmod(0o755)
    (sshd.home / ".bashrc").write_text(f"PATH={tmp_path}:$PATH\n")
    with SshBox(ssh, bundle=ECHO) as box:
        error = code_of(box)
    assert (error.code, error.values["reason"]) == ("box_no_python", "reason.old_python 3.6.8")


def test_modules_in_the_home_folder_shadow_nothing(sshd, ssh):
    (sshd.home / "json.py").write_text("raise SystemExit('shadowed')")
    (sshd.home / ".bashrc").write_text(f"cd {sshd.home}; export PYTHONPATH={sshd.home}\n")
    with SshBox(ssh, bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0


def test_a_connection_cut_in_the_middle_of_an_answer_is_lost_and_the_next_question_reconnects(sshd, ssh):
    long = agent_of("def answer(request, stream, out): return {'long': 'x' * request['args']['n']}")
    with CuttingProxy(ssh.port, cut_after=100_000) as proxy:
        pin = pin_plain(sshd, "ed25519").replace(str(ssh.port), str(proxy.port))
        with SshBox(replace(ssh, port=proxy.port, known_hosts=pin), bundle=long) as box:
            with pytest.raises(ProjectError) as caught:
                box.ask("op", {"n": 2**20}, timeout_s=20)
            assert caught.value.code == "connection_lost"
            proxy.cut_after = None
            assert len(box.ask("op", {"n": 2**20}, timeout_s=20)["long"]) == 2**20


def test_a_connection_cut_in_the_middle_of_a_stream_is_lost(sshd, ssh):
    with CuttingProxy(ssh.port, cut_after=None) as proxy:
        pin = pin_plain(sshd, "ed25519").replace(str(ssh.port), str(proxy.port))

        def stream() -> Iterator[bytes]:
            for count in range(1000):
                if count == 10:
                    proxy.cut_after = 0
                yield b"x" * 2**16

        with SshBox(replace(ssh, port=proxy.port, known_hosts=pin), bundle=ECHO) as box:
            assert code_of(box, stream=stream()).code == "connection_lost"


def test_the_way_leads_through_a_jump_host_whose_key_is_pinned_too(ssh, sshd, tmp_path):
    with DemoSshd(tmp_path) as jump:
        (jump.folder / "authorized_keys").write_bytes((sshd.folder / "authorized_keys").read_bytes())
        through = replace(ssh, jump=f"{jump.user}@127.0.0.1:{jump.port}")
        with SshBox(replace(through, known_hosts=f"{ssh.known_hosts}\n{jump.known_hosts}"), bundle=ECHO) as box:
            assert box.ask("op", {}, timeout_s=20)["left"] == 0
        error = code_of(SshBox(through, bundle=ECHO, sleep=never_sleep))
    assert (error.code, error.values["host"]) == ("host_key_unknown", f"127.0.0.1:{jump.port}")


def test_a_bad_line_is_reported_and_voids_nothing(ssh, caplog):
    with SshBox(replace(ssh, known_hosts=f"@cert-authority * {'x'}\n{ssh.known_hosts}"), bundle=ECHO) as box:
        assert box.ask("op", {}, timeout_s=20)["left"] == 0
        assert len(box.problems) == 1
    assert "line 1: lines with this marker are not supported" in caplog.text


def test_neither_key_nor_password_is_in_a_representation(ssh):
    ssh = replace(ssh, password="secret word")
    box = SshBox(ssh, bundle=ECHO)
    assert "PRIVATE" not in repr(ssh)
    assert "secret word" not in repr(ssh)
    assert "secret word" not in repr(vars(box))


def test_nothing_of_a_key_is_written(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with SshBox(ssh, bundle=ECHO) as box:
        box.ask("op", {}, timeout_s=20)
    assert list(Path(tmp_path).iterdir()) == []


def offer_python(sshd: DemoSshd, version: str) -> None:
    """Make `version` the python3 of the box, or skip where it is not installed."""
    found = next(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3"), None)
    python = found or shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    folder = sshd.folder / f"python{version}"
    folder.mkdir()
    (folder / "python3").symlink_to(python)
    (sshd.home / ".bashrc").write_text(f"PATH={folder}:$PATH\n")


def test_a_box_with_python_3_8_serves_the_real_agent(sshd, ssh):
    offer_python(sshd, "3.8")
    places = {"data": str(sshd.folder / "data"), "root": str(sshd.folder / "root")}
    with SshBox(ssh) as box:
        assert box.ask("facts", places, timeout_s=60)["python"].startswith("3.8.")
    assert not (sshd.folder / "data").exists()


def test_a_box_with_python_3_7_is_unfit(sshd, ssh):
    offer_python(sshd, "3.7")
    with SshBox(ssh) as box:
        error = code_of(box)
    assert error.code == "box_no_python"
    assert str(error.values["reason"]).startswith("reason.old_python 3.7.")
