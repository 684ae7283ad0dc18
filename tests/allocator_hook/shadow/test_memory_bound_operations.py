"""The bytes of memory-bound kernels compared with the operations that megatron-core and Transformer Engine run.

The shadow engine lists each operation of PyTorch, compiled function, Triton kernel and binding of Transformer Engine that is not a
GEMM or an attention kernel, with the bytes of its arguments and results. An operation that the formulas of `analyzer/time/work` do
not have makes their sum too small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from analyzer.modules.kinds import ModuleKind
from analyzer.time.pass_work import block_work, settings_of
from analyzer.time.work.context import work_context
from analyzer.trace.events import CollectiveEvent, Event, GemmCall, KernelEvent, Mark, MemoryCall
from analyzer.trace.kernels import OUTSIDE_PASSES, KernelComparison
from tests.allocator_hook.shadow.conftest import Record

pytestmark = [
    pytest.mark.shadow,
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("torch", "megatron", "transformer_engine")),
        reason="the shadow extra (torch, megatron-core, transformer-engine) is not installed",
    ),
]

BASE = (
    "--nproc-per-node 4 pretrain_gpt.py --num-layers 2 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --vocab-size 31999 --info-gpu H100-80GB --use-distributed-optimizer --bf16 "
)
ALL_HEADS = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 "
)
LLAMA = f"{ALL_HEADS} --group-query-attention --num-query-groups 4 "
DENSE = f"{LLAMA} --disable-bias-linear "
TIED = DENSE.replace("--untie-embeddings-and-output-weights ", "")
LATENTS = "--multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --q-lora-rank 768 --qk-layernorm "
MLA = f"{ALL_HEADS} --disable-bias-linear {LATENTS}"
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-grouped-gemm --moe-ffn-hidden-size 1024 --expert-model-parallel-size 4 "
MOE = f"{DENSE} {EXPERTS} --moe-token-dispatcher-type alltoall "
SHARED = "--moe-shared-expert-intermediate-size 1024 --moe-router-dtype fp32 "
FLEX = "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-permute-fusion "
BALANCED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4"
)
ADAPTERS = "--num-layers 4 --info-lora 8"
"""Layers before the first adapter compute less, which is not counted."""
LAYOUTS = {
    "biases, dropout and tied embeddings": "",
    "biases": LLAMA,
    "all heads": f"{ALL_HEADS} --disable-bias-linear",
    "sequence parallelism": f"{DENSE} --tensor-model-parallel-size 2 --sequence-parallel",
    "no fusions": f"{DENSE} --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion --qk-layernorm",
    "native cross entropy": f"{DENSE} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    "unfused attention": f"{DENSE} --attention-backend unfused",
    "selective recomputation": f"{DENSE} --recompute-granularity selective --recompute-modules core_attn mlp",
    "unfused weight gradients": f"{DENSE} --no-gradient-accumulation-fusion",
    "unfused weight gradients, tied embeddings": f"{TIED} --no-gradient-accumulation-fusion",
    "full recomputation": f"{DENSE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "delayed scaling": f"{DENSE} --fp8-format hybrid --fp8-recipe delayed",
    "mxfp8": f"{DENSE} --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu B200",
    "multi-latent attention": MLA,
    "multi-latent attention without fusions": f"{MLA} --no-rope-fusion",
    "all-to-all": f"{MOE} --moe-permute-fusion {SHARED} --moe-shared-expert-gate",
    "all-to-all without fusions": MOE,
    "all-gather": f"{DENSE} {EXPERTS} --moe-token-dispatcher-type allgather --moe-permute-fusion",
    "flex": f"{DENSE} {EXPERTS} {FLEX} {SHARED}",
    "losses of the router": f"{DENSE} {EXPERTS} {FLEX} {SHARED} --num-experts 64 --moe-router-topk 8 {BALANCED}",
    "biases of experts": f"{LLAMA} {EXPERTS} --moe-token-dispatcher-type alltoall --moe-permute-fusion --no-bias-dropout-fusion",
    "unfused weight gradients of experts": f"{MOE} --moe-permute-fusion --no-gradient-accumulation-fusion",
    "adapters": f"{DENSE} {ADAPTERS}",
    "adapters, tensor parallelism": f"{DENSE} {ADAPTERS} --tensor-model-parallel-size 2",
    "adapters, sequence parallelism": f"{DENSE} {ADAPTERS} --tensor-model-parallel-size 2 --sequence-parallel",
    "adapters of attention": f"{DENSE} {ADAPTERS}:linear_qkv",
    "adapters, full recomputation": f"{DENSE} {ADAPTERS} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "adapters of experts": f"{MOE} --moe-permute-fusion {ADAPTERS}",
    "adapters of experts, sequence parallelism": f"{MOE} --moe-permute-fusion {ADAPTERS} --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-tensor-parallel-size 1",
}
TOLERANCE = 0.04
LAUNCHES = 0.1


class Recorded(NamedTuple):
    """The kernels of an iteration on the first pipeline stage."""

    comparison: KernelComparison
    names: Counter[str]
    """Recorded bytes of each memory-bound operation, by direction and name."""
    launches: tuple[int, int]
    """Operations of the second layer that the host issued in forward and backward, for one microbatch."""
    predicted_launches: tuple[float, float]


def recorded(options: str, record: Record, folder: Path) -> Recorded:
    from dataclasses import replace

    from allocator_hook.shadow.engine import enough_microbatches
    from analyzer.cli.shadow_report import comparisons, recorded_ranks
    from analyzer.hardware.gpus import hardware
    from analyzer.launch.build import build
    from analyzer.launch.parse import parse
    from analyzer.predict import predict
    from analyzer.trace.reader import read_complete_trace
    from analyzer.trace.summary import summarize

    arguments, world, given = parse((BASE + options).split(), environ={}, folder=folder)
    gpu, _ = hardware(given.gpu, None)
    job = build(arguments, world, environ={}, gpu=gpu, folder=folder)
    count = enough_microbatches(job)
    report = predict(replace(job, batch=replace(job.batch, microbatches=count, first_microbatches=count)))
    traces = record(job, recorded_ranks(report), folder)
    found = comparisons(report, traces, tolerance=0.001)[0].comparison.kernels
    assert found is not None
    names: Counter[str] = Counter()
    for call, times in summarize(read_complete_trace(next(iter(traces.values())))).iterations[-1].kernels.items():
        if isinstance(call, MemoryCall) and call.name not in OUTSIDE_PASSES:
            names[f"{call.direction} {call.name}"] += call.bytes * times
    kinds = (ModuleKind.CHECKPOINT, ModuleKind.LAYER)
    layer = max(
        (each for _, each in report.ranks[0].trees[0].walk() if each.kind in kinds), key=lambda each: -kinds.index(each.kind)
    )
    context, settings = work_context(report.job), settings_of(report.job)
    expected = [layer.derived(block_work, direction, context, settings).calls for direction in ("forward", "backward")]
    found_launches = launches_of_layer(read_complete_trace(next(iter(traces.values()))))
    return Recorded(found, names, found_launches, (expected[0], expected[1]))


def launches_of_layer(events: Iterable[Event]) -> tuple[int, int]:
    """Kernels and collectives of the second layer in forward and backward of the first microbatch of the last iteration."""
    numbers: dict[tuple[int, bool], int] = defaultdict(int)
    running: list[Mark] = []
    for event in events:
        if isinstance(event, Mark):
            running = [*running, event] if event.kind == "enter" else running[:-1]
        elif isinstance(event, (KernelEvent, CollectiveEvent)) and running and ".layers.1" in running[-1].name:
            mark = running[-1]
            if mark.microbatch in (0, -1):
                call = event.call if isinstance(event, KernelEvent) else None
                count = call.products if isinstance(call, GemmCall) and "experts" in mark.name else 1
                numbers[max(each.iteration for each in running), mark.phase == "forward"] += count
    last = max(iteration for iteration, _ in numbers)
    return numbers[last, True], numbers[last, False]


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_and_launches_are_those_of_the_recorded_operations(name: str, record: Record, tmp_path: Path) -> None:
    found = recorded(LAYOUTS[name], record, tmp_path)
    for predicted, run in zip(found.comparison.predicted_traffic, found.comparison.recorded_traffic, strict=True):
        assert predicted == pytest.approx(run, rel=TOLERANCE), found.names.most_common(20)
    for expected, issued in zip(found.predicted_launches, found.launches, strict=True):
        assert expected == pytest.approx(issued, rel=LAUNCHES), (found.predicted_launches, found.launches)
