"""Input of any kind ends in an account or in a ProjectError, and nothing that was read gets lost."""

import io
import random
import shutil
import warnings
import zipfile
from itertools import pairwise

import pytest

from corpus_builder.archive import extract_archive
from corpus_builder.dialog import parse_dialog_md
from corpus_builder.errors import ProjectError
from corpus_builder.plan import Speakers
from corpus_builder.sample import Message, Sample
from corpus_builder.split import Splitter
from corpus_builder.text import decode
from trainer.progress import Progress, format_progress, parse_line

SPEAKERS = Speakers(user=("冰朔", "妈妈"), assistant=("铸渊", "ICE-GL-ZY001"))
PIECES = (
    "冰朔：", "妈妈: ", "铸渊：", "**铸渊**：", "> 冰朔：", "## 铸渊",
    "```\n", "~~~~\n", "\n", "\n\n", "\r\n", "---\n", "---",
    "你好，世界", "hello world. ", "<|im_end|>", "\u2028", "\ufeff", "\x00", " ", "\t",
    "- ", "|", "10:22 ", "（id）", "é", "🌊",
)  # fmt: skip
NAMES = ("a.md", "../b.md", "/c.md", "C:\\d.md", "e/../../f.md", "对话.md", "x\x00y", "a" * 300)


def some_text(draw: random.Random, most: int = 60) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randrange(most)))


def some_bytes(draw: random.Random) -> bytes:
    """Return text in some encoding, with some bytes changed."""
    encoded = bytearray(some_text(draw).encode(draw.choice(["utf-8", "utf-16", "gb18030", "big5"]), "replace"))
    for _ in range(draw.randrange(4)):
        if encoded:
            encoded[draw.randrange(len(encoded))] = draw.randrange(256)
    return bytes(encoded)


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
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # duplicate names are meant
            for _ in range(draw.randrange(1, 6)):
                archive.writestr(draw.choice(NAMES), some_bytes(draw))
        content = bytearray(packed.getvalue())
        for _ in range(draw.randrange(6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        folder = tmp_path / "round"
        folder.mkdir()
        (folder / "in.zip").write_bytes(bytes(content))
        try:
            extract_archive(str(folder / "in.zip"), str(folder / "out"))
        except ProjectError:
            assert not (folder / "out").exists()
        assert {path.name for path in folder.iterdir()} <= {"in.zip", "out", "out.partial"}
        shutil.rmtree(folder)


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
