"""Which heads make their own loss (head_loss.py), and in what chunks: known without importing torch. Pure."""

from __future__ import annotations

#: Trained tokens per chunk: at V = 151,936 its logits and their gradient take 0.16 GB each in 32 bits.
CHUNK_TOKENS = 256

#: Types (`model_type` of config.json) whose logits are `lm_head(hidden states)` and nothing more, each proven by
#: tests/trainer/test_head_loss.py. Others scale or cap their logits behind the head, or were never tried.
PLAIN_HEADS = frozenset(
    {
        "arcee", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "helium", "hunyuan_v1_dense", "llama", "ministral",
        "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
