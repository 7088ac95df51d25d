"""From a name to a transformers model: configurations and weights, or one line that says why not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from executors import hub
from executors.asked import check_path
from executors.attention import PAGED
from executors.errors import ModelLoadError, UnsupportedModelError, one_line
from executors.refusals import NO_HOOK


def load_config(name: str) -> PretrainedConfig:
    """The configuration of a folder, a .gguf file, or a model on the Hub. Raises ModelLoadError."""
    check_path(name)
    path = Path(name).expanduser()
    with _quiet_retries():
        try:
            return AutoConfig.from_pretrained(**_where(name))
        except Exception as cause:  # whatever the readers of a dozen formats raise for missing, broken or foreign files
            reason = one_line(cause)
            if not path.exists() and (fault := hub.fault(name)):
                reason = f"there is no such folder, it is not in the Hub's cache, and {fault}"
            raise ModelLoadError(f"{name}: no model can be loaded from there; {reason}") from cause


def load_weights(name: str, *, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """The model with the weights stored there, in their own dtype where none is given. Raises ModelLoadError."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **_where(name),
            dtype="auto" if dtype is None else dtype,
            attn_implementation=PAGED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they come back as information, and are refused below
        )
        module, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ModelLoadError(f"{name}: {len(missing)} weights are missing, {missing[0]} first")
        if others := sorted(info["mismatched_keys"]):
            weight, stored, wanted = others[0]
            raise ModelLoadError(
                f"{name}: {len(others)} weights have other shapes than the configuration says, "
                f"{weight} first: {list(stored)}, not {list(wanted)}"
            )
        return module.to(device)
    except ModelLoadError:
        raise
    except Exception as cause:  # as for configurations
        _refuse_without_hook(cause)
        raise ModelLoadError(f"{name}: its weights cannot be loaded; {one_line(cause)}") from cause


def load_tokenizer(name: str) -> tuple[Any, str]:
    """The tokenizer stored with a model; None where there is none that can be read, and then why."""
    try:
        return AutoTokenizer.from_pretrained(**_where(name)), ""
    except Exception as cause:  # as for configurations
        return None, one_line(cause)


def random_weights(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int, initializer_range: float | None
) -> PreTrainedModel:
    """A model with random weights, made on the device; the same seed gives the same weights. Raises ModelLoadError."""
    config = copy.deepcopy(config)
    if initializer_range is not None:
        config.get_text_config(decoder=True).initializer_range = initializer_range
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), device:
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PAGED)
    except Exception as cause:  # a model refuses its configuration as it likes
        _refuse_without_hook(cause)
        raise ModelLoadError(f"{config.model_type}: it cannot be built; {one_line(cause)}") from cause


def _refuse_without_hook(cause: Exception) -> None:
    """Older architectures look their attention up in a table of their own, by the name of the implementation."""
    if isinstance(cause, KeyError) and cause.args == (PAGED,):
        raise UnsupportedModelError(NO_HOOK) from cause


def _where(name: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a name. What the Hub cannot give now may be in its cache."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.exists():
        return {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": name, "local_files_only": bool(hub.fault(name))}


@contextmanager
def _quiet_retries() -> Iterator[None]:
    """The Hub's client logs every retry; a missing model is one line."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
