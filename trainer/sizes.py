"""How large a model is, by the headers of its weight files and its config; no weights are loaded.

Side effects: reads the model folder.

    >>> read_model_size(Path("Qwen2.5-7B")).parameters
    7615616512
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.base_model import CONFIG, INDEXES, PICKLED_WEIGHTS, WEIGHTS
from trainer.recipe import Lora

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A decoder of the Llama family (Llama, Qwen2, Mistral …), counted in elements.

    Attributes:
        shapes: Each tensor by its name; a head that shares the embeddings' weight is none of its own.
        stored_bytes: Of all weight files.
        hidden, intermediate, kv: Width of the residual stream, of the MLP, and of all keys of one token.
    """

    shapes: dict[str, Shape]
    stored_bytes: int
    layers: int
    hidden: int
    intermediate: int
    kv: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(prod(shape) for shape in self.shapes.values())

    def trained(self, lora: Lora | None) -> int:
        """Return how many parameters a method trains.

        LoRA adds r x (in + out) to each linear map that it targets (Hu et al. 2021, section 4.1); `all-linear` means
        every one but the head (PEFT's guide "LoRA"); `modules_to_save` are trained whole.
        """
        if lora is None:
            return self.parameters
        linear = {name: shape for name, shape in self.shapes.items() if len(shape) == 2 and EMBEDDINGS not in name}
        adapters = sum(lora.r * sum(shape) for name, shape in linear.items() if _is_target(name, lora))
        return adapters + sum(prod(self.shapes[name]) for name in self.shapes if _ends_with(name, lora.modules_to_save))


def _is_target(name: str, lora: Lora) -> bool:
    if lora.target_modules == "all-linear":
        return not name.endswith(HEAD)
    return _ends_with(name, lora.target_modules)


def _ends_with(name: str, modules: Any) -> bool:
    path = "." + name.removesuffix(".weight").removesuffix(".bias")
    return any(path.endswith("." + module) for module in modules)


def read_model_size(folder: Path) -> ModelSize | None:
    """Return the size of a model folder that `base_model.check_base_model` found whole.

    None where its config has other words than the Llama family's: then nothing is known, and nothing is guessed.
    """
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        kv_heads, head_width = int(config.get("num_key_value_heads") or heads), config.get("head_dim")
        layers, intermediate = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        vocabulary, kv = int(config["vocab_size"]), kv_heads * int(head_width or hidden // heads)
    except (KeyError, TypeError, ValueError):
        return None
    files = weight_files(folder)
    stored_bytes = sum(path.stat().st_size for path in files)
    if all(path.suffix == ".safetensors" for path in files):
        shapes = {name: shape for path in files for name, shape in read_shapes(path).items()}
    else:
        shapes = _shapes_of_config(config, hidden=hidden, kv=kv, layers=layers, vocabulary=vocabulary)
    if config.get("tie_word_embeddings"):
        shapes.pop(HEAD, None)
    return ModelSize(
        shapes=shapes,
        stored_bytes=stored_bytes,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        kv=kv,
        vocabulary=vocabulary,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights, in the order in which loaders look for them."""
    for name in INDEXES:
        if (folder / name).is_file():
            weight_map = json.loads((folder / name).read_text("utf-8"))["weight_map"]
            return [folder / file for file in sorted(set(weight_map.values()))]
    return [next(folder / name for name in (WEIGHTS, PICKLED_WEIGHTS) if (folder / name).is_file())]


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shape of each tensor in a safetensors file: 8 bytes little-endian length, then a JSON header.

    Raises:
        ProjectError: `base_model_incomplete`: the header cannot be read.
    """
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ProjectError("base_model_incomplete", path=str(path.parent), missing=path.name) from error


def _shapes_of_config(config: Any, *, hidden: int, kv: int, layers: int, vocabulary: int) -> dict[str, Shape]:
    """Return the large tensors of a Llama-like model (modeling_llama.py) whose file has no header to read."""
    intermediate = int(config["intermediate_size"])
    shapes: dict[str, Shape] = {"model." + EMBEDDINGS: (vocabulary, hidden), HEAD: (vocabulary, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    per_layer: dict[str, Shape] = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in per_layer.items()}
    return shapes
