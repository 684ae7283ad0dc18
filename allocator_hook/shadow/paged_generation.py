"""Runs a prefill step and a decode step of one rank with megatron-core's dynamic inference context and its controller.

`allocator_hook.shadow.generation` runs it if a request asks for the dynamic engine. The context, the inference wrapper and the text
generation controller are those of megatron-core. The numbers of requests and tokens are written into the context, because its
bookkeeping selects requests by values that tensors without data do not have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from allocator_hook.step.patching import Patch
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, GIB, round_up


def patches() -> Iterator[Patch]:
    """Yield the patches of PyTorch that a recorded step needs."""
    yield Patch(torch, "inference_mode", torch.no_grad, "in inference mode, PyTorch does not split composite operations")
    yield Patch(torch, "Generator", lambda *_, **__: _Generator(), "a CPU build of PyTorch has no generators of GPUs")


class _Generator:
    """Stand-in for the generator that samples tokens."""

    def manual_seed(self, seed: int) -> _Generator:
        del seed
        return self


def context_of(job: TrainingJob, settings: Mapping[str, Any]) -> Any:
    """The context that examples/inference/gpt/gpt_dynamic_inference.py creates (`get_inference_context`, 0.16.1)."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    model, parallel = job.model, job.parallel
    return DynamicInferenceContext(
        params_dtype=torch.bfloat16,
        num_layers=model.num_layers // parallel.pipeline,
        kv_channels=model.kv_channels,
        num_attention_heads=model.num_query_groups,
        max_sequence_length=settings["longest"],
        buffer_size_gb=settings["buffer_bytes"] / GIB,
        max_requests=settings["max_requests"],
        max_tokens=settings["max_tokens"],
        block_size_tokens=settings["block_tokens"],
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=1,  # it agrees on the smallest number of blocks, by a value that is not known here
        materialize_only_last_token_logits=settings["last_logits"],
        num_cuda_graphs=settings["graphs"],
    )


def generated(job: TrainingJob, chunk: Any, counter: Any, settings: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the cache, of the other tensors of context and controller, and of the temporary tensors of the steps."""
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    before = counter.bytes
    context = context_of(job, settings)
    config = InferenceWrapperConfig(
        hidden_size=job.model.hidden_size,
        params_dtype=torch.bfloat16,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=job.model.padded_vocab_size,
        inference_max_requests=context.max_requests,
        inference_max_seq_length=settings["longest"],
    )
    controller = TextGenerationController(GPTInferenceWrapper(chunk, config, context), tokenizer=None)
    cache = round_up(context.memory_buffer.nbytes, BLOCK)
    tables = counter.bytes - before - cache
    peaks: dict[str, int] = {}
    held = counter.bytes
    for _ in range(2):
        for name, tokens in (("prefill", settings["tokens"]), ("decode", 1)):
            start = counter.restart()
            _step(controller, context, requests=settings["requests"], tokens=tokens)
            peaks[name] = counter.peak - start
    gc.collect()
    return {"cache": cache, "tables": tables, "kept": counter.bytes - held, **peaks}


def _step(controller: Any, context: Any, *, requests: int, tokens: int) -> None:
    """One step of all requests, with `tokens` new tokens of each: forward, and the choice of the next tokens."""
    context.total_request_count = requests
    context.active_token_count = requests * tokens
    context.num_prefill_requests = requests if tokens > 1 else 0
    ids, positions = controller._dynamic_step_context_init()
    logits = controller._dynamic_step_forward_logits(ids, positions)
    controller._torch_sampling_buckets = [(list(range(requests)), 1.0, 1, 0.0)]
    controller._dynamic_step_sample_logits(logits)
    context.reset_attention_state()
    model = controller.inference_wrapped_model.model
    getattr(model, "module", model).set_input_tensor(None)  # the next step would replace it before its peak
