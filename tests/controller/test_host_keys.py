"""Pins: what known_hosts may hold, which hosts a line means, and what is said about lines that cannot be used."""

import base64
import subprocess
from pathlib import Path

import paramiko
import pytest

from controller.demo_sshd import make_key
from controller.host_keys import FAMILIES, fingerprint, parse_pins
from corpus_builder.errors import ProjectError

KEYS = {kind: paramiko.ECDSAKey.generate() for kind in "ab"}
A, B = (f"{key.get_name()} {key.get_base64()}" for key in KEYS.values())
FINGERPRINT_A = fingerprint(KEYS["a"].asbytes())


def pins(text: str, host: str = "gpu-1.example", port: int = 22) -> tuple[str, ...]:
    return tuple(pin.fingerprint for pin in parse_pins(text, host=host, port=port).pins)


@pytest.mark.parametrize(
    ("line", "host", "port"),
    [
        (f"gpu-1.example {A}", "gpu-1.example", 22),
        (f"GPU-1.example {A} a comment", "gpu-1.example", 22),
        (f"other,gpu-1.example,10.0.0.7 {A}", "10.0.0.7", 22),
        (f"[gpu-1.example]:2222 {A}", "gpu-1.example", 2222),
        (f"gpu-1.example {A}", "gpu-1.example", 2222),
        (f"*.example,!bad.example {A}", "gpu-1.example", 22),
        (f"gpu-?.example {A}", "gpu-1.example", 22),
        (f"  \ufeff\n# comment\n\ngpu-1.example   {A}\r\n", "gpu-1.example", 22),
        (f"other {B}\\ngpu-1.example {A}\\n", "gpu-1.example", 22),
        (f"[2001:db8::7]:2222 {A}", "2001:db8::7", 2222),
        (FINGERPRINT_A, "anything", 2222),
        (f"256 {FINGERPRINT_A} root@gpu (ECDSA)", "anything", 22),
        (f"{FINGERPRINT_A}=", "anything", 22),
    ],
    ids=map(str, range(13)),  # each process makes keys of its own
)
def test_a_line_pins_the_hosts_it_names(line, host, port):
    assert pins(line, host, port) == (FINGERPRINT_A,)


@pytest.mark.parametrize(
    "line",
    [
        f"other.example {A}",
        f"[gpu-1.example]:2222 {A}",
        f"*.example,!gpu-1.example {A}",
        f"gpu-1.example.evil {A}",
        f"gpu-1xexample {A}",
        f"gpu-1.example {A}\n@revoked * {A}",
        "",
        "# only a comment",
    ],
)
def test_a_line_pins_no_other_host(line):
    assert pins(line) == ()


def test_a_line_with_the_port_wins_over_one_without():
    assert pins(f"gpu-1.example {B}\n[gpu-1.example]:2222 {A}", port=2222) == (FINGERPRINT_A,)


@pytest.mark.parametrize(("host", "port"), [("gpu-1.example", 22), ("gpu-1.example", 2222)])
def test_hashed_names_are_found(tmp_path: Path, host, port):
    label = host if port == 22 else f"[{host}]:{port}"
    known = tmp_path / "known_hosts"
    known.write_text(f"{label} {A}\nother {B}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    text = known.read_text()
    assert text.startswith("|1|")
    assert pins(text, host, port) == (FINGERPRINT_A,)
    assert pins(text, "gpu-2.example", port) == ()


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path):
    make_key(tmp_path / "key", "ed25519")
    said = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], check=True, capture_output=True, text=True)
    blob = base64.b64decode((tmp_path / "key.pub").read_text().split()[1])
    assert pins(said.stdout) == (fingerprint(blob),)


def test_bad_lines_are_reported_by_number_and_void_nothing():
    bad = [
        "@cert-authority *.example " + A,
        "junk",
        f"gpu-1.example {A[:-30]}",
        f"gpu-1.example ssh-rsa {A.split()[1]}",
        "gpu-1.example ecdsa-sha2-nistp256 !!!!",
        "MD5:00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff",
        "SHA256:tooshort",
    ]
    pinned = parse_pins("\n".join([*bad, f"gpu-1.example {A}"]), host="gpu-1.example", port=22)
    assert [pin.fingerprint for pin in pinned.pins] == [FINGERPRINT_A]
    assert [problem.split(":")[0] for problem in pinned.problems] == [f"reason.in_line {n}" for n in range(1, 8)]


def test_text_without_one_usable_line_is_refused_with_every_number():
    with pytest.raises(ProjectError, match=r"known_hosts_invalid .*in_line 1: .*in_line 2: ") as caught:
        parse_pins("junk\n@cert-authority * x y", host="gpu-1", port=22)
    assert caught.value.exit_code == 2


def test_the_check_passes_the_pinned_key_alone():
    pinned = parse_pins(f"gpu-1.example {A}", host="gpu-1.example", port=22)
    pinned.check(KEYS["a"])
    with pytest.raises(ProjectError, match="host_key_mismatch") as caught:
        pinned.check(KEYS["b"])
    assert FINGERPRINT_A in str(caught.value.values["expected"])
    assert fingerprint(KEYS["b"].asbytes()) in str(caught.value.values["seen"])


def test_a_host_without_a_pin_is_refused_with_the_line_to_pin():
    with pytest.raises(ProjectError, match="host_key_unknown") as caught:
        parse_pins(f"other {A}", host="gpu-1.example", port=2222).check(KEYS["a"])
    assert caught.value.values["line"] == f"[gpu-1.example]:2222 {A}"


def test_pinned_types_are_asked_for_first():
    rsa = "AAAAB3NzaC1yc2EAAAADAQABAAAAAQM="
    pinned = parse_pins(f"gpu-1.example ssh-rsa {rsa}", host="gpu-1.example", port=22)
    assert pinned.preferences() == (("rsa-sha2-512", "rsa-sha2-256"),)
    assert parse_pins(FINGERPRINT_A, host="h", port=22).preferences() == FAMILIES
    assert parse_pins("", host="h", port=22).preferences() == ((),)
