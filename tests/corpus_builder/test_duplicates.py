"""Copies, near-copies, contradictions, and the split that keeps them together."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_builder import duplicates, ledger, sketches
from corpus_builder.build import build
from corpus_builder.duplicates import held_out
from corpus_builder.entries import Mark, Summary
from corpus_builder.groups import Groups
from corpus_builder.ledger import Ledger, repeated
from corpus_builder.reading import InputFile
from corpus_builder.request import load_request
from corpus_builder.shingles import Words, shingles, similar_pairs
from tests.corpus_builder.small_world import read_samples

ZH = "守灯人在黄昏点灯，海鸥陪着她。风从西边来，浪有三米高。船长说今夜有雾，请把灯点得更亮一些；她点了点头。"
EN = "The keeper lights the lamp at dusk and the gulls keep her company while the wind comes from the west tonight"


def pairs_of(texts, similarity=0.8):
    words = Words()
    sets = [shingles(words.coded(text)) for text in texts]
    return list(similar_pairs(sets, similarity, Groups(len(sets))))


def sketched_pairs_of(texts, similarity=0.8):
    sketcher = sketches.Sketcher()
    return list(sketches.similar_pairs([sketcher.sketch(text) for text in texts], similarity, Groups(len(texts))))


@pytest.mark.parametrize("find", [pairs_of, sketched_pairs_of])
@pytest.mark.parametrize(
    ("one", "other", "is_near"),
    [
        (ZH * 2 + "完", ZH * 2 + "了", True),
        (EN, EN.upper() + "!", True),
        (ZH, ZH.replace("，", "").replace("。", "\n"), True),
        (ZH, "".join(reversed(ZH)), False),
        (EN, "A quite different sentence that shares the word lamp and nothing else of what was said before", False),
        ("好的", "好吧", False),
        ("好的", "好的。", True),
    ],
)
def test_near_copies_are_told_in_both_ways(find, one, other, is_near):
    unrelated = [f"这一句与别的都不相干，编号 {at} 不同，词也换成第 {at * 7} 种说法。" for at in range(3)]
    assert ((0, 4) in find([one, *unrelated, other])) == is_near


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), similarity=st.sampled_from([0.5, 0.7, 0.8, 0.95, 1.0]))
def test_exact_comparison_misses_no_pair(seed, similarity):
    draw = random.Random(seed)
    texts = ["".join(draw.choice("早灯海风雾船") for _ in range(draw.randrange(4, 30))) for _ in range(8)]
    texts += [text[: draw.randrange(3, len(text))] for text in texts]
    sets = [shingles(text) for text in texts]
    wanted = Groups(len(sets))
    for later in range(len(sets)):
        for earlier in range(later):
            if len(sets[earlier] & sets[later]) >= similarity * len(sets[earlier] | sets[later]):
                wanted.join(earlier, later)
    found = Groups(len(sets))
    list(similar_pairs(sets, similarity, found))
    assert [found.find(at) for at in range(len(sets))] == [wanted.find(at) for at in range(len(sets))]


def test_sketches_find_what_the_exact_comparison_finds():
    draw = random.Random(5)
    texts = ["".join(draw.choice(ZH) for _ in range(300)) for _ in range(60)]
    texts += [text[:-3] + "改了三" for text in texts[:20]]
    assert sorted(sketched_pairs_of(texts)) == sorted(pairs_of(texts)) == [(at, at + 60) for at in range(20)]


def test_words_of_a_language_without_blanks_are_its_characters():
    words = Words()
    assert len(words.coded("The lamp，点灯 lamp")) == 5
    assert words.coded("LAMP") == words.coded("lamp!")


def mark(unit, *, document=None, said=None, prompt=0, target=0):
    return Mark(unit, unit if document is None else document, unit if said is None else said, 9, unit + 1, (unit,),
                (prompt or 1000 + unit, target))  # fmt: skip


def ledger_of(*files):
    """Return a ledger of files, each a class and its marks."""
    made = Ledger()
    for number, (sample_class, marks) in enumerate(files):
        file = InputFile(name=f"{number}.md", sample_class=sample_class, bytes=1, encoding="utf-8")
        made.enter(Summary(file=file, units_read=1, units_kept=1, samples=1, lost_tokens=0, marks=tuple(marks)))
    return made


def test_equal_texts_are_found_across_classes_but_not_inside_a_document():
    made = ledger_of(("soul", [mark(1, document=7, said=5), mark(2, document=7, said=5)]), ("tool", [mark(3, said=5)]))
    assert list(made.equal_pairs()) == [(0, 2)]


def test_prompt_with_several_targets_is_a_contradiction():
    made = ledger_of(
        ("tool", [mark(1, prompt=5, target=1), mark(2, prompt=5, target=2), mark(3, prompt=6, target=1)]),
        ("relation", [mark(4, prompt=5, target=2), mark(5, prompt=6, target=1)]),
    )
    assert made.contradictions() == [[0, 1, 3]]
    assert made.place_of(3) == ledger.Place("1.md", 5)


def test_repeated_numbers_are_the_same_in_both_ways(monkeypatch):
    numbers = [5, 1, 5, 2**64 - 1, 3, 2**64 - 1]
    few = list(repeated(numbers))
    monkeypatch.setattr(ledger, "_FEW", 0)
    from array import array

    assert list(repeated(array("Q", numbers))) == few == [0, 2, 3, 5]


def test_split_is_by_document_and_keeps_near_copies_together():
    files = [[mark(10 * at, document=at), mark(10 * at + 1, document=at)] for at in range(200)]
    made = ledger_of(*((("relation", "soul")[at % 2], marks) for at, marks in enumerate(files)))
    groups = Groups(len(made))
    groups.join(0, 399)
    sides = held_out(made, groups, 0.3)
    assert all(sides[2 * at] == sides[2 * at + 1] for at in range(200))
    assert sides[0] == sides[399]
    assert 0.2 < sum(sides) / 400 < 0.4
    assert not any(held_out(made, Groups(len(made)), 0.0))


def write_twins(world):
    for name, said in (("x.md", ZH), ("y.md", ZH + "晚安"), ("z.md", ZH)):
        (world.dialogs / name).write_text(f"冰朔：讲个故事\n铸渊：{said}\n", "utf-8")


@pytest.mark.parametrize("limit", [0, 10**6])
def test_build_names_copies_and_contradictions(world, monkeypatch, limit):
    monkeypatch.setattr(duplicates, "EXACT_UP_TO_CHARACTERS", limit)
    write_twins(world)
    manifest = build(load_request(world()))
    found = {(one.kind, one.path): one for one in manifest.findings}
    assert (found["near_copy", "y.md"].count, found["near_copy", "y.md"].others) == (1, ("x.md",))
    assert (found["equal_text", "z.md"].count, found["equal_text", "z.md"].others) == (1, ("x.md",))
    assert {path for kind, path in found if kind == "contradiction"} == {"x.md", "y.md", "z.md"}
    assert manifest.contradictory_prompts == 1
    assert manifest.found() == {"equal_text": 2, "near_copy": 1, "contradiction": 3}  # tool.jsonl has a copy


def test_replicas_and_sections_of_a_document_are_no_copies(world):
    (world.sources / "docs/a.md").write_text(f"## One\n\n{ZH}\n", "utf-8")  # the section is the whole
    manifest = build(load_request(world()))
    assert [one.path for one in manifest.findings] == ["tool.jsonl"]


@pytest.mark.parametrize("limit", [0, 10**6])
def test_twins_and_all_parts_of_a_document_are_on_one_side(world, monkeypatch, limit):
    monkeypatch.setattr(duplicates, "EXACT_UP_TO_CHARACTERS", limit)
    write_twins(world)
    for at in range(12):
        (world.dialogs / f"{at}.md").write_text(f"冰朔：{at}？\n铸渊：{at * 7919}\n" * 40, "utf-8")
    manifest = build(load_request(world(plan={**world.plan, "validation_share": 0.5})))
    sides = {}
    for sample in read_samples(world):
        sides.setdefault(sample.origin.path if sample.sample_class != "tool" else sample.id, set()).add(sample.split)
    assert all(len(found) == 1 for found in sides.values())
    assert sides["x.md"] == sides["y.md"] == sides["z.md"]
    assert {side for found in sides.values() for side in found} == {"train", "validation"}
    held = sum(account.validation_samples for account in manifest.classes.values())
    assert held == sum(sample.split == "validation" for sample in read_samples(world))


def test_sketches_are_kept_and_a_damaged_file_is_made_again(world, monkeypatch):
    monkeypatch.setattr(duplicates, "EXACT_UP_TO_CHARACTERS", 0)
    write_twins(world)
    first = build(load_request(world()))
    path = world.out / ".cache/sketches.bin"
    kept = path.read_bytes()
    made = []
    whole = sketches.Sketcher.sketch
    monkeypatch.setattr(sketches.Sketcher, "sketch", lambda self, text: made.append(text) or whole(self, text))
    assert build(load_request(world())) == first
    assert made == []
    path.write_bytes(kept[:-1] + b"x")
    assert build(load_request(world())) == first
    assert made
    assert path.read_bytes() == kept


def test_nothing_is_looked_for_where_it_is_off(world):
    write_twins(world)
    manifest = build(load_request(world(plan={**world.plan, "checks": {"duplicates": False}})))
    assert {one.kind for one in manifest.findings} == {"contradiction"}


def test_small_corpus_does_not_load_what_it_does_not_need(world):
    import subprocess
    import sys

    code = (
        "import sys; from corpus_builder.build import main; main(sys.argv[1:]); "
        "print(sorted({'numpy', 'scipy', 'datasketch', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(world())], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"
    assert json.loads((world.out / "manifest").read_text())["samples_sha256"]
