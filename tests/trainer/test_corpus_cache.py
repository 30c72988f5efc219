"""The encoded corpus on the disk: made once, checked whenever it is opened, made again where it is damaged."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.sample import Message, Sample
from tests.tiny_run import ROOT, tiny_samples, write_corpus
from trainer.corpus_cache import open_corpus
from trainer.device import Place
from trainer.encode import check_samples, encode_corpus
from trainer.run_paths import DataPaths
from trainer.voice import Voice

FIRST, SECOND = Place(0, 0, 2, True), Place(1, 1, 2, True)
SILENT = Sample(messages=(Message("user", "hello"),), source="s", sample_class="soul")


@dataclass
class World:
    """A data folder with a corpus."""

    data: DataPaths
    frame: Frame

    def write(self, samples):
        write_corpus(self.data, samples)

    def open(self, *, place=FIRST, max_seq_len=256, deadline_s=0.0, worth_it=10**9):
        return open_corpus(
            check_samples(Path(self.data.samples), is_own=True),
            self.frame,
            Path(self.data.encoded),
            tokens=FastTokens(self.frame, worth_it=worth_it),
            max_seq_len=max_seq_len,
            place=place,
            voice=Voice(place),
            deadline_s=deadline_s,
        )

    @property
    def files(self) -> list[Path]:
        return sorted(Path(self.data.encoded).iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def world(tmp_path, frame) -> World:
    made = World(DataPaths(str(tmp_path)), frame)
    made.write([*tiny_samples(), *held_out(5), SILENT])
    return made


def held_out(count):
    return [
        Sample(messages=sample.messages, source="held", sample_class="soul", split="validation")
        for sample in tiny_samples(count)
    ]


def columns(corpus):
    return [
        getattr(part, name).tolist()
        for part in (corpus.train, corpus.validation)
        for name in ("ids", "is_trained", "starts", "weights", "class_indices")
    ]


def test_what_is_opened_is_what_was_encoded(world):
    samples = [*tiny_samples(), *held_out(5), SILENT]
    expected = encode_corpus(samples, world.frame, max_seq_len=256)
    for found in (world.open(), world.open(), world.open(place=SECOND)):
        assert columns(found) == columns(expected)
        assert (found.left_out, found.read) == (((SILENT.id, "nothing_trained"),), len(samples))
        assert [str(column.dtype) for column in (found.train.ids, found.train.is_trained)] == ["int32", "bool"]
    assert len(world.files) == 1


def test_a_file_is_made_once_and_mapped(world):
    world.open()
    before = world.files[0].stat()
    found = world.open()
    after = world.files[0].stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert not found.train.ids.flags.writeable
    assert str(world.files[0]) in Path("/proc/self/maps").read_text()


def test_an_empty_validation_split(world):
    world.write(tiny_samples(3))
    world.open()
    assert (len(world.open().validation), world.open().validation.tokens) == (0, 0)


def test_a_cached_run_says_what_the_first_one_said(world, capsys):
    world.open(worth_it=0)
    first = capsys.readouterr().out
    world.open(worth_it=10**9)
    second = capsys.readouterr().out
    assert "ZY_EVENT name=engine engine=tiktoken reason=ids_equal cached=false\n" in first
    assert "ZY_EVENT name=engine engine=tiktoken reason=ids_equal cached=true\n" in second


def test_the_other_ranks_are_silent(world, capsys):
    world.open()
    capsys.readouterr()
    world.open(place=SECOND)
    assert capsys.readouterr().out == ""


def test_only_the_owner_can_read_it(world):
    Path(world.data.encoded).mkdir(parents=True, mode=0o755)
    old = os.umask(0)
    try:
        world.open()
    finally:
        os.umask(old)
    assert Path(world.data.encoded).stat().st_mode & 0o777 == 0o700
    assert world.files[0].stat().st_mode & 0o777 == 0o600


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path):
    os.truncate(path, 0)


def cut_the_end(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(share):
    def flip_a_bit(path):
        data = bytearray(path.read_bytes())
        data[int(len(data) * share)] ^= 1
        path.write_bytes(data)

    return flip_a_bit


def no_arrow(path):
    path.write_text("{}")


def other_columns(path):
    import pyarrow as pa

    table = pa.table({"ids": [1]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


DAMAGES = [cut, empty, cut_the_end, no_arrow, other_columns, *(flip(share / 100) for share in range(3, 95, 4))]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again_aloud_or_harmless(world, capsys, damage):
    """A flipped bit of padding or of an unused field may change nothing: then nothing is said, and nothing is wrong."""
    expected = columns(world.open())
    damage(world.files[0])
    capsys.readouterr()
    assert columns(world.open()) == expected
    said = capsys.readouterr().out
    is_rebuilt = "is damaged" in said
    assert is_rebuilt == ("cached=false" in said)
    assert is_rebuilt or damage.__name__ == "flip_a_bit"


def test_a_flipped_id_is_noticed(world, capsys):
    expected = columns(world.open())
    data = world.files[0].read_bytes()
    ids = np.array(expected[0][:20], dtype=np.int32).tobytes()
    at = data.index(ids)
    world.files[0].write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert columns(world.open()) == expected
    assert "is damaged" in capsys.readouterr().out


def test_other_samples_window_or_tokenizer_are_another_file(world, frame):
    world.open()
    world.open(max_seq_len=300)
    world.write(tiny_samples(9))
    assert world.open().read == 9
    assert len(world.files) == 3
    packed = json.loads(frame.tokenizer_json)
    packed["normalizer"] = {"type": "NFC"}
    world.frame = Frame(json.dumps(packed))
    world.open()
    names = {path.name for path in world.files}
    assert len(names) == 3


def test_the_three_newest_are_kept_and_what_is_used_counts_as_new(world):
    for length in (201, 202, 203):
        world.open(max_seq_len=length)
    oldest, second, third = world.files
    os.utime(oldest, (1, 1))
    os.utime(second, (2, 2))
    os.utime(third, (3, 3))
    (oldest.parent / "left.partial").write_bytes(b"half")
    world.open(max_seq_len=201)
    world.open(max_seq_len=204)
    assert oldest in world.files
    assert third in world.files
    assert second not in world.files
    assert len(world.files) == 3


def test_a_wait_ends_at_its_deadline(world):
    with pytest.raises(ProjectError, match="encoding_not_done") as caught:
        world.open(place=SECOND, deadline_s=0)
    assert caught.value.values["waited_s"] == 0


def test_a_rank_that_waits_gets_what_the_first_one_makes(world):
    """Also where it finds a damaged file first: the first one replaces it."""
    expected = columns(world.open())
    cut(world.files[0])
    found = []
    waiting = threading.Thread(target=lambda: found.append(columns(world.open(place=SECOND, deadline_s=60))))
    waiting.start()
    world.open()
    waiting.join(60)
    assert found == [expected]


def test_a_corpus_that_can_not_be_encoded_leaves_nothing(world):
    with pytest.raises(ProjectError, match="sample_too_long"):
        world.open(max_seq_len=10)
    assert not Path(world.data.encoded).exists()


def test_a_cached_corpus_is_opened_without_heavy_libraries(world):
    """Neither torch nor transformers, and of the tokenizer nothing but its digest."""
    world.open()
    code = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from corpus_builder.fast_tokens import FastTokens
from trainer.corpus_cache import open_corpus
from trainer.device import Place
from trainer.encode import check_samples
from trainer.voice import Voice

place = Place(0, 0, 1, False)
frame = SimpleNamespace(digest={world.frame.digest!r})
samples = check_samples(Path({world.data.samples!r}), is_own=True)
corpus = open_corpus(samples, frame, Path({world.data.encoded!r}), tokens=FastTokens(frame), max_seq_len=256,
                     place=place, voice=Voice(place))
assert len(corpus.train) == 22, len(corpus.train)
heavy = {{"torch", "transformers", "tokenizers", "tiktoken", "pandas", "datasets", "deepspeed", "jinja2"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cached=true" in done.stdout
