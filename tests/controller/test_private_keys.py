"""Keys as people paste them; each made by ssh-keygen or openssl's library, mangled, and compared by its fingerprint."""

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa

from controller.private_keys import load_private_key
from corpus_builder.errors import ProjectError
from corpus_builder.say import format_error

PASSPHRASE = "correct horse 电池"
KINDS = {"ed25519": [], "ecdsa": [], "rsa": ["-b", "2048"], "ecdsa-521": ["-b", "521"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for kind, size in KINDS.items():
        for name, passphrase, form in (
            (kind, "", []),
            (f"{kind}-locked", PASSPHRASE, []),
            (f"{kind}-pem", "", ["-m", "PEM"]),
            (f"{kind}-pem-locked", PASSPHRASE, ["-m", "PEM"]),
        ):
            if form and kind == "ed25519":
                continue  # OpenSSH writes ed25519 in its own format only
            command = ["ssh-keygen", "-q", "-t", kind.split("-")[0], *size, *form, "-N", passphrase]
            subprocess.run([*command, "-C", "", "-f", str(folder / name)], check=True, stdin=subprocess.DEVNULL)
    return folder


def public_of(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.pub").read_text().split()[:2]


def loaded(text: str, passphrase: str | None = None) -> list[str]:
    key = load_private_key(text, passphrase)
    return [key.get_name(), key.get_base64()]


@pytest.mark.parametrize("form", ["", "-locked", "-pem", "-pem-locked"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_format_is_read(folder, kind, form):
    if kind == "ed25519" and "pem" in form:
        pytest.skip("OpenSSH writes no such file")
    text = (folder / (kind + form)).read_text()
    assert loaded(text, PASSPHRASE if "locked" in form else None) == public_of(folder, kind + form)


@pytest.mark.parametrize("name", ["ed25519", "ecdsa-pem", "rsa-pem-locked"])
@pytest.mark.parametrize(
    "mangle",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\r"),
        lambda text: text.rstrip("\n"),
        lambda text: "\n \n\t\n" + text,
        lambda text: "".join(f"    {line}  \n" for line in text.splitlines()),
        lambda text: text.replace("\n", "\\n"),
        lambda text: text.replace("\n", "\\r\\n"),
        lambda text: "\ufeff" + text,
        lambda text: "my key:\n" + text + "\n\n",
        lambda text: '"' + text + '"',
    ],
    ids=["crlf", "cr", "no-last-newline", "leading-blanks", "indented", "one-line", "one-line-crlf", "bom", "talk",
         "quoted"],
)  # fmt: skip
def test_what_a_form_does_to_a_key_is_undone(folder, name, mangle):
    text = mangle((folder / name).read_text())
    assert loaded(text, PASSPHRASE if "locked" in name else None) == public_of(folder, name)


def test_an_openssh_key_with_its_lines_joined_by_spaces_is_read(folder):
    assert loaded((folder / "ed25519").read_text().replace("\n", " ")) == public_of(folder, "ed25519")


def test_a_passphrase_that_is_not_needed_does_no_harm(folder):
    assert loaded((folder / "ecdsa").read_text(), PASSPHRASE) == public_of(folder, "ecdsa")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
def test_pkcs8_is_read(folder, kind, passphrase):
    key = serialization.load_ssh_private_key((folder / kind).read_bytes(), None)
    lock = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock).decode()
    assert "OPENSSH" not in text
    assert loaded(text, passphrase) == public_of(folder, kind)


def reason(text: str, passphrase: str | None = None) -> str:
    with pytest.raises(ProjectError) as caught:
        load_private_key(text, passphrase)
    assert (caught.value.code, caught.value.exit_code) == ("key_invalid", 2)
    return format_error(caught.value, "en")


@pytest.mark.parametrize("name", ["ed25519-locked", "rsa-locked", "ecdsa-pem-locked"])
def test_a_locked_key_asks_for_its_passphrase(folder, name):
    text = (folder / name).read_text()
    assert "ZY_GPU_KEY_PASSPHRASE" in reason(text)
    assert "does not open" in reason(text, "wrong")


def test_the_public_half_is_told_from_junk(folder):
    assert "public half" in reason((folder / "ed25519.pub").read_text())
    assert "public half" in reason("ssh-rsa AAAAB3Nz me@home")
    assert "not a private key" in reason("hello")
    assert "PuTTY" in reason("PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none")
    assert "empty" in reason("  \n ")
    assert "public half" in reason("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----")


def test_a_cut_or_damaged_key_says_what_is_missing(folder):
    text = (folder / "ed25519").read_text()
    lines = text.splitlines()
    assert "end is missing" in reason("\n".join(lines[:-1]))
    assert "beginning is missing" in reason("\n".join(lines[1:]))
    assert "damaged" in reason("\n".join([*lines[:2], *lines[3:]]))
    assert "damaged" in reason("\n".join([lines[0], lines[1][::-1], *lines[2:]]))
    assert "nothing" in reason(lines[0] + "\n" + lines[-1])


def test_a_type_of_another_age_is_named():
    key = dsa.generate_private_key(1024)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    assert "(DSA PRIVATE KEY)" in reason(pem.decode())


@pytest.mark.parametrize("name", ["ed25519", "ed25519-locked", "rsa-pem"])
def test_no_complaint_repeats_the_key(folder, name):
    text = (folder / name).read_text()
    damaged = text[:150] + "AAAA" + text[170:]
    said = reason(damaged, "a wrong passphrase")
    assert "a wrong passphrase" not in said
    assert not any(line in said for line in text.splitlines() if len(line) > 20)


def test_keys_without_a_comment_are_read_whether_they_need_padding_or_not(tmp_path):
    """Paramiko 5.1 takes the last zero of an empty comment for the length of the padding; every second ECDSA key."""
    for number in range(8):
        path = tmp_path / str(number)
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-C", "", "-f", str(path)], check=True)
        assert loaded(path.read_text()) == public_of(tmp_path, str(number))
