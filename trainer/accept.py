"""Asks a model the questions of a suite and judges the answers: `python -m trainer.accept REQUEST.json`.

    REQUEST = {"model_dir": str, "suite": {...Suite}, "out": path, "base_model_dir"?: str}
    out     = {"suite", "right", "total", "wanted", "answers": [{"ask", "answer", "is_right"}]}

`model_dir` is a model, or an adapter, which then needs `base_model_dir`: its own configuration names no path.
Greedy, one question at a time, with exactly the frame that was trained: no system prompt but the suite's own.
Side effects: reads the model; writes `out`, which holds what the model said: 0600, by rename.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus_builder.config import validate
from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import Frame, load_frame
from corpus_builder.log_lines import log_line
from corpus_builder.sample import Message
from corpus_builder.suite import Suite, is_right
from trainer.base_model import check_adapter, check_base_model, is_adapter
from trainer.device import Place, choose_precision, find_device

ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)


class Answerer:
    """A model that answers by the frame, greedily.

    Args:
        model_dir: A model's folder, or an adapter's.
        base_model_dir: The base of an adapter, None for a model.
    """

    def __init__(self, model_dir: Path, base_model_dir: Path | None = None) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import GenerationConfig

        from trainer.model import load_weights

        device = find_device("auto", ALONE)
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}
        dtype = half.get(choose_precision("auto", device).name, torch.float32)
        self._frame: Frame = load_frame(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._model: Any = load_weights(base_model_dir or model_dir, dtype=dtype)
        if base_model_dir is not None:
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(self._model, str(model_dir))
        self._model.to(device.kind).eval()
        # The folder's own settings may sample or punish repetition: an acceptance is greedy and repeatable.
        stops = [self._frame.im_end, *_as_list(self._model.generation_config.eos_token_id)]
        self._model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=self._frame.im_end)
        self._stops = set(stops)

    def answer(self, messages: Sequence[Message], *, max_new_tokens: int) -> str:
        """Return the model's next turn."""
        import torch

        prompt = torch.tensor([self._frame.prompt(messages)], device=self._model.device)
        with torch.inference_mode():
            ids = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )[0, prompt.shape[1] :].tolist()
        end = next((at for at, token in enumerate(ids) if token in self._stops), len(ids))
        return str(self._tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()


def ask_suite(model_dir: Path, suite: Suite, base_model_dir: Path | None = None) -> dict[str, Any]:
    """Return every question of a suite with the model's answer and its verdict."""
    answerer = Answerer(model_dir, base_model_dir)
    system = [Message("system", suite.system_prompt)] if suite.system_prompt is not None else []
    answers = []
    for question in suite.questions:
        said = answerer.answer([*system, Message("user", question.ask)], max_new_tokens=suite.max_new_tokens)
        answers.append({"ask": question.ask, "answer": said, "is_right": is_right(question, said)})
    right = sum(bool(answer["is_right"]) for answer in answers)
    return {
        "suite": suite.name,
        "right": right,
        "total": len(answers),
        "wanted": suite.pass_at_least,
        "answers": answers,
    }


def write_private(value: dict[str, Any], path: Path) -> None:
    """Write JSON that only the owner can read, by rename."""
    partial = path.with_name(path.name + ".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
    os.replace(partial, path)


def _as_list(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


def main(argv: Sequence[str]) -> int:
    """Ask the suite of a request file; 0 whatever the answers are: the reader judges `right` against `wanted`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    (request_path,) = argv
    try:
        try:
            packed = json.loads(Path(request_path).read_text("utf-8"))
            model_dir, tree, out = Path(packed["model_dir"]), packed["suite"], Path(packed["out"])
            named_base = Path(packed.get("base_model_dir", model_dir))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProjectError("config_unreadable", path=request_path, reason=type(error).__name__) from error
        base_model_dir = named_base if is_adapter(str(model_dir)) else None
        if base_model_dir is not None:
            check_adapter(str(model_dir))
        check_base_model(str(base_model_dir or model_dir))
        result = ask_suite(model_dir, validate(Suite, tree, where=request_path), base_model_dir)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    write_private(result, out)
    print(log_line("check", "{right} of {total} questions right", right=result["right"], total=result["total"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
