"""Runs prefill and decode of one rank with megatron-core's static inference context, on tensors without data.

    python -m allocator_hook.shadow.generation < request.json

The request has the `job` whose micro-batch is the batch and its prompts (`shadow.job_json`), the `rank`, and `cache_tokens`, the
tokens of a request that the cache is allocated for. Standard output has one JSON object with bytes: `weights`; `cache`; `kept`,
other tensors that stay allocated; `prefill` and `decode`, the temporary tensors at the peak of each. All are those of a second
batch, for which workspaces exist. The decode step is the last one of its requests.

With `dynamic` the request is for the dynamic engine (`shadow.paged_generation`), and the answer has `tables`, the tensors of the
context and the controller beside the cache.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from allocator_hook.shadow import paged_generation
from allocator_hook.shadow.counting import Counter, built, counting
from allocator_hook.shadow.job_json import from_json
from allocator_hook.step.patching import Patches
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, round_up


def record(job: TrainingJob, *, rank: int, cache_tokens: int, dynamic: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Bytes of the model, the cache and the temporary tensors of a rank. Can be called once for each process."""
    with counting(job) as counter, Patches(paged_generation.patches() if dynamic is not None else ()):
        chunk = built(job, rank)
        weights = counter.bytes
        if dynamic is None:
            return {"weights": weights, **_generated(job, chunk, counter, cache_tokens=cache_tokens)}
        return {"weights": weights, **paged_generation.generated(job, chunk, counter, dynamic)}


def _generated(job: TrainingJob, chunk: Any, counter: Counter, *, cache_tokens: int) -> dict[str, int]:
    from megatron.core.inference.contexts import StaticInferenceContext

    held = counter.bytes
    requests, tokens = job.batch.micro_batch_size, job.batch.seq_length
    context = StaticInferenceContext(requests, cache_tokens)
    peaks = {}
    for _ in range(2):
        for name, length, offset in (("prefill", tokens, 0), ("decode", 1, cache_tokens - 1)):
            context.sequence_len_offset = offset
            context.decode_mode = bool(offset)
            before = counter.restart()
            _step(chunk, context, requests=requests, tokens=length)
            peaks[name] = counter.peak - before
    cache = sum(round_up(each.nbytes, BLOCK) for pair in context.key_value_memory_dict.values() for each in pair)
    return {"cache": cache, "kept": counter.bytes - held - cache, **peaks}


def _step(chunk: Any, context: Any, *, requests: int, tokens: int) -> None:
    """One forward. A later pipeline stage gets its input from the stage before it."""
    from megatron.core import parallel_state

    device = torch.cuda.current_device()
    ids = torch.empty(requests, tokens, dtype=torch.int64, device=device)
    positions = torch.empty(requests, tokens, dtype=torch.int64, device=device)
    model = getattr(chunk, "module", chunk)
    if not parallel_state.is_pipeline_first_stage():
        shape = (tokens, requests, chunk.config.hidden_size)
        model.set_input_tensor(torch.empty(shape, dtype=chunk.config.params_dtype, device=device))
    chunk(ids, positions, None, inference_context=context, runtime_gather_output=True)
    model.set_input_tensor(None)


def main() -> None:
    """Answers the request on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the packages
    warnings.filterwarnings("ignore")
    request = json.load(sys.stdin)
    job = from_json(json.dumps(request["job"]))
    found = record(job, rank=request["rank"], cache_tokens=request.get("cache_tokens", 0), dynamic=request.get("dynamic"))
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
