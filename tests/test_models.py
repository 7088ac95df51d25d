"""Models over the paged cache: greedy tokens equal to transformers' own, and refusals that say why.

The driver here is the least an engine can be: it prefills in uneven chunks while others decode, through shuffled blocks
and rows, in a cache that starts full of NaN.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import TINY, VOCAB, WINDOW, generate, reference_of, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    GPTJConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
    ViTConfig,
)
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

from asyncsched.errors import AsyncschedError, ConfigError
from executors import kv_cache
from executors.attention import Attend, AttentionRule
from executors.errors import ModelLoadError, UnsupportedModelError
from executors.kv_cache import KvCache
from executors.models import Model
from executors.named_configs import CONFIGS, named_config
from executors.plain_attention import PlainAttention
from executors.step_view import Chunk, StepView, view_of

torch.set_num_threads(1)

BLOCK_SIZE = 4
NEW_TOKENS = 20
PROMPT_LENGTHS = (3, 21, 12, 34)
CHUNKS = (9, 5, 1, 7)  # tokens a prefill may have in a step, in turn


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


class Driver:
    """Runs requests to their end: request i arrives at step i, decodes go first, logits of every step are kept."""

    def __init__(self, model: Model, requests: list[list[int]], new_tokens: int = NEW_TOKENS) -> None:
        self.model = model
        self.tokens = [list(request) for request in requests]
        self.prompt_lengths = [len(request) for request in requests]
        self.done = [0] * len(requests)
        self.logits: list[list[torch.Tensor]] = [[] for _ in requests]
        self.new_tokens = new_tokens
        self.mixed_steps = 0
        sizes = [-(-(length + new_tokens) // BLOCK_SIZE) for length in self.prompt_lengths]
        pool = list(range(1, sum(sizes) + 1))
        random.Random(1).shuffle(pool)
        self.blocks = [[pool.pop() for _ in range(size)] for size in sizes]
        self.kv = model.allocate_kv(sum(sizes), BLOCK_SIZE)
        for cache in (*self.kv.keys, *self.kv.values):
            cache.fill_(torch.nan)

    def run(self) -> list[list[int]]:
        """Output tokens of each request."""
        step = 0
        while any(len(self.logits[i]) < self.new_tokens for i in range(len(self.tokens))):
            running = [i for i in range(min(step + 1, len(self.tokens))) if len(self.logits[i]) < self.new_tokens]
            decodes = [i for i in running if self.logits[i]]
            prefills = [i for i in running if not self.logits[i]]
            self.mixed_steps += bool(decodes and prefills)
            self._step(decodes + prefills, CHUNKS[step % len(CHUNKS)])
            step += 1
        return [tokens[length:] for tokens, length in zip(self.tokens, self.prompt_lengths, strict=True)]

    def _step(self, requests: list[int], limit: int) -> None:
        chunks = []
        for i in requests:
            tokens = self.tokens[i][self.done[i] : self.done[i] + limit]
            chunks.append(Chunk(tokens, self.done[i], self.blocks[i]))
            self.done[i] += len(tokens)
        logits = self.model.forward(
            self.arrange(view_of(chunks, block_size=BLOCK_SIZE, device=self.model.device)), self.kv
        )
        for i, of_request in zip(requests, logits, strict=True):
            if self.done[i] == len(self.tokens[i]):
                self.logits[i].append(of_request)
                self.tokens[i].append(int(of_request.argmax()))

    def arrange(self, view: StepView) -> StepView:
        """The same view with its table rows scattered over a larger table."""
        rows = torch.randperm(view.num_seqs + 3, generator=torch.Generator().manual_seed(view.num_tokens))
        table = torch.zeros((view.num_seqs + 3, view.table.shape[1]), dtype=torch.int32)
        table[rows[: view.num_seqs]] = view.table
        return dataclasses.replace(view, rows=rows[: view.num_seqs].int(), table=table)


class PaddedDriver(Driver):
    """As a captured graph sees a decode step: padding rows in the null block, and only the capacity for a length."""

    def arrange(self, view: StepView) -> StepView:
        if not view.is_decode:
            return view
        padding = 3
        capacity = view.table.shape[1] + 2

        def padded(tensor: torch.Tensor, value: int) -> torch.Tensor:
            return torch.cat((tensor, torch.full((padding,), value, dtype=torch.int32)))

        table = torch.zeros((view.num_seqs + 1, capacity), dtype=torch.int32)
        table[:-1, : view.table.shape[1]] = view.table
        return dataclasses.replace(
            view,
            token_ids=padded(view.token_ids, 0),
            positions=padded(view.positions, 0),
            kv_positions=padded(view.kv_positions, 0),
            query_start=torch.arange(view.num_seqs + padding + 1, dtype=torch.int32),
            seq_lens=padded(view.seq_lens, 1),
            rows=padded(view.rows, view.num_seqs),
            table=table,
            num_tokens=view.num_tokens + padding,
            num_seqs=view.num_seqs + padding,
            max_seq_len=capacity * BLOCK_SIZE,
            num_decodes=view.num_seqs + padding,
        )


@pytest.fixture(scope="module")
def models() -> Callable[[str], Model]:
    built: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in built:
            built[name] = tiny_model(name)
        return built[name]

    return model


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_equal_generate(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    reference = reference_of(model)
    requests = prompts()
    driver = Driver(model, requests)
    outputs = driver.run()
    assert outputs == [generate(reference, prompt, NEW_TOKENS) for prompt in requests]
    assert driver.mixed_steps > 2
    for tokens, length, logits in zip(driver.tokens, PROMPT_LENGTHS, driver.logits, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens[:-1]])).logits[0, length - 1 :]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", TINY)
def test_the_reference_can_fail(name: str, models: Callable[[str], Model]) -> None:
    """Its tokens vary, and each prompt token that attention may reach has a say."""
    reference = reference_of(models(name))
    for prompt in prompts():
        changed = [*prompt[:-3], (prompt[-3] + 1) % VOCAB, *prompt[-2:]]
        tokens = generate(reference, prompt, NEW_TOKENS)
        assert len(set(tokens)) >= 5
        assert tokens != generate(reference, changed, NEW_TOKENS)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss-sinks", "mistral-window"])
def test_padding_rows_and_capacity_change_nothing(name: str, models: Callable[[str], Model]) -> None:
    assert PaddedDriver(models(name), prompts()).run() == Driver(models(name), prompts()).run()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss-sinks"])
def test_bounds_serve_where_lengths_may_not_be_read(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    bounded = dataclasses.replace(model, backend=PlainAttention(reads_lengths=False))
    assert Driver(bounded, prompts()).run() == Driver(model, prompts()).run()


def test_a_step_that_samples_nothing(models: Callable[[str], Model]) -> None:
    model = models("llama")
    kv = model.allocate_kv(4, BLOCK_SIZE)
    view = view_of([Chunk([1, 2, 3], 0, [2])], block_size=BLOCK_SIZE, device=model.device)
    logits = model.forward(dataclasses.replace(view, logits_at=view.logits_at[:0]), kv)
    assert logits.shape == (0, VOCAB)
    assert logits.dtype == torch.float32
    assert not kv.keys[0][2, :3].isnan().any()


def test_what_a_model_says_about_itself(models: Callable[[str], Model]) -> None:
    llama, gemma, mistral = models("llama"), models("gemma2"), models("mistral-window")
    assert (llama.num_layers, llama.vocab_size, llama.max_model_len) == (2, VOCAB, 256)
    assert llama.kv_bytes_per_token == 2 * 2 * (8 + 8) * 4
    assert [layer.window for layer in gemma.layers] == [WINDOW, None, WINDOW]
    assert {layer.softcap for layer in gemma.layers} == {2.0}
    assert (llama.sliding_window, gemma.sliding_window, mistral.sliding_window) == (None, None, WINDOW)
    assert all(layer.has_sinks for layer in models("gpt-oss-sinks").layers)
    kv = gemma.allocate_kv(5, 16)
    assert [tuple(keys.shape) for keys in kv.keys] == [(6, 16, 2, 16)] * 3


def test_embeddings_are_tied(models: Callable[[str], Model]) -> None:
    module = models("llama-tied").module
    assert module.lm_head.weight is module.model.embed_tokens.weight


# Refusals


class Sabotaged:
    """Plain attention under another rule."""

    captures_mixed = False

    def __init__(self, change: Callable[[AttentionRule], AttentionRule]) -> None:
        self.change = change

    def begin(self, view: StepView, kv: KvCache) -> Attend:
        attend = PlainAttention(reads_lengths=True).begin(view, kv)
        return lambda *tensors: attend(*tensors[:-1], self.change(tensors[-1]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda rule: rule._replace(scale=rule.scale * 1.01)),
        ("mistral-window", lambda rule: rule._replace(window=None)),
        ("mistral-window", lambda rule: rule._replace(window=rule.window + 1)),
        ("mistral-window", lambda rule: rule._replace(window=rule.window - 1)),
        ("gemma2", lambda rule: rule._replace(softcap=None)),
        ("gemma2", lambda rule: rule._replace(window=None)),
        ("gemma3", lambda rule: rule._replace(window=WINDOW)),
        ("gpt-oss-sinks", lambda rule: rule._replace(sinks=None)),
    ],
)
def test_the_self_check_finds_a_wrong_rule(
    name: str, change: Callable[[AttentionRule], AttentionRule], models: Callable[[str], Model]
) -> None:
    wrong = dataclasses.replace(models(name), backend=Sabotaged(change))
    with pytest.raises(UnsupportedModelError, match=r"differ from those of its own attention by \d") as refusal:
        wrong.self_check()
    assert "\n" not in str(refusal.value)


def test_the_self_check_passes_the_window_of_a_real_model() -> None:
    """A window far longer than any prompt the check could afford is shortened for it, and restored."""
    config = TINY["mistral-window"]()
    config.sliding_window = 4096
    config.max_position_embeddings = 32768
    model = Model.load(config, device="cpu", dtype=torch.float32, dummy_weights=True)
    assert model.sliding_window == 4096
    assert model.module.config.sliding_window == 4096
    with pytest.raises(UnsupportedModelError, match="differ"):
        dataclasses.replace(model, backend=Sabotaged(lambda rule: rule._replace(window=None))).self_check()


_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {
    **_SMALL,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "bart": (lambda: BartConfig(vocab_size=64, d_model=32), "encoder-decoder"),
    "t5": (lambda: T5Config(vocab_size=64, d_model=32), "encoder-decoder"),
    "mamba": (lambda: MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "state-space"),
    "jamba": (lambda: JambaConfig(**_SMALL, intermediate_size=32), "state-space"),
    "qwen3_next": (lambda: Qwen3NextConfig(**{**_SMALL, "num_hidden_layers": 4}), "linear-attention"),
    "recurrent_gemma": (
        lambda: RecurrentGemmaConfig(**{**_SMALL, "num_hidden_layers": 3}, lru_width=32, intermediate_size=64),
        "recurrent",
    ),
    "bloom": (
        lambda: BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "never calls the attention hook",
    ),
    "gptj": (
        lambda: GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8),
        "never calls the attention hook",
    ),
    "llama4_text": (lambda: Llama4TextConfig(**_SMALL, num_local_experts=2), "attends within chunks"),
    "mpt": (lambda: MptConfig(vocab_size=64, d_model=32, n_heads=4, n_layers=2), "failed when it was tried out"),
    "phimoe": (  # its window is in its mask alone, and the hook isn't told
        lambda: PhimoeConfig(
            **_SMALL, num_key_value_heads=2, intermediate_size=32, num_local_experts=2, sliding_window=8,
            initializer_range=0.3,
        ),
        "differ from those of its own attention",
    ),
    "vit": (lambda: ViTConfig(), "cannot be built"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(AsyncschedError, match=reason) as refusal:
        Model.load(config(), device="cpu", dtype=torch.float32, dummy_weights=True)
    message = str(refusal.value)
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    assert len(message) < 300


# Loading


def saved(tmp_path: Path, model: Model) -> str:
    model.module.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_saved_model_is_loaded_again(tmp_path: Path, models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    loaded = Model.load(saved(tmp_path, model), device="cpu", dtype=torch.float32)
    assert Driver(loaded, prompts()).run() == Driver(model, prompts()).run()


def test_the_checkpoint_decides_the_dtype(tmp_path: Path, models: Callable[[str], Model]) -> None:
    model = Model.load(TINY["llama"](), device="cpu", dtype=torch.bfloat16, dummy_weights=True)
    assert model.dtype == torch.bfloat16
    loaded = Model.load(saved(tmp_path, model), device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert loaded.kv_bytes_per_token == models("llama").kv_bytes_per_token // 2


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "models/of/mine", "absent.gguf"])
def test_a_missing_model_is_one_line(name: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        Model.load(name, device="cpu")
    assert str(error.value) == f"{name}: there is no such model folder"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "./" + "a" * 300])
def test_a_name_that_is_no_path_is_one_line(name: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        Model.load(name, device="cpu")
    assert str(error.value).startswith(f"{name}: it cannot be looked up (")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no model can be loaded from there"),
        ({"config.json": "{"}, "no model can be loaded from there"),
        ({"config.json": '{"model_type": "no-such-thing"}'}, "no model can be loaded from there"),
        ({"config.json": json.dumps({"model_type": "llama", **_SMALL})}, "its weights cannot be loaded"),
        ({"config.json": json.dumps({"model_type": "bart"})}, "encoder-decoder"),
    ],
)
def test_a_broken_folder_is_one_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(AsyncschedError, match=message) as error:
        Model.load(str(tmp_path), device="cpu")
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_missing_weights_are_not_made_up(tmp_path: Path, models: Callable[[str], Model]) -> None:
    reference = reference_of(models("llama"))
    weights = {name: weight for name, weight in reference.state_dict().items() if "layers.1.mlp" not in name}
    reference.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ModelLoadError, match=r"3 weights are missing, model\.layers\.1\.mlp\.down_proj\.weight first"):
        Model.load(str(tmp_path), device="cpu")


def test_weights_of_other_shapes_are_named(tmp_path: Path, models: Callable[[str], Model]) -> None:
    reference_of(models("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB + 1}))
    with pytest.raises(
        ModelLoadError, match=r"2 weights have other shapes .*, lm_head\.weight first: \[128, 32\], not"
    ):
        Model.load(str(tmp_path), device="cpu")


def test_a_truncated_file_is_one_line(tmp_path: Path, models: Callable[[str], Model]) -> None:
    reference_of(models("llama")).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="its weights cannot be loaded; ") as error:
        Model.load(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ModelLoadError, match=r"short\.gguf: no model can be loaded from there; "):
        Model.load(str(tmp_path / "short.gguf"), device="cpu")


def test_random_weights_follow_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return tiny_model("llama", seed=seed, check=False).module.lm_head.weight

    state = torch.random.get_rng_state()
    torch.testing.assert_close(weights(3), weights(3), rtol=0, atol=0)
    assert not torch.equal(weights(3), weights(4))
    assert torch.equal(torch.random.get_rng_state(), state)
    narrow = tiny_model("llama", initializer_range=0.01).module.lm_head.weight
    assert 0.009 < float(narrow.std()) < 0.011


def test_a_pool_that_does_not_fit_says_what_would(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama")
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 100_000)
    with pytest.raises(ConfigError, match=r"num_blocks: 500 .* 23 blocks of 16 tokens would fit"):
        model.allocate_kv(500, 16)
    with pytest.raises(ConfigError):
        model.allocate_kv(24, 16)
    assert model.allocate_kv(23, 16).keys[0].shape[0] == 24


def _longrope() -> PretrainedConfig:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return Phi3Config(**_WIDE, max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=rope)


def _dynamic() -> PretrainedConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return LlamaConfig(**_WIDE, max_position_embeddings=64, rope_parameters=rope)


@pytest.mark.parametrize("config", [_longrope, _dynamic])
def test_rotary_frequencies_do_not_follow_the_batch(config: Callable[[], PretrainedConfig]) -> None:
    """Where they would, the context ends, and what shares the batch changes nothing before."""
    model = Model.load(config(), device="cpu", dtype=torch.float32, dummy_weights=True)
    assert model.max_model_len == 64
    reference = reference_of(model)
    assert "pinned" not in str(reference.model.rotary_emb.rope_type)
    requests = [[token % 64 for token in prompt] for prompt in prompts()]
    expected = [generate(reference, prompt, NEW_TOKENS) for prompt in requests]
    assert Driver(model, requests).run() == expected
    too_long = list(range(64)) * 2
    assert Driver(model, [too_long, *requests]).run()[1:] == expected


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [("llama-8b", 8.03e9, 131_072), ("llama-1b", 1.236e9, 32_768)],
)
def test_named_configurations_have_the_size_of_their_model(name: str, parameters: float, kv_bytes: int) -> None:
    config = named_config(name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert module.num_parameters() == pytest.approx(parameters, rel=0.002)
    assert 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 == kv_bytes


def test_a_tiny_named_configuration_runs() -> None:
    model = Model.load(named_config("llama-tiny"), device="cpu", dummy_weights=True)
    assert model.dtype == torch.float32
    assert len({token for output in Driver(model, prompts()).run() for token in output}) > 20


def test_an_unknown_configuration_is_told_the_names() -> None:
    with pytest.raises(ConfigError, match=", ".join(CONFIGS)):
        named_config("llama-9b")


def test_an_unknown_backend_is_told_the_names() -> None:
    with pytest.raises(ConfigError, match="auto, plain, triton"):
        tiny_model("llama", attention="flash")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        tiny_model("llama", attention="triton")
