"""Our generation beside transformers' continuous batching: same card, same process, same weights' shape, same prompts.

    python experiments/compare_peers.py --config llama-8b --requests 32 --prompt-tokens 128 --out result.json

Needs a CUDA device. Rounds alternate between engines; a figure is the median over rounds. transformers has no
flash-attn package there, so it is given torch's own flash kernel, registered under a name of its own.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from transformers import AttentionInterface, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from executors.bench import run_bench
from executors.llm import LLM
from executors.named_configs import named_config

PEER_ATTENTION = "paged|torch_varlen"  # a name with "flash" in it would be looked up in the flash-attn package


def torch_flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' paged flash attention, with the flash kernel that comes with torch."""
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k["full_attention"], max_seqlen_k["full_attention"]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    output = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2).squeeze(0).contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seq_lens_q.to(torch.int32),
        cu_seq_lens_k.to(torch.int32).clone(),
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        True,
        False,
        scale=module.scaling,
    )[0]
    return output, None


def ours(config: Any, depth: int, requests: int, prompt_tokens: int, new_tokens: int) -> Callable[[], dict[str, Any]]:
    llm = LLM(
        config,
        depth=depth,
        device="cuda",
        dummy_weights=True,
        timeline=True,
        max_num_seqs=requests,
        max_model_len=prompt_tokens + new_tokens,
    )
    run_bench(llm, requests=requests, prompt_tokens=prompt_tokens, new_tokens=min(32, new_tokens))

    def measure() -> dict[str, Any]:
        run = run_bench(llm, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        return {**run.result.to_dict(), "token_ids": run.token_ids}

    return measure


def peer(
    config: Any, asynchronous: bool, requests: int, prompt_tokens: int, new_tokens: int
) -> Callable[[], dict[str, Any]]:
    AttentionInterface.register(PEER_ATTENTION, torch_flash)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PEER_ATTENTION)
    model.eval()
    random = np.random.default_rng(0)
    prompts = [random.integers(0, config.vocab_size, prompt_tokens).tolist() for _ in range(requests)]
    settings = ContinuousBatchingConfig(
        use_async_batching=asynchronous,
        use_cuda_graph=True,
        max_blocks_per_request=0,
        allow_block_sharing=False,
        block_size=256,
        num_blocks=requests * (-(-(prompt_tokens + new_tokens) // 256) + 1),
        max_batch_tokens=max(requests * prompt_tokens, 1024),
        max_requests_per_batch=requests,
    )

    def generate(count: int) -> float:
        generation = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=settings, persistent_manager=True
        )
        wall = time.perf_counter() - started
        lengths = {len(output.generated_tokens) for output in outputs.values()}
        assert lengths == {count}, lengths
        return wall

    generate(32)

    def measure() -> dict[str, Any]:
        wall = generate(new_tokens)
        return {"wall_s": wall, "output_throughput": requests * new_tokens / wall}

    return measure


def main(
    config: Annotated[str, typer.Option(help="A named model shape.")] = "llama-8b",
    requests: int = 32,
    prompt_tokens: int = 128,
    new_tokens: int = 512,
    rounds: int = 3,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
) -> None:
    """Tokens per second of each engine, and the ratio to transformers' asynchronous batching."""
    shape = named_config(config)
    size = requests, prompt_tokens, new_tokens
    engines = {
        "ours sync": ours(shape, 1, *size),
        "ours async": ours(shape, 2, *size),
        "ours depth 3": ours(shape, 3, *size),
        "transformers sync": peer(shape, False, *size),
        "transformers async": peer(shape, True, *size),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number in range(rounds):
        for name, measure in engines.items():
            results[name].append(measure())
            print(f"round {number + 1}, {name}: {results[name][-1]['output_throughput']:.0f} tokens/s", flush=True)
    tokens = [results[name][0].pop("token_ids") for name in ("ours sync", "ours async", "ours depth 3")]
    equal = [sum(map(tuple.__eq__, tokens[0], other)) for other in tokens[1:]]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "setting": {"config": config, "requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        "sequences_equal_to_sync": {"async": equal[0], "depth 3": equal[1]},
        "median_tokens_per_s": {
            name: statistics.median(result["output_throughput"] for result in runs) for name, runs in results.items()
        },
        "rounds": {
            name: [{k: v for k, v in result.items() if k != "token_ids"} for result in runs]
            for name, runs in results.items()
        },
    }
    baseline = report["median_tokens_per_s"]["transformers async"]
    for name, speed in report["median_tokens_per_s"].items():
        print(f"{name:20s} {speed:8.0f} tokens/s   {speed / baseline:5.2f} of transformers async")
    print(f"sequences equal to sync: async {equal[0]}, depth 3 {equal[1]}, of {requests}")
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
