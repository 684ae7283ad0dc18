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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from allocator_hook.shadow import paged_generation, sharding
from allocator_hook.shadow.job_json import from_json
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.shadow.session import Session
from allocator_hook.step.patching import Patches
from analyzer.memory.workspaces import cublas_workspace_bytes
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, round_up


class Counter:
    """An allocation sink that counts the allocated bytes and their maximum."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.bytes = 0
        self.peak = 0

    def allocation(self, pointer: int, bytes: int, *, stream: int = 0) -> None:
        self.live[pointer] = round_up(bytes, BLOCK)
        self.bytes += self.live[pointer]
        self.peak = max(self.peak, self.bytes)

    def free(self, pointer: int) -> None:
        self.bytes -= self.live.pop(pointer)

    def label(self, pointer: int, role: Any, name: str, *, shape: Sequence[int], dtype: str, bytes: int) -> None:
        """Names are not used."""

    def restart(self) -> int:
        """Forgets the maximum, and returns the bytes that are allocated."""
        self.peak = self.bytes
        return self.bytes


def record(job: TrainingJob, *, rank: int, cache_tokens: int, dynamic: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Bytes of the model, the cache and the temporary tensors of a rank. Can be called once for each process."""
    counter = Counter()
    with ExitStack() as stack:
        session = stack.enter_context(Session(job))
        recorder = Recorder(counter, cublas_workspace_bytes=cublas_workspace_bytes(job))
        stack.enter_context(Patches(recorder.patches()))
        stack.enter_context(Patches(sharding.patches(job, recorder, counter)))  # type: ignore[arg-type]
        session.count_with(recorder)
        stack.enter_context(recorder)
        stack.enter_context(torch.no_grad())  # in inference mode, PyTorch does not split composite operations
        stack.enter_context(Patches(paged_generation.patches() if dynamic is not None else ()))
        chunk = _model(job, rank)
        weights = counter.bytes
        if dynamic is None:
            return {"weights": weights, **_generated(job, chunk, counter, cache_tokens=cache_tokens)}
        return {"weights": weights, **paged_generation.generated(job, chunk, counter, dynamic)}


def _model(job: TrainingJob, rank: int) -> Any:
    from allocator_hook.step import groups, model
    from allocator_hook.step.config import transformer_config

    groups.initialize(job, rank=rank)
    (chunk,) = model.chunks(job, transformer_config(job))
    chunk.eval()
    return chunk


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
