"""Which files a plan's sources are."""

import os

import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.plan import SoulQuestions, SoulSource
from corpus_builder.sources import (
    find_dialog_files,
    find_export_files,
    find_file,
    find_soul_files,
    readable_name,
    refusal,
)


def soul(**changes):
    return SoulSource(kind="soul", questions=SoulQuestions(whole=("w",), section=("s",)), **changes)


def test_paths_come_first_then_patterns_each_file_once(tmp_path):
    for name in ("b.md", "a.md", "c.md"):
        (tmp_path / name).write_text("x")
    found = find_soul_files(tmp_path, soul(paths=("c.md", "none.md"), globs=("*.md", "deep/*.md")))
    assert [file.name for file in found.files] == ["c.md", "a.md", "b.md"]
    assert found.missing == ("none.md", "deep/*.md")
    assert (found.listed, found.found) == (2, 1)


@pytest.mark.parametrize("name", ["../x.md", "/etc/hostname", "link.md", "folder/x.md"])
def test_what_leads_out_of_the_root_is_refused(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.md").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.md").symlink_to(outside / "x.md")
    (root / "folder").symlink_to(outside)
    with pytest.raises(ProjectError, match="source_link_leaves_root"):
        find_file(root, name)
    with pytest.raises(ProjectError, match="source_link_leaves_root"):
        find_soul_files(root, soul(globs=(name if name.startswith(("..", "/")) else "**/*.md",)))


def test_dialogs_of_any_suffix_case_are_found_in_order_without_system_files(tmp_path):
    for name in ("b.MD", "a.txt", "sub/c.Markdown", "x.json", ".hidden.md", "__MACOSX/a.md", ".git/x.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, others = find_dialog_files(tmp_path)
    assert [file.name for file in files] == ["a.txt", "b.MD", "sub/c.Markdown"]
    assert others == 1


def test_dialog_that_is_a_link_out_or_no_file_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.md").write_text("x")
    (root / "out.md").symlink_to("/etc/hostname")
    os.mkfifo(root / "pipe.md")
    assert [refusal(root, root / name) for name in ("in.md", "out.md", "pipe.md")] == [
        None, "link_leaves_folder", "no_plain_file",
    ]  # fmt: skip


def test_name_of_any_bytes_is_readable(tmp_path):
    raw = os.fsencode(tmp_path) + b"/" + "冰朔.md".encode("gbk")
    with open(raw, "w") as file:
        file.write("x")
    (found,), _ = find_dialog_files(tmp_path)
    assert found.name == "冰朔.md"
    assert readable_name(os.fsdecode(b"\xff.md")) == "\\xff.md"


def test_exports_are_found_by_pattern_each_once_and_nothing_hidden(tmp_path):
    for name in ("a/conversations.json", "a/conversations-2.json", "__MACOSX/conversations.json", ".x/b.json", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, missing = find_export_files(tmp_path, ("**/conversations.json", "**/*.json", "*.jsonl"))
    assert [file.name for file in files] == ["a/conversations.json", "a/conversations-2.json"]
    assert missing == ["*.jsonl"]
