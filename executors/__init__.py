"""Real execution: step programs on CUDA streams, or on a plain CPU.

    cpu, cuda     the lanes: where operations run, events, measured spans
    executor      interprets a program, operation by operation; adds no order of its own
    compute       carry-over, forward pass, sampling; captured graphs
    slots         host and device buffers of one I/O slot
    models, ...   a transformers model over a paged KV cache (attention, kv_cache, probe, self_check, refusals)
    sampling, ... tokens from logits, on the device (sampling_rows, sampling_state, noise, thresholds, logprobs)
    asked, settings   what an `LLM` is asked for, checked without torch and with it
    engine        drives the core's pipeline with an executor
    llm           `LLM`; async_engine: `AsyncEngine`; frontend, outputs, text: what users give and get

May import asyncsched, torch, transformers and triton; never sim.
"""
