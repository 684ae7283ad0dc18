"""Operations of the host for each packed sample, compared with those that the sources of Megatron-LM and Transformer Engine run."""

from __future__ import annotations

import ast
import itertools
import logging
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyzer.api import analyze
from analyzer.specs.release_changes import core_behavior, engine_behavior
from analyzer.time.work.context import WorkContext, work_context
from analyzer.time.work.kernels import HostLoop
from analyzer.time.work.packed_samples import reordering, rotation_loop
from tests.job_of import BASE, job_of

LAYOUT = "--swiglu --position-embedding-type rope --seq-length 4096 --max-position-embeddings 4096"
NO_KERNEL = {
    *("view", "expand", "slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "narrow", "as_strided"),
    *("detach", "transpose", "alias", "_unsafe_view", "empty_like", "empty", "new_empty", "new_empty_strided", "empty_strided"),
}
"""Operations of PyTorch that launch no kernel."""


def context_of(words: str, *, samples: int, core: str = "0.16.1", engine: str = "2.11") -> WorkContext:
    context = work_context(job_of(f"{LAYOUT} {words}"))
    inputs = context.inputs
    model = replace(inputs.model, sample_length=inputs.sequence_length // samples)
    return replace(context, inputs=replace(inputs, model=model, core=core_behavior(core), engine=engine_behavior(engine)))


def operations(loops: tuple[Any, ...]) -> tuple[float, float]:
    assert all(isinstance(each, HostLoop) for each in loops)
    return sum(each.operations for each in loops), sum(each.reads for each in loops)


@pytest.mark.parametrize(
    ("core", "forward", "backward"),
    [("0.13.0", 12, 8), ("0.16.1", 0, 0), ("0.19.0", 13, 12)],
)
def test_unfused_rope_runs_operations_for_each_sample(core: str, forward: int, backward: int) -> None:
    """Operations of one sample in `_apply_rotary_pos_emb_thd` of each release, counted as in the next test. Q and K are rotated."""
    found = rotation_loop(context_of("--no-rope-fusion", samples=8, core=core))
    assert operations(found.forward)[0] == 2 * 8 * forward
    assert operations(found.backward)[0] == 2 * 8 * backward
    in_ring = rotation_loop(context_of("--no-rope-fusion --context-parallel-size 2", samples=8, core=core))
    assert operations(in_ring.forward)[0] == 2 * 8 * (forward + 1), "the two slices of the angles are concatenated"


@pytest.mark.parametrize("words", ["", "--no-rope-fusion"])
def test_without_packed_samples_or_with_fused_rope_nothing_is_looped(words: str) -> None:
    assert rotation_loop(work_context(job_of(f"{LAYOUT} {words}"))).forward == ()
    assert bool(rotation_loop(context_of(words, samples=8)).forward) is bool(words)


@pytest.mark.parametrize("engine", ["2.9", "2.10", "2.17", "2.18"])
@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_only_some_releases_of_transformer_engine_order_each_sample(engine: str, kind: str) -> None:
    """Commits a75da0ca1 (2.10) and 701011849 (2.18) of Transformer Engine add and remove the loop."""
    found = reordering(context_of(f"--context-parallel-size 2 --cp-comm-type {kind}", samples=8, engine=engine))
    assert bool(found.forward) is bool(found.backward) is (kind == "a2a" and engine in ("2.10", "2.17"))


@pytest.mark.parametrize("context_parallel", [2, 4])
def test_the_loop_has_the_operations_of_transformer_engine(context_parallel: int) -> None:
    """`reorder_seq_chunks_*_thd` are run with 2 and 6 samples; the difference is that of 4 samples."""
    torch = pytest.importorskip("torch")
    path = source("transformer-engine", "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py")
    names = {"torch": torch, "itertools": itertools, "_seq_chunk_ids_cache_for_reordering_before_attn": {}}
    functions = defined(path, names)

    def counts(samples: int) -> tuple[int, int, int]:
        ends = torch.arange(0, 16 * (samples + 1), 16, dtype=torch.int32)
        chunks = functions["get_seq_chunk_ids_for_reordering_before_attn"](context_parallel, "cpu")
        tensor = torch.zeros(16 * samples, 2, 4)
        before = executed(lambda: functions["reorder_seq_chunks_after_a2a_before_attn_thd"](tensor, ends, chunks, context_parallel))
        after = executed(lambda: functions["reorder_seq_chunks_before_a2a_after_attn_thd"](tensor, ends, context_parallel))
        assert before[1] == after[1]
        return before[0], after[0], after[1]

    before, after, reads = (more - less for more, less in zip(counts(6), counts(2), strict=True))
    words = f"--context-parallel-size {context_parallel} --cp-comm-type a2a"
    found = reordering(context_of(words, samples=4))
    assert operations(found.forward) == (3 * before + after, 4 * reads)
    assert operations(found.backward) == (before + 3 * after, 4 * reads)


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_the_loop_has_the_operations_of_megatron(context_parallel: int) -> None:
    """`_apply_rotary_pos_emb_thd` of the installed megatron-core is run with 2 and 6 samples."""
    torch = pytest.importorskip("torch")
    path = source("megatron-core", "megatron/core/models/common/embeddings/rope_utils.py")
    functions = defined(path, {"torch": torch, "warnings": warnings, "logger": logging.getLogger()})
    group = SimpleNamespace(size=lambda: context_parallel, rank=lambda: 0)

    def counts(samples: int) -> tuple[int, int]:
        ends = torch.arange(0, 16 * context_parallel * (samples + 1), 16 * context_parallel, dtype=torch.int32)
        tensor, angles = torch.zeros(16 * samples, 2, 8, dtype=torch.bfloat16), torch.zeros(2048, 1, 1, 8)
        return executed(lambda: functions["_apply_rotary_pos_emb_thd"](tensor, ends, angles, cp_group=group))

    (more, reads), (less, same) = counts(6), counts(2)
    assert reads == same
    release = metadata.version("megatron-core")
    found = rotation_loop(context_of(f"--no-rope-fusion --context-parallel-size {context_parallel}", samples=4, core=release))
    assert operations(found.forward)[0] == 2 * (more - less)


def test_short_packed_samples_make_an_iteration_slower() -> None:
    """Fine-tuning of Qwen3 8B with 32,768 tokens took 9.0 s for a microbatch, of which kernels explain less than 1 s."""
    line = f"--nproc-per-node 8 pretrain_gpt.py {BASE} {LAYOUT} --tensor-model-parallel-size 2 --sequence-parallel "
    line += "--context-parallel-size 2 --cp-comm-type a2a --no-rope-fusion "
    line += "--global-batch-size 8 --lr 1e-4 --train-iters 10 --info-gpu H100-80GB"
    long, short = (analyze([*line.split(), "--info-sample-length", str(length)], environ={}) for length in (2048, 256))
    assert long.time is not None
    assert short.time is not None
    assert short.time.parts_seconds["host"] > 5 * long.time.parts_seconds["host"]
    assert "--cp-comm-type a2a" in short.time.bottleneck
    assert "--no-rope-fusion" in short.time.bottleneck


def source(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported. The test is skipped without it."""
    try:
        found = Path(str(metadata.distribution(package).locate_file(path)))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if not found.exists():
        pytest.skip(f"{package} {metadata.version(package)} has no {path}")
    return found


def defined(path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a file, with these names beside them."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            node.args.defaults = [each for each in node.args.defaults if isinstance(each, ast.Constant)]
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names


def executed(call: Any) -> tuple[int, int]:
    """The operations of a call that launch a kernel, and the values that the host reads."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            names.append(function.overloadpacket.__name__)
            return function(*arguments, **(named or {}))

    with Names():  # type: ignore[no-untyped-call]
        call()
    reads = names.count("_local_scalar_dense")
    return len([each for each in names if each not in NO_KERNEL]) - reads, reads
