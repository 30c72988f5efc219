"""Random models of many architectures, a few thousand parameters each, from their configuration classes alone."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
#: What a type needs beyond `SIZES`.
OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "mixtral": EXPERTS,
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
}


def tiny_model(model_type: str, *, is_tied: bool = False, attention: str = "sdpa", **keys: Any) -> Any:
    """Return a random causal model of that type, in evaluation mode, the same one at every call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, **SIZES | OF_TYPE.get(model_type, {}) | {"tie_word_embeddings": is_tied} | keys
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        # Larger weights than a fresh model's: what stands before a token must be able to change its loss.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        return model
