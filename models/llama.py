"""The Llama family: Llama 1 to 3.x, SmolLM2, TinyLlama, Yi and whoever else calls itself "llama"; Mistral.

Mistral computes the same where its window is not smaller than the capacity.
"""

from __future__ import annotations

from specedge.models.family import Family

__all__ = ["LLAMA", "MISTRAL"]

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)

MISTRAL = Family(name="mistral", model_types=("mistral",), window="sliding_window")
