"""A box that answers from a script and refuses any question that it was not told about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Answer = dict[str, Any] | Exception | Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class FakeBox:
    """`answers`: per operation what to answer, in order; the last one is repeated."""

    answers: dict[str, list[Answer]]
    name: str = "gpu@box:22"
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    streamed: dict[str, bytes] = field(default_factory=dict)

    def ask(
        self, op: str, args: Mapping[str, Any], *, timeout_s: float, stream: Iterable[bytes] | None = None
    ) -> dict[str, Any]:
        assert timeout_s > 0
        self.asked.append((op, args))
        if not self.answers.get(op):
            raise AssertionError(f"no answer scripted for {op}")
        if stream is not None:
            self.streamed[op] = b"".join(stream)
        script = self.answers[op]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(args) if callable(answer) else answer

    def close(self) -> None:
        pass

    @property
    def operations(self) -> list[str]:
        return [op for op, _ in self.asked]
