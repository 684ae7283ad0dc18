"""Runs a pass without gradients of one rank, as frameworks for reinforcement learning do, on tensors without data.

    python -m allocator_hook.shadow.forward_pass < request.json

The request has the `job` whose micro-batch is the one of the pass (`shadow.job_json`), the `rank`, and the `head`, which makes
log-probabilities of the logits of the last stage: `nemo_rl`, `verl`, or null. Standard output has one JSON object with the bytes of
the temporary tensors at the peak: `peak`, of a second microbatch, for which workspaces exist; and `kept`, of tensors that stay.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any, Literal

import torch

from allocator_hook.shadow.counting import built, counting
from allocator_hook.shadow.job_json import from_json
from analyzer.specs import TrainingJob

Head = Literal["nemo_rl", "verl"]


def record(job: TrainingJob, *, rank: int, head: Head | None) -> dict[str, int]:
    """Bytes of the temporary tensors of a pass, and of what stays. Can be called once for each process."""
    with counting(job) as counter:
        from megatron.core.transformer.module import Float16Module

        model = built(job, rank)
        chunk = Float16Module(model.config, model)
        held = counter.bytes
        peak = 0
        for _ in range(2):
            before = counter.restart()
            _pass(job, chunk, head)
            peak = counter.peak - before
        return {"peak": peak, "kept": counter.bytes - held}


def _pass(job: TrainingJob, chunk: Any, head: Head | None) -> None:
    """One forward. A later pipeline stage gets its input from the stage before it, and the last one makes log-probabilities."""
    from megatron.core import parallel_state

    device, batch, parallel = torch.cuda.current_device(), job.batch, job.parallel
    tokens = batch.seq_length // parallel.context
    shape = (batch.micro_batch_size, tokens)
    ids, positions = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    if not parallel_state.is_pipeline_first_stage():
        rows = tokens // parallel.tensor if parallel.sequence_parallel else tokens
        received = (rows, batch.micro_batch_size, chunk.config.hidden_size)
        chunk.set_input_tensor(torch.empty(received, dtype=chunk.config.params_dtype, device=device))
    output = chunk(ids, positions, None)
    if parallel_state.is_pipeline_last_stage():
        targets = torch.zeros((batch.micro_batch_size, batch.seq_length), dtype=torch.int64, device=device)
        if head == "nemo_rl":
            from allocator_hook.step.families.nemo_rl_loss import log_probabilities

            log_probabilities(output, targets)
        elif head == "verl":
            _verl(output, ids)
    chunk.set_input_tensor(None)


def _verl(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """`_lm_head_logits_processor` (workers/engine/megatron/transformer_impl.py) and utils/megatron/tensor_parallel.py of verl."""
    from megatron.core import tensor_parallel

    copied = logits.clone()
    entropy = _entropy(logits)
    del entropy
    tensor_parallel.vocab_parallel_cross_entropy(vocab_parallel_logits=copied, target=labels)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """`_VocabParallelEntropy.forward`. The product with the logits is a kernel of Triton, which makes no tensor."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    most = logits.max(dim=-1, keepdim=True).values
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    exponentials = (logits - most).exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    torch.distributed.all_reduce(total, group=group)
    exponentials.div_(total)
    product = torch.empty_like(total)
    torch.distributed.all_reduce(product, group=group)
    return (most + total.log() - product).squeeze(dim=-1)


def main() -> int:
    """Serve the request on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    request = json.load(sys.stdin)
    found = record(from_json(json.dumps(request["job"])), rank=request["rank"], head=request["head"])
    answers.write(json.dumps(found))
    answers.flush()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # skips the interpreter shutdown, which takes a second with torch
