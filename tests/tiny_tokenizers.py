"""Tokenizers small enough to be built offline, and a tiny model saved with one."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox stops here. END",
    "größer, naïve: 你好世界",
    "emoji 😀🎉 and 👩\u200d👩\u200d👧",
    "x = f(a) + 1\n\n",
] * 3
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A GPT-2-like tokenizer, small enough to spread a character over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def chatty_tokenizer() -> PreTrainedTokenizerFast:
    """The same with a chat template."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def matching_config(name: str = "llama") -> PretrainedConfig:
    """A tiny configuration whose vocabulary is the tokenizer's."""
    config = TINY[name]()
    config.vocab_size = len(byte_level_tokenizer())
    return config


def save_tiny_model(folder: Path) -> Path:
    """Weights, configuration and tokenizer, as `from_pretrained` finds them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(matching_config())
    model.save_pretrained(folder)
    chatty_tokenizer().save_pretrained(folder)
    return folder
