"""Small corpora's accounts for tests of what is said about them."""

from corpus_builder.manifest import ClassAccount, FileAccount, Gate, Manifest


def small_manifest(*, verdict="warn", **changes):
    """Return the account of one document with five samples, one dialog without any, and one missing file."""
    values = {
        "plan_name": "zhuyuan",
        "plan_digest": "d",
        "tokenizer": "9be0",
        "max_seq_len": 64,
        "files": (
            FileAccount(
                path="docs/canary|name.md", sample_class="soul", bytes=3, encoding="utf-8", units_read=2, units_kept=1,
                samples=5, drops={"empty": 1},
            ),
        ),
        "missing": ("docs/b.md",),
        "classes": {
            "soul": ClassAccount(samples=5, unique=1, characters=3, tokens=12345, trained_tokens=678, lost_tokens=0)
        },
        "gates": (
            Gate(name="total", verdict=verdict, found=5, wanted=100, where=("docs/b.md", "canary dialog.md")),
            Gate(name="soul_files_found_share", verdict="pass", found=2 / 3, wanted=2 / 3),
        ),
        "samples_sha256": "0" * 64,
    }  # fmt: skip
    return Manifest(**{**values, **changes})
