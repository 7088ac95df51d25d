"""Tiny random configurations, one per kind of attention, and what transformers itself generates from them.

Weights are wide (initializer range 0.5), so that a token depends on all of its prompt: at the usual 0.02 a tied
Llama repeats one token for ever, and a broken cache would go unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from executors.models import Model

VOCAB = 128
WINDOW = 8  # shorter than the prompts

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_MIXED_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}

TINY: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GATED),
    "llama-tied": lambda: LlamaConfig(**_GATED, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_GATED),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=16),
    "mistral-window": lambda: MistralConfig(**_GATED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **{**_GATED, **_MIXED_LAYERS},
        head_dim=16,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_GATED, **_MIXED_LAYERS}, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=False
    ),
    "phi3": lambda: Phi3Config(**_GATED),
    "gpt2": lambda: GPT2Config(**_SIZES),
    "gpt-neox": lambda: GPTNeoXConfig(**_SIZES, intermediate_size=48),
    "mixtral": lambda: MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_GATED, head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "gpt-oss-sinks": lambda: GptOssConfig(
        **{**_GATED, **_MIXED_LAYERS},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}


def tiny_model(name: str, **options: object) -> Model:
    """In float32 on the CPU, admitted by its self-check."""
    return Model.load(TINY[name](), device="cpu", dtype=torch.float32, dummy_weights=True, **options)


def reference_of(model: Model) -> PreTrainedModel:
    """The same weights in a model of transformers' own, with eager attention."""
    config = copy.deepcopy(model.module.config)  # the implementation is written into it
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    reference.load_state_dict(model.module.state_dict())
    return reference.eval()


def generate(reference: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of one request, alone."""
    settings = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=None, pad_token_id=0)
    tokens = torch.tensor([list(prompt)], device=reference.device)
    output = reference.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    return output[0, len(prompt) :].tolist()
