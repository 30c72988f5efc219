"""Input of any kind ends in an account or in a ProjectError, and nothing that was read gets lost."""

import io
import json
import random
import shutil
import warnings
import zipfile
from itertools import pairwise

import pytest

from corpus_builder.archive import ACCOUNT_NAME, extract_archive
from corpus_builder.archive_limits import Limits
from corpus_builder.dialog import parse_dialog_md
from corpus_builder.errors import ProjectError
from corpus_builder.plan import Speakers
from corpus_builder.sample import Message, Sample, format_sample
from corpus_builder.split import Splitter
from corpus_builder.text import decode
from tests.corpus_builder.test_exports import KEYS, gpt, read_export, source_of
from trainer.progress import Progress, format_progress, parse_line

SPEAKERS = Speakers(user=("冰朔", "妈妈"), assistant=("铸渊", "ICE-GL-ZY001"))
PIECES = (
    "冰朔：", "妈妈: ", "铸渊：", "**铸渊**：", "> 冰朔：", "## 铸渊",
    "```\n", "~~~~\n", "\n", "\n\n", "\r\n", "---\n", "---",
    "你好，世界", "hello world. ", "<|im_end|>", "\u2028", "\ufeff", "\x00", " ", "\t",
    "- ", "|", "10:22 ", "（id）", "é", "🌊",
)  # fmt: skip
NAMES = ("a.md", "../b.md", "/c.md", "C:\\d.md", "e/../../f.md", "对话.md", "乗\\b.md", "x\x00y", "a" * 300)


def some_text(draw: random.Random, most: int = 60) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randrange(most)))


def some_bytes(draw: random.Random) -> bytes:
    """Return text in some encoding, with some bytes changed."""
    encoded = bytearray(some_text(draw).encode(draw.choice(["utf-8", "utf-16", "gb18030", "big5"]), "replace"))
    for _ in range(draw.randrange(4)):
        if encoded:
            encoded[draw.randrange(len(encoded))] = draw.randrange(256)
    return bytes(encoded)


def damaged(draw: random.Random, data: bytes, most: int = 6) -> bytes:
    """Return `data` with some bytes changed, and sometimes cut."""
    changed = bytearray(data)
    for _ in range(draw.randrange(most)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.1 else changed)


def some_zip(draw: random.Random, depth: int = 0) -> bytes:
    """Return a ZIP with names of any kind, and with ZIPs in it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # duplicate names are meant
        for _ in range(draw.randrange(1, 6)):
            if depth < 3 and draw.random() < 0.2:
                archive.writestr(f"{draw.choice('ab')}.zip", some_zip(draw, depth + 1))
            archive.writestr(draw.choice(NAMES), some_bytes(draw), draw.choice([0, 8]))
    return packed.getvalue()


def some_value(draw: random.Random, depth: int = 0) -> object:
    """Return JSON that looks like an export here and there."""
    kind = draw.random()
    if depth > 5 or kind < 0.3:
        return draw.choice([None, 0, True, some_text(draw, 3), *KEYS])
    if kind < 0.55:
        return [some_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): some_value(draw, depth + 1) for _ in range(draw.randrange(6))}


def some_export(draw: random.Random) -> bytes:
    """Return a list, lines or one value, in some encoding."""
    rows = [*(some_value(draw) for _ in range(draw.randrange(4))), {"mapping": some_tree(draw)}]
    rows.append({"messages": [{"role": draw.choice(KEYS), "content": some_text(draw, 4)} for _ in range(4)]})
    shape = draw.choice(["[%s]", "%s"])
    lines = (", " if shape == "[%s]" else "\n").join(json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows)
    return (shape % lines).encode(draw.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "gb18030"]), "replace")


def some_tree(draw: random.Random) -> dict[str, object]:
    """Return nodes of ChatGPT's `mapping` with parents of any kind, circles too."""
    keys = "abcdefgh"
    nodes: dict[str, object] = {}
    for key in keys[: draw.randrange(9)]:
        role = draw.choice(["user", "assistant", "assistant", "tool"])
        nodes |= gpt(key, draw.choice([*keys, None]), role, some_text(draw, 4))
    return nodes


@pytest.mark.soak
def test_any_bytes_become_text_or_a_project_error(rounds):
    for draw in rounds:
        for _ in range(200):
            try:
                dialog = parse_dialog_md(decode(some_bytes(draw)).text, SPEAKERS)
            except ProjectError:
                continue
            roles = [turn.role for turn in dialog.turns]
            assert all(one != two for one, two in pairwise(roles))


@pytest.mark.soak
def test_any_archive_is_extracted_inside_its_folder_or_refused(rounds, tmp_path):
    for draw in rounds:
        for _ in range(100):
            folder = tmp_path / "round"
            folder.mkdir()
            (folder / "in.zip").write_bytes(damaged(draw, some_zip(draw)))
            limits = Limits(members=draw.choice([3, 99]), total_bytes=draw.choice([200, 1 << 20]), depth=2)
            try:
                account = extract_archive(str(folder / "in.zip"), str(folder / "out"), limits=limits)
                written = {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*")}
                assert {*account.kept, ACCOUNT_NAME} <= written
                assert len(account.kept) <= limits.members
            except ProjectError:
                assert not (folder / "out").exists()
            assert {path.name for path in folder.iterdir()} <= {"in.zip", "out"}
            shutil.rmtree(folder)


@pytest.mark.soak
def test_any_export_is_accounted_for_or_refused(rounds, tmp_path):
    path = tmp_path / "x.json"
    for draw in rounds:
        for _ in range(100):
            kind = draw.choice(["chatgpt", "claude", "copilot", "messages", "sharegpt", "json-dialog"])
            path.write_bytes(damaged(draw, some_export(draw), most=3))
            try:
                reading = read_export(path, source_of(kind))  # checks that read = kept + dropped
            except ProjectError:
                continue
            for sample in reading.samples:
                assert any(message.is_trained for message in sample.messages)
                format_sample(sample).encode("utf-8")


@pytest.mark.soak
def test_no_split_loses_a_character(rounds, frame):
    for draw in rounds:
        answer = some_text(draw, 400)
        sample = Sample(
            messages=(Message("user", "q"), Message("assistant", answer)), source="soul:x", sample_class="soul"
        )
        split = Splitter(frame, max_seq_len=draw.randrange(48, 200), system_prompt=None).split(sample)
        rejoined = "".join(m.content for part in split.samples for m in part.messages if m.is_trained)
        assert rejoined == answer


@pytest.mark.soak
def test_any_progress_comes_back_from_any_noise(rounds):
    for draw in rounds:
        for _ in range(500):
            point = Progress(draw.randrange(10**6), 10**6, draw.random(), 1e-5, draw.random(), 5, 1.5, {"tok": 9.0})
            line = f"{some_text(draw, 5)} {format_progress(point)}".replace("\n", " ").replace("\r", " ")
            found = [item for item in parse_line(line) if isinstance(item, Progress)]
            assert [item.step for item in found] == [point.step]
