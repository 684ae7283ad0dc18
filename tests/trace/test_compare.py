"""Comparison of predictions with the trace of a synthetic step, with and without a wrong tensor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocator_hook.trace_writer import TraceWriter
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import Module, Tensor
from analyzer.results import RankClass
from analyzer.specs import HardwareSpec
from analyzer.trace.compare import MODEL, _pieces, compare, made_tensors
from analyzer.trace.events import AttentionCall, GemmCall, KernelCall
from analyzer.trace.reader import Header, read_trace
from analyzer.trace.summary import summarize
from tests.command import assert_refused, run
from tests.small_job import job

ITERATIONS = 2


def predicted() -> RankClass:
    [only] = rank_classes(job(num_layers=2, attention_backend="fused"))
    return only


def write_step(
    path: Path,
    rank: RankClass,
    *,
    extra: int = 0,
    kernels: Sequence[KernelCall] = (),
    argv: tuple[str, ...] = (),
    world: int = 1,
) -> None:
    """Write a trace with the allocations that `rank` predicts, `extra` bytes in the MLP of the first layer, and `kernels`."""
    addresses = iter(range(1 << 20, 1 << 40, 1 << 12))
    memory = rank.memory
    with TraceWriter(path, Header(recorder="shadow", argv=argv, versions={"torch": "2.13.0"}, world_size=world)) as trace:

        def allocate(size: int, role: str = "", name: str = "") -> int:
            pointer = next(addresses)
            trace.allocation(pointer, size)
            if role:
                trace.label(pointer, role=role, name=name, shape=(size,), dtype="uint8", bytes=size)  # type: ignore[arg-type]
            return pointer

        trace.enter("", "build", -1, -1)
        allocate(memory.parameters_bytes, "parameter", "parameters")
        allocate(memory.gradients_bytes, "gradient", "gradients")
        trace.leave("", "build", -1, -1)
        for iteration in range(ITERATIONS):
            saved = []
            trace.enter("", "forward", 0, iteration)
            for module, tensor in made_tensors(rank.chunks, rank.trees):
                if module != MODEL:
                    trace.enter(module, "forward", 0, iteration)
                saved.append(allocate(tensor.bytes))
                if module != MODEL:
                    trace.leave(module, "forward", 0, iteration)
            if extra:
                trace.enter("decoder.layers.0.mlp", "forward", 0, iteration)
                saved.append(allocate(extra))
                trace.leave("decoder.layers.0.mlp", "forward", 0, iteration)
            for call in kernels:
                trace.kernel(call)
            if iteration == 0:
                allocate(memory.runtime_bytes)
            trace.leave("", "forward", 0, iteration)
            trace.enter("", "backward", 0, iteration)
            for pointer in reversed(saved):
                trace.free(pointer)
            trace.leave("", "backward", 0, iteration)
            trace.enter("", "optimizer", -1, iteration)
            if iteration == 0:
                allocate(memory.optimizer_bytes, "optimizer", "states")
            trace.collective(kind="all_reduce", group="dp_cp", shape=(8,), dtype="fp32", bytes=32, size=2, phase="optimizer")
            trace.leave("", "optimizer", -1, iteration)


def change(tree: Module, module: str, tensor: str, *, drop: bool = False, **changes: Any) -> Module:
    """Return the tree with one tensor of the first module of that name changed, or removed if `drop` is set."""
    done = False

    def walk(node: Module) -> Module:
        nonlocal done
        saved: tuple[Tensor, ...] = node.saved
        if node.name == module and not done:
            done = True
            saved = tuple(replace(t, **changes) if t.name == tensor else t for t in saved if not (drop and t.name == tensor))
        return replace(node, saved=saved, children=tuple(map(walk, node.children)))

    changed = walk(tree)
    assert done
    return changed


@pytest.fixture
def step(tmp_path: Path) -> tuple[RankClass, Path]:
    rank = predicted()
    path = tmp_path / "step.trace"
    write_step(path, rank)
    return rank, path


def test_a_correct_prediction_agrees_in_every_tensor(step: tuple[RankClass, Path]) -> None:
    rank, path = step
    found = compare(rank, summarize(read_trace(path)))
    assert found.explained == 1.0
    assert all(row.difference == 0 and not row.only_predicted and not row.only_recorded for row in found.modules)
    assert {row.name: row.error for row in found.totals if row.name in ("parameters", "gradients", "optimizer states")} == {
        "parameters": 0, "gradients": 0, "optimizer states": 0,
    }  # fmt: skip
    names = [row.module for row in found.modules]
    assert "decoder.layers.0.self_attention.linear_qkv" in names
    assert "decoder.layers.1.mlp" in names
    assert not [failure for failure in found.failures if failure.startswith("saved")]


def test_only_the_wrong_tensor_is_reported(step: tuple[RankClass, Path]) -> None:
    rank, path = step
    recorded = summarize(read_trace(path))
    wrong = replace(rank, trees=(change(rank.trees[0], "activation_func", "fc1 output", dtype="fp32"),))
    found = compare(wrong, recorded)
    off = [row for row in found.modules if row.difference]
    assert [(row.module, [t.name for t in row.only_predicted]) for row in off] == [
        ("decoder.layers.0.mlp.linear_fc1", ["fc1 output"])
    ]
    right = 2 * 1024 * 2 * 4096  # bytes of [s, b, 4h] in bf16
    assert off[0].only_recorded == (right,)
    assert off[0].difference == right
    assert [f for f in found.failures if f.startswith("saved")] == [f"saved in decoder.layers.0.mlp.linear_fc1: {right:+,} bytes"]
    assert found.explained < 1.0


def test_a_tensor_without_prediction_is_reported_with_its_module(tmp_path: Path) -> None:
    rank = predicted()
    path = tmp_path / "step.trace"
    write_step(path, rank, extra=3 << 20)
    found = compare(rank, summarize(read_trace(path)))
    assert [(row.module, row.only_recorded) for row in found.modules if row.difference] == [("decoder.layers.0.mlp", (3 << 20,))]


def test_totals_are_computed_from_labels_and_iterations(step: tuple[RankClass, Path]) -> None:
    rank, path = step
    recorded = summarize(read_trace(path))
    memory = rank.memory
    assert (recorded.parameters, recorded.gradients, recorded.optimizer) == (
        memory.parameters_bytes,
        memory.gradients_bytes,
        memory.optimizer_bytes,
    )
    saved = sum(tensor.bytes for _, tensor in made_tensors(rank.chunks, rank.trees))
    static = memory.parameters_bytes + memory.gradients_bytes + memory.runtime_bytes
    first, last = recorded.iterations
    assert first.peak == static + max(saved, memory.optimizer_bytes)
    assert last.peak == static + memory.optimizer_bytes + saved
    assert last.allocated_after == memory.allocated_bytes
    assert sum(last.collectives.values()) == 1


def test_only_differences_above_the_tolerance_are_failures(step: tuple[RankClass, Path]) -> None:
    rank, path = step
    recorded = summarize(read_trace(path))
    memory = replace(rank.memory, gradients_bytes=int(rank.memory.gradients_bytes * 1.005))
    nearly = replace(rank, memory=memory)
    assert not [f for f in compare(nearly, recorded, tolerance=0.01).failures if f.startswith("gradients")]
    assert [f for f in compare(nearly, recorded, tolerance=0.001).failures if f.startswith("gradients")]


def test_checkpointed_layers_save_only_their_inputs() -> None:
    from analyzer.specs import RecomputeSpec

    asked = replace(job(num_layers=2), recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
    [rank] = rank_classes(asked)
    layered = [module for module, _ in made_tensors(rank.chunks, rank.trees) if module.startswith("decoder.layers")]
    assert layered == ["decoder.layers.0", "decoder.layers.1"]


WORDS = (
    "--nproc-per-node 1 pretrain_gpt.py --num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 2 --train-iters 1 --lr 1e-4 --bf16 --padded-vocab-size 51200 "
    "--vocab-size 50257 --tokenizer-type NullTokenizer --attention-backend fused"
).split()


def recorded_step(path: Path, *, extra: int = 0, kernels: Sequence[KernelCall] = (), world: int = 1) -> None:
    """Write the trace of a step with the allocations predicted for WORDS, `extra` bytes, and `kernels`."""
    arguments, where, _ = parse(WORDS, environ={}, folder=path.parent)
    asked = build(arguments, where, environ={}, gpu=HardwareSpec(), folder=path.parent)
    [rank] = rank_classes(asked)
    write_step(path, rank, extra=extra, kernels=kernels, argv=("pretrain", *WORDS, "--info-record", "x"), world=world)


def test_the_check_takes_the_launch_from_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "step.trace"
    recorded_step(path)
    outcome = run("--info-check", str(path), "--info-tolerance", "0.2")
    assert "decoder.layers.0–1.self_attention.linear_qkv" in outcome.out
    assert "only" not in outcome.out
    assert "100.00% of the recorded bytes" in outcome.out


def test_a_failed_check_exits_with_3_and_names_the_module(tmp_path: Path) -> None:
    path = tmp_path / "step.trace"
    recorded_step(path, extra=64 << 20)
    outcome = run("--info-check", str(path), *WORDS, "--info-json", str(tmp_path / "check.json"))
    assert outcome.status == 3
    assert "decoder.layers.0.mlp: only the trace has a tensor of 64.00 MiB" in outcome.out
    result = json.loads((tmp_path / "check.json").read_text())
    assert not result["passed"]
    assert [row["only_recorded_bytes"] for row in result["modules"] if row["module"] == "decoder.layers.0.mlp"] == [[64 << 20]]


def kernels_of_words() -> list[KernelCall]:
    """The kernels of a microbatch of WORDS, from the layer sizes: 2048 tokens, width 1024, FFN width 4096, 16 heads of 64."""
    layer = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]
    found: list[KernelCall] = []
    for columns, depth in (*layer, *layer, (51200, 1024)):
        found.append(GemmCall(2048, columns, depth, 1, 16, False))
        found.append(GemmCall(2048, depth, columns, 1, 16, False))
        found.append(GemmCall(columns, depth, 2048, 1, 16, True))
    for _ in range(2):
        found.append(AttentionCall("forward", 2, 16, 1024, 1024, 64, 64, causal=True, window=-1))
        found.append(AttentionCall("backward", 2, 16, 1024, 1024, 64, 64, causal=True, window=-1))
    return found


def test_the_check_compares_kernels(tmp_path: Path) -> None:
    path, document = tmp_path / "step.trace", tmp_path / "check.json"
    recorded_step(path, kernels=kernels_of_words())
    outcome = run("--info-check", str(path), "--info-json", str(document))
    assert "13 of 13 shapes agree" in " ".join(outcome.out.split())
    assert "FLOPs of GEMMs" not in outcome.out
    found = json.loads(document.read_text())["kernels"]
    assert found["differences"] == []
    layers, logits, attention = 4 * 1024 * (3 + 1 + 4 + 4) * 1024, 2 * 51200 * 1024, 3.5 * 2 * 2 * 16 * 1024 * 1024 / 2 * 128
    assert found["recorded_flops"] == found["predicted_flops"] == 3 * 2048 * (layers + logits) + 2 * attention


def test_a_missing_kernel_fails_the_check(tmp_path: Path) -> None:
    path, document = tmp_path / "step.trace", tmp_path / "check.json"
    recorded_step(path, kernels=kernels_of_words()[1:])
    outcome = run("--info-check", str(path), "--info-json", str(document))
    assert outcome.status == 3
    assert "16-bit GEMM 2048 × 3072 × 1024: formula 2" in outcome.out
    assert "FLOPs of GEMMs and attention: +" in " ".join(outcome.out.split())
    found = json.loads(document.read_text())
    assert any(failure.startswith("FLOPs of GEMMs and attention: +1.") for failure in found["failures"])
    [row] = found["kernels"]["differences"]
    assert (row["kind"], row["bits"], row["sizes"]) == ("gemm", 16, [2048, 3072, 1024])
    assert (row["predicted"], row["recorded"]) == (2, 1)


def test_a_trace_without_kernels_is_not_compared_with_kernels(tmp_path: Path) -> None:
    path, document = tmp_path / "step.trace", tmp_path / "check.json"
    recorded_step(path)
    outcome = run("--info-check", str(path), "--info-json", str(document))
    assert "GEMM" not in outcome.out
    assert json.loads(document.read_text())["kernels"] is None


@pytest.mark.parametrize("world", [2])
def test_a_trace_with_another_world_size_is_an_error(tmp_path: Path, world: int) -> None:
    path = tmp_path / "step.trace"
    recorded_step(path, world=world)
    outcome = run("--info-check", str(path), *WORDS)
    assert_refused(outcome, "--info-check")


def test_a_file_that_is_not_a_trace_is_an_error(tmp_path: Path) -> None:
    assert_refused(run("--info-check", str(tmp_path / "missing"), *WORDS), "--info-check")
    (tmp_path / "text").write_text("no trace")
    outcome = run("--info-check", str(tmp_path / "text"), *WORDS)
    assert outcome.status == 2
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(("option", "value"), [("--info-against", "old.json"), ("--info-fail-on", "tight")])
def test_options_about_a_report_are_refused(tmp_path: Path, option: str, value: str) -> None:
    path = tmp_path / "step.trace"
    recorded_step(path)
    outcome = run("--info-check", str(path), option, value)
    assert_refused(outcome, "--info-check")
    assert option in outcome.err


def test_a_truncated_trace_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "step.trace"
    recorded_step(path)
    whole = path.read_bytes()
    for size in (len(whole) - 48, len(whole) - 1, len(whole) * 3 // 4):
        path.write_bytes(whole[:size])
        outcome = run("--info-check", str(path))
        assert_refused(outcome, str(path))
        assert "--info-allow-truncated" in outcome.err
        assert run("--info-check", str(path), "--info-allow-truncated").status in (0, 3)


def test_a_failed_recording_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TraceWriter(tmp_path / "step.trace", Header(recorder="shadow")) as writer:
        writer.enter("", "no phase")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "matches"),
    [
        ((10240,) * 4, True),
        ((11264, 9216) * 2, True),
        ((11264, 9216, 12288, 8192), False),
        ((11264, 9216), False),
    ],
)
def test_padded_rows_of_experts_match_in_pairs(sizes: tuple[int, ...], matches: bool) -> None:
    """One expert has as much more than the mean as the other has less; other sizes with the same sum do not match."""
    tensor = Tensor(name="rows of experts", shape=(4, 10240), dtype="uint8", pieces=4)
    assert _pieces(tensor, Counter(sizes)) == (Counter(sizes) if matches else Counter())
