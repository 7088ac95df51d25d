"""The check of tokens where roundings may decide: was each delivered token as good as the best, for the reference?

The reference is transformers' own model with the same weights in float32. It reads a prompt with the tokens that were
delivered for it in one pass, and each token's logit is compared with the largest one at its position. In bf16 another
batch size may flip near-ties, so tokens themselves cannot be compared with those of another run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from tiny_models import VOCAB, reference_of
from transformers import PreTrainedModel

from asyncsched.request import SamplingParams
from executors.llm import LLM
from executors.outputs import StreamPiece

# Of the logits' standard deviation. Measured on tiny models on a CPU: float32 always gives the best token, bf16 one at
# most 0.17 below it. Behind a corrupted block, tiny Llama's tokens are up to 4.5 below. Models with experts are for
# float32: in bf16 roundings decide between experts too, and one token of mixtral was 2.1 below.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.4}

Delivered = list[tuple[list[int], list[int]]]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.choice([3, 9, 17, 30]))] for _ in range(count)]


def eventful_run(llm: LLM, several: Sequence[list[int]], new_tokens: int, between: Callable[[int], None]) -> Delivered:
    """Prompts arrive one by one while others run, and every fifth is aborted half way. Prompts and delivered tokens.

    between  called with the number of deliveries so far, when no host code of the engine runs
    """
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    delivered: list[list[int]] = [[] for _ in several]
    waiting = list(range(len(several)))
    done = rounds = 0
    while done < len(several):
        if waiting and rounds % 2 == 0:
            number = waiting.pop(0)
            llm.check(several[number], params)
            llm.submit(str(number), several[number], params)
        for piece in llm.run() or ():
            if not isinstance(piece, StreamPiece):
                done += 1
                continue
            number = int(piece.request_id)
            delivered[number] += piece.token_ids
            if number % 5 == 4 and piece.output is None and len(delivered[number]) == new_tokens // 2:
                llm.abort(piece.request_id)
        rounds += 1
        between(rounds)
    return list(zip(map(list, several), delivered, strict=True))


@torch.no_grad()
def shortfalls(reference: PreTrainedModel, delivered: Delivered) -> list[float]:
    """For each delivered token how far its logit is below its position's largest, in standard deviations of that
    position's logits. In the order of `delivered`."""
    found: list[float] = []
    for prompt, tokens in delivered:
        if not tokens:
            continue
        token_ids = torch.tensor([[*prompt, *tokens[:-1]]], device=reference.device)
        logits = reference(token_ids, attention_mask=torch.ones_like(token_ids)).logits[0, len(prompt) - 1 :].double()
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        found += ((logits.amax(-1) - chosen) / logits.std(-1)).tolist()
    return found


def float32_reference(llm: LLM) -> PreTrainedModel:
    """On the engine's device."""
    with llm.model.device:
        return reference_of(llm.model).float()


def corrupt_a_block(llm: LLM) -> bool:
    """Turns the sign of the first KV block of a request that runs; False where none has a block."""
    rows = llm.scheduler.rows
    held = [row for row in range(rows.capacity) if rows.live[row] and rows.num_blocks[row]]
    if not held:
        return False
    block = int(rows.table[held[0], 0])
    if llm.model.device.type == "cuda":
        torch.cuda.synchronize()
    for pool in llm._compute.kv.values:
        pool[block].neg_()
    if llm.model.device.type == "cuda":
        torch.cuda.synchronize()
    return True
