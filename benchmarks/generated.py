"""Dialogs and documents of our own invention, the same ones for the same seed. Side effects: the writers write files.

The words are everyday words put together at random: the sentences mean nothing, their lengths, punctuation, code and
markup are those of notes and chats. Sentences come out of a pool, so that gigabytes are made in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

USER, ASSISTANT = ("守夜人", "Keeper"), ("灯塔", "Lamp (LMP-0042)", "Lamp")
_ZH = """
灯塔 海面 黄昏 风向 船只 记录 信号 雾气 潮水 岸边 值班 日志 备用 电池 玻璃 旋转 清晨 夜里 渔船 港口
码头 航线 温度 湿度 气压 北风 南风 浪高 能见度 检查 修理 更换 打开 关闭 等待 发现 报告 确认 注意
小心 慢慢 立刻 已经 没有 还是 因为 所以 如果 但是 然后 我们 你们 他们 今天 明天 昨天 这里 那里 一些
很多 非常 可能 应该 需要 可以 不必 先把 再去 看看 说明 问题 办法 结果 数字 表格 图纸 螺丝 齿轮 油料
木板 绳子 工具箱 电台 频率 声音 安静 清楚 模糊 远处 近处 左边 右边
"""
_EN = """
lamp keeper harbour tide signal fog glass gear battery log wind north south wave height check repair
replace open close wait report confirm careful slowly already because therefore however then today
tomorrow yesterday here there some many very perhaps should need can first again look answer
question method result number table drawing screw oil board rope radio channel noise quiet clear
blurred distance left right boat crew captain supply window ladder stone the a of and to in is that
it with as for on was at by this from be are or an which
"""
_CODE = (
    "def {0}_{1}(value: int) -> int:\n    return value * {2}",
    "{0}: {2}\n{1}:\n  - {2}\n  - {0}",
    'for {0} in range({2}):\n    print({0}, "{1}")\n    total += {0}',
    "SELECT {0}, {1} FROM log WHERE id > {2};",
)
_SHAPES = (
    "{name}：{said}",
    "**{name}**：{said}",
    "{name}: {said}",
    "## {name}\n\n{said}",
    "{name} 2026-05-03 10:22：{said}",
)
POOL = 20_000


class Writer:
    """Makes texts out of one seed. `language`: `zh`, `en` or `mixed`."""

    def __init__(self, seed: int, language: str = "mixed", *, pool: int = POOL) -> None:
        self._rng = random.Random(seed)
        self._zh, self._en = _ZH.split(), _EN.split()
        self._sentences = [self._sentence(self._language(language)) for _ in range(pool)]

    def _language(self, language: str) -> str:
        return language if language != "mixed" else self._rng.choice(("zh", "zh", "zh", "en"))

    def _sentence(self, language: str) -> str:
        rng = self._rng
        if language == "zh":
            clauses = ["".join(rng.choices(self._zh, k=rng.randint(2, 6))) for _ in range(rng.randint(1, 3))]
            return "，".join(clauses) + rng.choice(("。", "。", "。", "？", "！", f"，一共{rng.randint(2, 900)}次。"))
        words = rng.choices(self._en, k=rng.randint(5, 18))
        return " ".join(words).capitalize() + rng.choice(
            (". ", ". ", "? ", f" at {rng.randint(1, 12)}:{rng.randint(10, 59)}. ")
        )

    def paragraph(self, least: int, most: int) -> str:
        """Return some sentences on one line."""
        return "".join(self._rng.choices(self._sentences, k=self._rng.randint(least, most))).rstrip()

    def code(self) -> str:
        """Return a fenced block."""
        words = self._rng.choices(self._en, k=2)
        return f"```\n{self._rng.choice(_CODE).format(*words, self._rng.randint(1, 99))}\n```"

    def answer(self) -> str:
        """Return what an assistant says: paragraphs, seldom a list or code."""
        parts = [self.paragraph(2, 6) for _ in range(self._rng.randint(1, 6))]
        kind = self._rng.random()
        if kind < 0.1:
            parts.append(self.code())
        elif kind < 0.2:
            parts.append("\n".join(f"- {self.paragraph(1, 1)}" for _ in range(self._rng.randint(2, 6))))
        return "\n\n".join(parts)

    def dialog(self, rounds: int) -> str:
        """Return one Markdown dialog, in one of the shapes that people use."""
        shape, user, assistant = (self._rng.choice(choices) for choices in (_SHAPES, USER, ASSISTANT))
        turns = []
        for _ in range(rounds):
            turns.append(shape.format(name=user, said=self.paragraph(1, 3)))
            turns.append(shape.format(name=assistant, said=self.answer()))
        return "\n\n".join(turns) + "\n"

    def document(self, sections: int, *, most_answers: int = 4) -> str:
        """Return one Markdown document with `##` sections."""
        bodies = (
            "\n\n".join(self.answer() for _ in range(self._rng.randint(1, most_answers))) for _ in range(sections)
        )
        return f"# {self.paragraph(1, 1)}\n\n" + "\n\n".join(
            f"## {number} {self._rng.choice(self._zh)}\n\n{body}" for number, body in enumerate(bodies, start=1)
        )

    def dialogs(self, size_bytes: int) -> Iterator[str]:
        """Yield dialogs of 2 to 40 rounds until their bytes in UTF-8 come to `size_bytes`."""
        made = 0
        while made < size_bytes:
            text = self.dialog(self._rng.randint(2, 40))
            made += len(text.encode())
            yield text


def write_dialogs(folder: Path, size_bytes: int, *, seed: int = 1, language: str = "mixed") -> int:
    """Write dialogs of `size_bytes` altogether below `folder`, a hundred a folder; return how many."""
    count = 0
    pool = min(10 * POOL, max(POOL, size_bytes // 60))  # few sentences stand twice, up to 12 MB
    for count, text in enumerate(Writer(seed, language, pool=pool).dialogs(size_bytes), start=1):
        path = folder / f"{count // 100:04d}" / f"{count:06d}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return count
