"""The loader's text, and what counts as an answer. The talk itself is tested over real wires in test_box."""

import ast
import json
import shutil
import subprocess

import pytest

from controller.box import COMMAND
from controller.exchange import LOADER, Talk, make_request, read_answer
from corpus_builder.errors import ProjectError
from tests.servers import agent_of

BUNDLE = agent_of("def answer(request, stream, out): return {'op': request['op']}")()
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "ksh", "busybox") if shutil.which(shell)]


def test_the_loader_needs_no_shells_favour():
    assert not set("'\n\\!$`") & set(LOADER)
    ast.parse(LOADER, feature_version=(3, 7))
    assert len(LOADER) < 500


def test_the_loader_names_a_python_that_is_too_old():
    program = LOADER.replace("(3,8)", "(99,0)")
    done = subprocess.run(["python3", "-IS", "-c", program], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"ZY_OLD_PYTHON 3.")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_passes_the_command_on(shell):
    request = make_request("look", {}, BUNDLE)
    argv = [shell, "sh", "-c", COMMAND] if shell == "busybox" else [shell, "-c", COMMAND]
    done = subprocess.run(argv, input=request.payload, capture_output=True, check=True)
    assert read_answer(Talk(out=bytearray(done.stdout), exit_code=0), request, host="h") == {"op": "look"}


def test_a_nonce_is_never_used_twice():
    assert len({make_request("op", {}, b"").nonce for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("talk", "code"),
    [
        (Talk(is_timed_out=True), "connection_lost"),
        (Talk(exit_code=None), "connection_lost"),
        (Talk(exit_code=0), "answer_unreadable"),
        (Talk(exit_code=127), "box_no_python"),
        (Talk(exit_code=1, error_tail=bytearray(b"python3: Command not found.\n")), "box_no_python"),
        (Talk(exit_code=1, error_tail=bytearray(b"ZY_OLD_PYTHON 3.7.3\n")), "box_no_python"),
        (Talk(exit_code=1, error_tail=bytearray(b"This account is currently not available.")), "answer_unreadable"),
    ],
)
def test_no_answer_has_a_reason(talk, code):
    with pytest.raises(ProjectError) as caught:
        read_answer(talk, make_request("op", {}, b""), host="gpu-1:22")
    assert caught.value.code == code


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ok": 3}', '{"error": {"code": "no_such", "values": {}}}'])
def test_an_answer_of_another_shape_is_unreadable(text):
    request = make_request("op", {}, b"")
    out = f"ZY_ANSWER_BEGIN {request.nonce}\n{text}\nZY_ANSWER_END {request.nonce}\n".encode()
    with pytest.raises(ProjectError, match="answer_unreadable"):
        read_answer(Talk(out=bytearray(out), exit_code=0), request, host="gpu-1:22")


def test_an_answer_is_found_between_noise_and_windows_line_ends():
    request = make_request("op", {}, b"")
    answer = json.dumps({"ok": {"text": "ZY_ANSWER_BEGIN\r\n中"}})
    out = f"欢迎ZY_ANSWER_BEGIN {request.nonce}\r\n{answer}\r\nZY_ANSWER_END {request.nonce}\r\nbye".encode()
    assert read_answer(Talk(out=bytearray(out)), request, host="h") == {"text": "ZY_ANSWER_BEGIN\r\n中"}
