"""doctor: each setting alone, all problems at once, the next step in both languages; over a real sshd and storage."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.box import Box, LocalBox
from controller.demo_sshd import make_key
from controller.invocation import Options, Surroundings, perform
from controller.settings import SETTINGS, Settings
from corpus_builder.say import LANGUAGES
from tests.servers import DemoSshd, Nanio, free_port, running_nanio

pytestmark = pytest.mark.e2e

KINDS = ("ed25519", "ecdsa", "rsa")
KEY_OBJECT = "dialogs/五月.zip"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSshd]:
    with DemoSshd(tmp_path_factory.mktemp("sshd"), host_key_types=KINDS) as server:
        yield server


@pytest.fixture
def world(sshd: DemoSshd, tmp_path: Path) -> dict[str, str]:
    """Settings with which everything is well, on a machine that has a base model and the dialogs."""
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    (base / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "dialogs.zip").write_bytes(b"PK")
    return {
        **sshd.settings(),
        "HOME": str(tmp_path),
        "ZY_LANG": "en",
        "ZY_CODING_TRAIN_DATA": str(tmp_path / "data"),
        "ZY_CODING_TRAIN_ROOT": str(tmp_path / "root"),
        "ZY_BASE_MODEL_DIR": str(base),
    }


class Seen:
    """What one call said: its exit code, its JSON, and everything that was written anywhere."""

    def __init__(
        self,
        environ: dict[str, str],
        tmp_path: Path,
        open_box: Callable[[str, Settings], Box] | None = None,
        **options: object,
    ) -> None:
        summary = tmp_path / f"summary-{time.monotonic_ns()}.md"
        around = {**environ, "GITHUB_STEP_SUMMARY": str(summary)}
        out, err = io.StringIO(), io.StringIO()
        given = {"dialog_zip": str(tmp_path / "dialogs.zip"), **options.pop("given", {})}  # type: ignore[dict-item]
        asked = Options(given=given, sets=("device=cpu",), is_json=True, **options)  # type: ignore[arg-type]
        self.exit_code = perform("doctor", asked, Surroundings(around, out, err), open_box=open_box)
        said = out.getvalue()  # on a runner, commands stand before and after it
        self.json, _ = json.JSONDecoder().raw_decode(said, said.index("{\n"))
        self.summary = summary.read_text("utf-8")
        self.all = out.getvalue() + err.getvalue() + self.summary

    def verdict(self, subject: str) -> str:
        """Return verdict, or the code of the error, of what is said last about something."""
        found = [one for one in self.json["findings"] if one["subject"] == subject]
        assert found, f"nothing about {subject}"
        return str(found[-1]["error"]["code"] if found[-1]["error"] else found[-1]["verdict"])

    def wrong(self) -> set[tuple[str, str]]:
        return {(one["subject"], one["error"]["code"]) for one in self.json["findings"] if one["error"]}


def test_all_is_well_and_nothing_has_changed_on_the_machine(world, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    seen = Seen(world, tmp_path)
    assert (seen.exit_code, seen.wrong(), seen.json["pin_lines"]) == (0, set(), [])
    for subject in ("ZY_GPU_KEY", "ZY_GPU_KNOWN_HOSTS", "host", "login", "python", "disk", "base_model", "dialog_zip"):
        assert seen.verdict(subject) == "ok"
    assert "ZY_COS_REGION" in seen.json["unset"]
    assert "ZY_GPU_KEY" not in seen.json["unset"]
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [*tmp_path.glob("summary-*")]


class TroubledBox(LocalBox):
    """This machine, whose kernel has told of a driver that lost a GPU."""

    def ask(self, op: str, args: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        answer = super().ask(op, args, **options)
        return {**answer, "health": {**answer["health"], "xids": [79]}}


def test_what_may_trouble_a_run_is_noted_and_stops_nothing(world, tmp_path):
    seen = Seen(world, tmp_path, lambda kind, settings: TroubledBox())
    assert (seen.exit_code, seen.verdict("machine")) == (0, "note")
    assert "Xid 79" in seen.summary


def test_nothing_set_on_a_runner_names_everything_that_is_needed_at_once(tmp_path):
    seen = Seen({"GITHUB_ACTIONS": "true", "ZY_LANG": "en"}, tmp_path)
    needed = ("ZY_GPU_HOST", "ZY_GPU_USER", "ZY_GPU_KEY", "ZY_GPU_KNOWN_HOSTS")
    assert seen.wrong() == {(name, "setting_missing") for name in needed}
    assert (seen.exit_code, seen.verdict("host"), seen.verdict("login")) == (2, "untried", "untried")


def test_every_wrong_thing_is_said_at_once_and_the_worst_decides(world, tmp_path):
    seen = Seen(
        {
            **world,
            "ZY_GPU_KEY": "-----BEGIN",
            "ZY_GPU_USER": "a b",
            "ZY_GPU_PORT": str(free_port()),
            "ZY_GPU_KNOWN_HOSTS": "junk",
            "ZY_COS_SECRET_ID": "an-id-1",
            "HF_ENDPOINT": "hub",
        },
        tmp_path,
    )
    assert seen.wrong() == {
        ("ZY_GPU_KEY", "key_invalid"),
        ("ZY_GPU_USER", "setting_invalid"),
        ("HF_ENDPOINT", "setting_invalid"),
        ("ZY_COS_SECRET_KEY", "setting_missing"),
        ("ZY_GPU_KNOWN_HOSTS", "known_hosts_invalid"),
        ("host", "box_unreachable"),
    }
    assert seen.exit_code == 3
    assert seen.json["error"]["values"]["count"] == 6


def logins(sshd: DemoSshd) -> int:
    return (sshd.folder / "sshd.log").read_text().count("Accepted")


@pytest.mark.parametrize("pins", ["", "other.example ssh-ed25519 {key}", "SHA256:" + "A" * 43])
def test_an_unpinned_host_is_shown_and_never_logged_in_to(world, sshd, tmp_path, pins):
    before = logins(sshd)
    text = pins.format(key=sshd.public_key("ed25519").split()[1])
    seen = Seen({**world, "ZY_GPU_KNOWN_HOSTS": text}, tmp_path)
    assert seen.exit_code == 3
    assert seen.verdict("ZY_GPU_KNOWN_HOSTS") == ("host_key_mismatch" if "SHA256" in pins else "host_key_unknown")
    assert seen.json["pin_lines"] == sshd.known_hosts.splitlines()
    assert (seen.verdict("login"), logins(sshd)) == ("untried", before)
    for line in seen.json["pin_lines"]:
        assert line in seen.summary
        assert Seen({**world, "ZY_GPU_KNOWN_HOSTS": line}, tmp_path).exit_code == 0


def test_bad_lines_of_the_pins_are_named_by_number_and_stop_nothing(world, sshd, tmp_path):
    text = f"junk\n# fine\n@cert-authority * ssh-ed25519 x\n{sshd.known_hosts}"
    seen = Seen({**world, "ZY_GPU_KNOWN_HOSTS": text}, tmp_path)
    assert seen.exit_code == 0
    notes = [one["values"]["problem"] for one in seen.json["findings"] if one["said"] == "doctor.pin_problem"]
    assert [note.split(":")[0] for note in notes] == ["reason.in_line 1", "reason.in_line 3"]
    assert "line 3: lines with this marker are not supported" in seen.summary


@pytest.mark.parametrize(
    ("passphrase", "is_locked", "verdict", "exit_code"),
    [
        ("open sesame", True, "ok", 0),
        ("wrong words", True, "key_invalid", 2),
        ("", True, "key_invalid", 2),
        ("open sesame", False, "note", 0),
    ],
)
def test_a_passphrase_is_tried_alone(world, sshd, tmp_path, passphrase, is_locked, verdict, exit_code):
    key = tmp_path / "key"
    key.write_text(sshd.private_key)
    key.chmod(0o600)
    if is_locked:
        words = ["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(key)]
        subprocess.run(words, check=True, capture_output=True)
    environ = {**world, "ZY_GPU_KEY": key.read_text(), "ZY_GPU_KEY_PASSPHRASE": passphrase}
    seen = Seen(environ, tmp_path)
    assert (seen.verdict("ZY_GPU_KEY_PASSPHRASE"), seen.exit_code) == (verdict, exit_code)
    assert not passphrase or passphrase not in seen.all


def test_a_key_that_may_not_log_in_is_a_refused_login(world, tmp_path):
    make_key(tmp_path / "stranger", "ed25519")
    seen = Seen({**world, "ZY_GPU_KEY": (tmp_path / "stranger").read_text()}, tmp_path)
    assert (seen.verdict("ZY_GPU_KEY"), seen.verdict("login"), seen.exit_code) == ("ok", "login_refused", 3)


def test_a_host_that_nobody_knows_is_unreachable_and_pins_are_still_asked_for(world, tmp_path):
    seen = Seen({**world, "ZY_GPU_HOST": "no-such-host.invalid", "ZY_GPU_KNOWN_HOSTS": ""}, tmp_path)
    assert seen.wrong() == {("host", "box_unreachable"), ("ZY_GPU_KNOWN_HOSTS", "setting_missing")}


def test_a_jump_host_and_the_machine_behind_it_are_looked_at_one_after_the_other(world, sshd, tmp_path):
    with DemoSshd(tmp_path / "jump") as jump:
        (jump.folder / "authorized_keys").write_bytes((sshd.folder / "authorized_keys").read_bytes())
        through = {**world, "ZY_GPU_JUMP": f"{jump.user}@127.0.0.1:{jump.port}"}
        nothing = Seen({**through, "ZY_GPU_KNOWN_HOSTS": ""}, tmp_path)
        half = Seen({**through, "ZY_GPU_KNOWN_HOSTS": jump.known_hosts}, tmp_path)
        both = Seen({**through, "ZY_GPU_KNOWN_HOSTS": jump.known_hosts + sshd.known_hosts}, tmp_path)
    assert (nothing.json["pin_lines"], nothing.verdict("host")) == (jump.known_hosts.splitlines(), "untried")
    assert (half.json["pin_lines"], half.exit_code) == (sshd.known_hosts.splitlines(), 3)
    assert (both.json["pin_lines"], both.exit_code) == ([], 0)


def test_what_the_machine_lacks_is_named_and_makes_it_unfit(world, sshd, tmp_path):
    (sshd.home / ".bashrc").write_text("PATH=/nonexistent\n")
    try:
        no_python = Seen(world, tmp_path)
    finally:
        (sshd.home / ".bashrc").unlink()
    assert (no_python.verdict("machine"), no_python.exit_code) == ("box_no_python", 4)
    no_model = Seen({**world, "ZY_BASE_MODEL_DIR": "/nowhere"}, tmp_path, given={"dialog_zip": "/nowhere.zip"})
    assert no_model.wrong() == {("base_model", "base_model_missing"), ("dialog_zip", "dialog_zip_missing")}


def test_this_machine_as_the_box_needs_no_way_to_it(world, tmp_path):
    environ = {name: text for name, text in world.items() if not name.startswith("ZY_GPU")}
    seen = Seen(environ, tmp_path, box_kind="local")
    assert (seen.exit_code, seen.verdict("login")) == (0, "ok")


def test_a_laptops_own_ssh_is_asked_where_no_key_is_set(world, sshd, tmp_path):
    environ = {name: text for name, text in world.items() if not name.startswith("ZY_GPU")}
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host gpu\n HostName 127.0.0.1\n Port {sshd.port}\n User {sshd.user}\n")
    assert Seen({**environ, "ZY_GPU_HOST": "gpu"}, tmp_path).verdict("ZY_GPU_KEY") == "setting_missing"
    (tmp_path / ".ssh" / "id_ed25519").write_text(sshd.private_key)
    (tmp_path / ".ssh" / "known_hosts").write_text(sshd.known_hosts)
    seen = Seen({**environ, "ZY_GPU_HOST": "gpu"}, tmp_path)
    assert (seen.exit_code, seen.verdict("ssh")) == (0, "note")


# --- storage


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nanio]:
    with running_nanio(tmp_path_factory.mktemp("nanio")) as server:
        client = server.client()
        client.create_bucket(Bucket="dialogs")
        client.put_object(Bucket="dialogs", Key=KEY_OBJECT, Body=b"PK\x03\x04" + b"x" * 2**20)
        client.put_object(Bucket="dialogs", Key="page.zip", Body=b"<html>please log in</html>")
        yield server


def with_storage(world: dict[str, str], nanio: Nanio, **changes: str) -> dict[str, str]:
    return {**world, **nanio.environment(), "ZY_FETCH_ALLOW": "127.0.0.1", **changes}


def test_a_bucket_is_opened_with_one_byte(world, nanio, tmp_path):
    seen = Seen(with_storage(world, nanio), tmp_path, given={"dialog_zip": f"s3://dialogs/{KEY_OBJECT}"})
    [found] = [one for one in seen.json["findings"] if one["subject"] == "dialog_zip"]
    assert (found["verdict"], found["values"]["source"], found["values"]["size"]) == ("ok", "S3", "1 MiB")
    assert seen.exit_code == 0


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "another-secret-key"}, KEY_OBJECT, "storage_denied"),
        ({}, "nowhere.zip", "storage_missing"),
        ({}, "page.zip", "dialog_zip_not_zip"),
    ],
)
def test_what_a_bucket_refuses_is_told_apart(world, nanio, tmp_path, changes, name, code):
    seen = Seen(with_storage(world, nanio, **changes), tmp_path, given={"dialog_zip": f"s3://dialogs/{name}"})
    assert (seen.verdict("dialog_zip"), seen.exit_code) == (code, 2)
    assert "please log in" not in seen.all


def test_a_link_that_says_itself_that_its_time_is_over_is_not_even_asked(world, tmp_path):
    """Its host does not exist: an answer could not come."""
    link = (
        "https://no-such-host.invalid/a.zip?X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-Signature=c0ffeec0ffee"
    )
    seen = Seen({**world, "ZY_BINGSHUO_DIALOG_URL": link}, tmp_path, given={"dialog_zip": ""})
    assert (seen.verdict("ZY_BINGSHUO_DIALOG_URL"), seen.exit_code) == ("storage_expired", 2)
    assert "c0ffeec0ffee" not in seen.all


def test_a_secret_link_that_ends_soon_is_noted_with_the_time_left(world, nanio, tmp_path):
    link = nanio.client().generate_presigned_url(
        "get_object", Params={"Bucket": "dialogs", "Key": KEY_OBJECT}, ExpiresIn=600
    )
    environ = {**world, "ZY_BINGSHUO_DIALOG_URL": link, "ZY_FETCH_ALLOW": "127.0.0.1"}
    seen = Seen(environ, tmp_path, given={"dialog_zip": ""})
    assert (seen.verdict("ZY_BINGSHUO_DIALOG_URL"), seen.exit_code) == ("note", 0)
    assert "0:09:5" in seen.summary or "0:10:00" in seen.summary


def test_keys_that_no_address_puts_to_the_test_are_named_as_that(world, nanio, tmp_path):
    environ = {**with_storage(world, nanio), "ZY_COS_SECRET_ID": "an-id-1234", "ZY_COS_SECRET_KEY": "a-secret-1234"}
    seen = Seen(environ, tmp_path)
    assert seen.verdict("ZY_COS_SECRET_ID, ZY_COS_SECRET_KEY") == "note"
    assert seen.verdict("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY") == "note"


# --- what is said


@pytest.mark.parametrize("lang", LANGUAGES)
def test_everything_is_said_in_the_persons_language(world, tmp_path, lang):
    environ = {
        **world,
        "ZY_LANG": lang,
        "ZY_GPU_KNOWN_HOSTS": "",
        "HF_ENDPOINT": "x",
        "PIP_INDEX_URL": "https://m.example",
    }
    seen = Seen(environ, tmp_path)
    assert ("机器自己的控制台" in seen.summary) == (lang == "zh")
    assert "doctor." not in seen.summary
    assert "reason." not in seen.summary


@pytest.mark.parametrize("has_host", [True, False])
def test_no_secret_is_ever_said_not_even_in_part(world, tmp_path, has_host):
    """Every secret is wrong in its own way, and none of its words appears anywhere."""
    secrets = {row.name: f"canary7f3a{number:02}secret" for number, row in enumerate(SETTINGS) if row.is_secret}
    assert len(secrets) >= 8
    environ = {**world, **secrets}
    if not has_host:
        del environ["ZY_GPU_HOST"]
    seen = Seen(environ, tmp_path, given={"dialog_zip": ""})
    assert seen.exit_code != 0
    assert "canary" not in seen.all
    whole = Seen({**world, "ZY_GPU_KEY_PASSPHRASE": "canary words"}, tmp_path)
    assert "canary" not in whole.all
    assert not any(line in whole.all for line in world["ZY_GPU_KEY"].splitlines()[1:-1])
