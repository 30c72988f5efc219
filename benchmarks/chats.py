"""Chat samples of our own invention, the same ones for the same seed, as varied as people's. Side effects: writes.

Words are drawn from the tokenizer's own vocabulary by Zipf's law, and no sentence stands twice: a tokenizer that
remembers words meets as many new ones as in real text. What the sentences say is nothing.

    samples   turns    tokens (Qwen): median / mean / p99     languages
    5,000     2-13     320 / 480 / 2,550                       zh, en, code: a third each
"""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

from tests.tokenizers_real import qwen_ranks

SYSTEM_PROMPTS = ("你是灯塔,编号 LMP-0042。知道就直接回答,不知道就直说。", "You keep a lighthouse. Answer briefly.")
_LINES = (
    'def {a}_{b}({c}: int, {d}: str = "{a}") -> dict[str, int]:',
    "    for {a} in range({n}, len(self.{b}_{c})):",
    "        if {a}.{b}[{n}] != {c} and not {d}:  # {a} {b} {c}",
    '            raise ValueError(f"{a} {b}: {{{c}!r}}")',
    '    return {{"{a}": {n}, "{b}": [{c}, {d}]}}',
    "    {a}_{b} = await self.{c}.{d}(timeout={n}.5, retries={m})",
    "const {a} = {b}.map(({c}) => {c}.{d} * {n});",
    "SELECT {a}, count({b}) FROM {c} WHERE {d} > {n} GROUP BY {a};",
    "| {a} | {b} | {n} | {m} |",
    "",
)


class Chats:
    """Invents conversations out of one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        most = 15_000  # words of a language that somebody uses
        ranks = qwen_ranks()
        texts = [token.decode("utf-8", "replace") for token in sorted(ranks, key=ranks.__getitem__)]
        self._zh = [text for text in texts if all("\u4e00" <= character <= "\u9fff" for character in text)][:most]
        self._en = [text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].islower()
                    and text[1:].isalpha()][:most]  # fmt: skip
        self._zh_weights, self._en_weights = (list(accumulate(1 / rank for rank in range(8, len(words) + 8)))
                                              for words in (self._zh, self._en))  # fmt: skip

    def sample(self) -> dict[str, object]:
        """Return one sample as a first pipeline's line: `messages`, `source`, `weight`."""
        language = self._rng.choice(("zh", "en", "code"))
        prompt = [{"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)}] if self._rng.random() < 0.8 else []
        rounds = min(6, 1 + int(self._rng.expovariate(0.55)))
        size = self._rng.lognormvariate(1.75, 0.75)  # sentences of an answer
        turns = [
            {"role": role, "content": self._say(language, size if role == "assistant" else 1.5)}
            for _ in range(rounds)
            for role in ("user", "assistant")
        ]
        return {"messages": [*prompt, *turns], "source": f"chats:{language}", "weight": 1.0}

    def _say(self, language: str, size: float) -> str:
        count = max(1, round(self._rng.gauss(size, size / 3)))
        if language == "code":
            if count < 3:
                return self._en_sentence()
            lines = "\n".join(self._code_line() for _ in range(2 * count))
            return f"{self._en_sentence()}\n\n```python\n{lines}\n```\n{self._en_sentence()}"
        sentences = [self._zh_sentence() if language == "zh" else self._en_sentence() for _ in range(count)]
        paragraphs = [sentences[at : at + 4] for at in range(0, count, 4)]
        return "\n\n".join(("" if language == "zh" else " ").join(paragraph) for paragraph in paragraphs)

    def _zh_words(self, count: int) -> str:
        return "".join(self._rng.choices(self._zh, cum_weights=self._zh_weights, k=count))

    def _en_words(self, count: int) -> list[str]:
        return self._rng.choices(self._en, cum_weights=self._en_weights, k=count)

    def _zh_sentence(self) -> str:
        clauses = [self._zh_words(self._rng.randint(2, 7)) for _ in range(self._rng.randint(1, 4))]
        end = self._rng.choice(("。", "。", "。", "？", "！", f"({self._rng.randint(1, 2030)} 年)。", "：\n- ", "……"))
        return "，".join(clauses) + end

    def _en_sentence(self) -> str:
        words = self._en_words(self._rng.randint(5, 22))
        middle = self._rng.choice((", ", " ", " - ", "; ", ", it's ", f" {self._rng.randint(1, 9999):,} "))
        cut = self._rng.randint(2, len(words) - 1)
        return (" ".join(words[:cut]) + middle + " ".join(words[cut:])).capitalize() + self._rng.choice(".....?!")

    def _code_line(self) -> str:
        a, b, c, d = self._en_words(4)
        return self._rng.choice(_LINES).format(
            a=a, b=b, c=c, d=d, n=self._rng.randint(0, 99), m=self._rng.randint(1, 999)
        )


def write_chats(path: Path, samples: int, *, seed: int = 1) -> None:
    """Write `samples` invented conversations as JSON lines."""
    chats = Chats(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(samples):
            file.write(json.dumps(chats.sample(), ensure_ascii=False) + "\n")
