"""How the demo is judged; that it works is shown by running it (tests/e2e/test_quickstart.py)."""

import pytest

from controller.demo import judge, prepare_folder, two_columns
from controller.install_runner import without_secrets
from corpus_builder.errors import ProjectError

SUITE = {"name": "demo", "pass_at_least": 9, "before_at_most": 2}


def result(right):
    answers = [{"ask": "a | b?", "answer": "<x>\ny", "is_right": n < right} for n in range(10)]
    return {"right": right, "total": 10, "answers": answers}


@pytest.mark.parametrize(("before", "after"), [(0, 9), (2, 9), (0, 10)])
def test_a_model_that_learnt_is_ready(before, after):
    assert judge(result(before), result(after), SUITE) is None


@pytest.mark.parametrize(
    ("before", "after", "code"), [(0, 8, "not_ready"), (3, 10, "not_taught"), (9, 9, "not_taught")]
)
def test_a_demo_that_shows_nothing_ends_with_exit_9(before, after, code):
    with pytest.raises(ProjectError) as caught:
        judge(result(before), result(after), SUITE)
    assert (caught.value.code, caught.value.exit_code) == (code, 9)


def test_answers_cannot_break_the_table():
    table = two_columns(result(0), result(10), "en").splitlines()
    assert all(line.replace("\\|", "").count("|") == 4 for line in table if line.startswith("|"))
    assert "&lt;x> y" in table[5]


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ProjectError, match="input_invalid"):
        prepare_folder(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_no_build_script_sees_a_secret():
    seen = without_secrets(
        {"PATH": "/bin", "ZY_GPU_KEY": "k", "AWS_SECRET_ACCESS_KEY": "s", "INPUT_X": "y", "HOME": "/h"}
    )
    assert seen == {"PATH": "/bin", "HOME": "/h", "UV_SYSTEM_CERTS": "1"}
