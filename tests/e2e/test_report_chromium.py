"""The report in a real browser: nothing on its console, the manifest's counts on the page, Chinese in glyphs.

The pictures are kept in test-results/.
"""

import json
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from corpus_builder.build import build
from corpus_builder.plan import load_plan
from corpus_builder.request import load_request

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "test-results"
COLUMNS = ("samples", "unique", "validation_samples", "characters", "tokens", "trained_tokens", "lost_tokens")
pytestmark = pytest.mark.e2e


def browse(page, tmp_path, *flags):
    """Open a file in Chromium and return its document and what it said on its console."""
    done = subprocess.run(
        [
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1000,1400", "--enable-logging=stderr", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


class Tables(HTMLParser):
    """The cells of each table, by its id."""

    def __init__(self, document):
        super().__init__()
        self.rows, self._table, self._in_cell = {}, "", False
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self._table = dict(attrs)["id"]
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("td", "th"):
            self.rows[self._table][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_cell:
            self.rows[self._table][-1][-1] += data


@pytest.fixture(scope="module")
def built(tmp_path_factory, chatml_model_dir):
    """The demo's corpus with something to find in it, and its manifest."""
    folder = tmp_path_factory.mktemp("report")
    dialogs = folder / "dialogs"
    dialogs.mkdir()
    for path in (ROOT / "demo/dialogs").iterdir():
        (dialogs / path.name).write_bytes(path.read_bytes())
    (dialogs / "号码.md").write_text("阿汀：我的号码是 13912345678，邮箱 a@b.org\n凯星：记下了。\n", "utf-8")
    plan = load_plan(ROOT / "configs/corpus/demo.yaml", environment={}, sets=[("validation_share", "0.2")]).value
    request = {
        "plan": plan.model_dump(mode="json"), "sources_dir": str(ROOT), "dialog_dir": str(dialogs),
        "base_model_dir": str(chatml_model_dir), "max_seq_len": 256, "suite": None, "lang": "zh",
        **{name: str(folder / name) for name in ("samples", "manifest")}, "report": str(folder / "report.html"),
    }  # fmt: skip
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    build(load_request(folder / "request.json"))
    return folder, json.loads((folder / "manifest").read_text("utf-8"))


def test_counts_on_the_page_are_the_manifests(built, tmp_path):
    folder, manifest = built
    document, console = browse(folder / "report.html", tmp_path, "--dump-dom")
    assert console == []
    rows = Tables(document).rows
    shown = [[int(cell.replace(",", "")) for cell in row[1 : 1 + len(COLUMNS)]] for row in rows["classes"][1:]]
    wanted = [[account[key] for key in COLUMNS] for account in manifest["classes"].values()]
    assert len(wanted) == 3
    assert shown == [*wanted, [sum(column) for column in zip(*wanted, strict=True)]]
    assert [row[2] for row in rows["gates"][1:]] == [f"{gate['found']:g}" for gate in manifest["gates"]]
    assert len(rows["files"]) == 1 + len(manifest["files"])
    assert sum(int(row[2]) for row in rows["findings"][1:]) == sum(one["count"] for one in manifest["findings"]) >= 2
    assert document.count("<svg") == 3


def test_full_page_marks_trained_tokens_and_the_other_has_no_text(built, tmp_path):
    folder, _ = built
    document, console = browse(folder / "report.full.html", tmp_path, "--dump-dom")
    assert console == []
    assert 'class="taught"' in document
    assert "号码.md" in document
    public = (folder / "report.html").read_text("utf-8")
    assert "号码" not in public
    assert "13912345678" not in public


@pytest.mark.parametrize("name", ["report", "report.full"])
def test_picture_is_drawn_light_and_dark(built, tmp_path, name):
    KEPT.mkdir(exist_ok=True)
    pictures = {}
    for scheme, flags in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        path = KEPT / f"corpus-{name}-{scheme}.png"
        path.unlink(missing_ok=True)
        _, console = browse(built[0] / f"{name}.html", tmp_path, f"--screenshot={path}", *flags)
        assert console == []
        pictures[scheme] = path.read_bytes()
    assert pictures["light"] != pictures["dark"]
    assert min(map(len, pictures.values())) > 20_000


def picture_of(text, tmp_path):
    page = tmp_path / "glyph.html"
    page.write_text(f'<meta charset="utf-8"><body style="font:60px sans-serif">{text}', "utf-8")
    browse(page, tmp_path, f"--screenshot={tmp_path / 'glyph.png'}")
    return (tmp_path / "glyph.png").read_bytes()


def test_chinese_is_drawn_in_glyphs_and_not_in_boxes(tmp_path):
    missing = picture_of("\U0010fff0", tmp_path)  # nobody's character: the box of a missing glyph
    pictures = {picture_of(text, tmp_path) for text in ("灯", "海")}
    assert len(pictures | {missing}) == 3


def test_a_page_that_breaks_its_policy_is_noticed(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text(
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'"><style>a{}</style>', "utf-8"
    )
    _, console = browse(page, tmp_path, "--dump-dom")
    assert len(console) == 1
