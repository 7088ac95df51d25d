"""A causal language model of transformers, unchanged, over a paged KV cache.

`Model.load` finds the model, refuses what cannot work in one line, probes its attention layers and compares its logits
with those of its own attention. `forward` is one step: it neither waits for the device nor knows who is in the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from asyncsched.errors import AsyncschedError
from executors import compiled, few_rows, kv_cache, merged, self_check
from executors.attention import AttentionBackend, PagedStep, during
from executors.backends import choose_backend, prefer_products
from executors.compiled import Compiled, CompileSettings
from executors.errors import UnsupportedModelError, one_line
from executors.kv_cache import KvCache, LayerShape
from executors.model_files import load_config, load_weights, random_weights
from executors.probe import probe
from executors.refusals import refuse_config, refuse_layers, refuse_module
from executors.rotary import pin_frequencies
from executors.step_view import StepView

Report = Callable[[str], None]

CHECKING = "checking its logits against those of its own attention"
CONTEXT_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")  # first found is the context


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """What `load` found.

    name           what the user called it
    module         the transformers model, in eval mode, on `device`, its attention entering through the hook
    layers         shape of each attention layer, in the order in which they run
    vocab_size     width of the logits; token ids are below it
    max_model_len  longest context in tokens, or None where the configuration names none
    backend        what computes attention
    compiled       what was compiled, or None where layers run as they were written
    """

    name: str
    module: PreTrainedModel
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int | None
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    _index: dict[torch.nn.Module, int]
    _keeps_logits: bool
    _one: torch.Tensor
    compiled: Compiled | None = None

    @classmethod
    def load(
        cls,
        model: str | PretrainedConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        dummy_weights: bool = False,
        seed: int = 0,
        initializer_range: float | None = None,
        attention: str = "auto",
        merge: bool = True,
        own_products: bool = True,
        compile: CompileSettings | None = None,
        report: Report | None = None,
        check: bool = True,
    ) -> Model:
        """A model by name (folder, .gguf file, or on the Hub) or, with dummy weights, by configuration.

        dtype          of weights and KV; None means the checkpoint's own
        dummy_weights  random weights made on the device from `seed`, as wide as the configuration says, or
                       `initializer_range`; a configuration has no others
        attention      a backend's name, or "auto"
        merge          products of one input are computed as one (`executors.merged`)
        own_products   products of few rows go to kernels of our own where they pay (`executors.few_rows`)
        compile        how to compile the layers, or None; what cannot be compiled, or is wrong then, runs as it is
        report         called with one line for each stage
        check          run `self_check`; a caller that leaves it out runs it later

        Raises ModelLoadError, or UnsupportedModelError for what cannot run over a paged cache.
        """
        name = model if isinstance(model, str) else model.model_type
        device, say = torch.device(device), report or (lambda line: None)
        prefer_products(device)
        say("reading the configuration")
        config = load_config(model) if isinstance(model, str) else model
        with _naming(name, config):
            refuse_config(config)
            if isinstance(model, str) and not dummy_weights:
                say(f"loading the weights on {device}")
                module = load_weights(model, dtype=dtype, device=device)
            else:
                say(f"making random weights on {device}")
                chosen = dtype or _dtype_of(config)
                module = random_weights(
                    config, dtype=chosen, device=device, seed=seed, initializer_range=initializer_range
                )
            refuse_module(module)
            loaded = cls._over(name, module.eval().requires_grad_(False), device, attention, merge=merge)
            if own_products and few_rows.pays_on(device):
                say("compiling products of few rows")
                few_rows.install(module)
            if compile is not None:
                loaded = loaded._compile(compile, say, check=check)
            if check and loaded.compiled is None:
                say(CHECKING)
                loaded._check()
            return loaded

    @classmethod
    def _over(cls, name: str, module: PreTrainedModel, device: torch.device, attention: str, *, merge: bool) -> Model:
        rotary_limit = pin_frequencies(module)
        with merged.watching(merged.find(module) if merge else ()) as alike:
            probed = probe(module)
        refuse_layers(len(probed.layers), module.config)
        merged.merge(alike)
        return cls(
            name=name,
            module=module,
            layers=tuple(probed.layers.values()),
            vocab_size=probed.vocab_size,
            max_model_len=_context(module.config, rotary_limit),
            backend=choose_backend(attention, device),
            device=device,
            dtype=module.dtype,
            _index={layer: index for index, layer in enumerate(probed.layers)},
            _keeps_logits="logits_to_keep" in inspect.signature(module.forward).parameters,
            _one=torch.ones(1, 1, dtype=torch.int64, device=device),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The window that all layers have in common: KV older than it may be freed. None where one layer sees more."""
        windows = {layer.window for layer in self.layers}
        return windows.pop() if len(windows) == 1 else None

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_cache.bytes_per_token(self.layers, self.dtype)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """KV for `num_blocks` usable blocks and the null block; raises ConfigError where they don't fit."""
        return kv_cache.allocate(self.layers, num_blocks, block_size, dtype=self.dtype, device=self.device)

    def blocks_that_fit(self, free_bytes: int, block_size: int) -> int:
        return kv_cache.blocks_that_fit(self.layers, free_bytes, block_size=block_size, dtype=self.dtype)

    @torch.no_grad()
    def forward(self, view: StepView, kv: KvCache) -> torch.Tensor:
        """Logits [num_samples, vocab_size], of the type that the model gives them; writes the step's KV, then attends
        through the block tables.
        """
        wanted = None if view.samples_all else view.logits_at.long()
        tokens = view.token_ids.long()[None]
        with during(PagedStep.begin(view, kv, self._index, self.backend)):
            output = self.module(
                input_ids=tokens,
                attention_mask=self._one.expand_as(tokens),  # without it, some models look for padding in the tokens
                position_ids=view.positions.long()[None],
                use_cache=False,
                **({"logits_to_keep": wanted} if self._keeps_logits and wanted is not None else {}),
            )
        logits = output.logits[0]
        return logits if self._keeps_logits or wanted is None else logits[wanted]

    def self_check(self) -> None:
        """Compares logits through the cache with those of the model's own attention; raises UnsupportedModelError."""
        with _naming(self.name, self.module.config):
            self._check()

    def _compile(self, settings: CompileSettings, report: Report, *, check: bool) -> Model:
        """With compiled layers, or as it is where the compiler fails or, with `check`, the logits are others then."""
        report("compiling the layers")
        try:
            done = compiled.compile_layers(self.module, list(self._index), settings, self.forward, self.allocate_kv)
            if check:
                report(CHECKING)
                self._check()
        except Exception as cause:  # the compiler's, or a refusal by the self-check
            compiled.restore(self.module)
            report(f"the layers run uncompiled: {one_line(cause)}")
            return self
        report(str(done))
        return replace(self, compiled=done)

    def _check(self) -> None:
        kv = self.allocate_kv(self_check.NUM_BLOCKS, self_check.BLOCK_SIZE)
        self_check.check(self.module, self.forward, kv, self.vocab_size)


@contextmanager
def _naming(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Refusals begin with the model's name, and its architecture where the name isn't that.

    What else the model raises while it is tried out refuses it too.
    """
    kind = "" if name == config.model_type else f" ({config.model_type})"
    try:
        yield
    except UnsupportedModelError as refusal:
        raise UnsupportedModelError(f"{name}{kind}: {refusal}") from refusal.__cause__
    except AsyncschedError:
        raise
    except Exception as cause:
        raise UnsupportedModelError(f"{name}{kind}: failed when it was tried out; {one_line(cause)}") from cause


def _dtype_of(config: PretrainedConfig) -> torch.dtype:
    found = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found


def _context(config: PretrainedConfig, rotary_limit: int | None) -> int | None:
    text = config.get_text_config(decoder=True)
    stated = next((value for field in CONTEXT_FIELDS if (value := getattr(text, field, None))), None)
    return min((limit for limit in (stated, rotary_limit) if limit is not None), default=None)
