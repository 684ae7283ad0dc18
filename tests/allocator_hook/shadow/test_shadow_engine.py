"""The shadow engine compared with Megatron and with measured runs. Needs torch, megatron-core and Transformer Engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allocator_hook.shadow import engine
from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.specs import TrainingJob
from analyzer.trace.allocator_replay import Replayed, replay
from analyzer.trace.events import CollectiveEvent, Label, Mark
from analyzer.trace.reader import read_trace
from tests.allocator_hook.shadow.needed_packages import NEEDS_SHADOW
from tests.data_files import measured_records
from tests.job_of import job_of

ROOT = Path(__file__).resolve().parents[3]


pytestmark = NEEDS_SHADOW

SMALL = (
    "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    "--use-distributed-optimizer"
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Traces of one rank per stage of a small model with TP2 PP2 DP2."""
    return engine.run(job_of(SMALL), [0, 4], cache_dir=tmp_path_factory.mktemp("shadow"))


def collectives(path: Path, iteration: int = 1) -> Iterator[CollectiveEvent]:
    """Yield the collectives of one iteration, from its first forward mark to the end of its optimizer step."""
    depth = 0
    for event in read_trace(path):
        if isinstance(event, Mark) and not event.name and event.iteration == iteration:
            depth += 1 if event.kind == "enter" else -1
        elif isinstance(event, CollectiveEvent) and depth:
            yield event


def test_tensor_parallel_layers_all_reduce_twice_in_forward_and_twice_in_backward(small: dict[int, Path]) -> None:
    """Source: operators f and g of attention and FFN (Megatron-LM, arXiv:1909.08053, section 3)."""
    reduced = Counter(
        event.phase
        for event in collectives(small[0])
        if event.kind == "all_reduce" and event.group == "tp" and event.bytes == 2 * 2048 * 1024
    )
    layers, microbatches = 2, 4
    embedding = 1
    assert reduced["forward"] == (2 * layers + embedding) * microbatches
    assert reduced["backward"] == 2 * layers * microbatches


def test_a_stage_sends_the_tensors_that_the_next_stage_receives(small: dict[int, Path]) -> None:
    sent = [event for event in collectives(small[0]) if event.kind == "send"]
    received = [event for event in collectives(small[4]) if event.kind == "recv"]
    assert [event.peer for event in sent] == [4] * 4
    assert [event.peer for event in received] == [0] * 4
    assert {event.shape for event in sent} == {(2048, 1, 1024)} == {event.shape for event in received}


def test_the_distributed_optimizer_reduce_scatters_gradients_and_all_gathers_parameters(small: dict[int, Path]) -> None:
    events = [event for event in collectives(small[0]) if event.group in ("dp", "dp_cp", "intra_dp_cp") and event.bytes > 1 << 20]
    # the embedding has its own bucket, because it is shared with the last stage
    assert [(event.kind, event.dtype, event.phase) for event in events] == [
        *[("reduce_scatter", "fp32", "backward")] * 2,
        *[("all_gather", "bf16", "optimizer")] * 2,
    ]
    assert [event.shape for event in events[:2]] == [event.shape for event in events[2:]]
    assert {event.members for event in events} == {(0, 2)}


def test_parameters_are_labelled_by_their_names(small: dict[int, Path]) -> None:
    labels = [event for event in read_trace(small[4]) if isinstance(event, Label) and event.role == "parameter"]
    shapes = {label.name: label.shape for label in labels}
    assert shapes["decoder.layers.2.mlp.linear_fc1.weight"] == (2048, 1024)  # the third layer of the model, on the second stage
    assert shapes["decoder.layers.3.self_attention.linear_qkv.weight"] == (1536, 1024)
    assert "decoder.layers.0.mlp.linear_fc1.weight" not in shapes


def test_marks_are_nested_and_backward_follows_forward(small: dict[int, Path]) -> None:
    stack: list[tuple[str, str]] = []
    seen: list[tuple[str, str]] = []
    for event in read_trace(small[0]):
        if isinstance(event, Mark):
            if event.kind == "enter":
                stack.append((event.name, event.phase))
                seen.append(stack[-1])
            else:
                assert stack.pop() == (event.name, event.phase)
    assert not stack
    fc1 = "decoder.layers.1.mlp.linear_fc1"
    assert seen.index((fc1, "forward")) < seen.index((fc1, "backward"))
    assert seen.index(("decoder.layers.1", "backward")) < seen.index(("decoder.layers.0", "backward"))


def test_cached_traces_are_returned_without_a_worker(small: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert engine.run(job_of(SMALL), [0, 4], cache_dir=small[0].parent) == small


def test_recomputation_has_its_own_phase(tmp_path: Path) -> None:
    line = "--num-layers 2 --global-batch-size 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    path = engine.run(job_of(line), [0], cache_dir=tmp_path, iterations=1)[0]
    entered = Counter((event.name, event.phase) for event in read_trace(path) if isinstance(event, Mark) and event.kind == "enter")
    for phase in ("forward", "recompute", "backward"):
        assert entered["decoder.layers.0.mlp", phase] == 1
    assert not entered["embedding", "recompute"]


def measured(name: str, part: str) -> dict[str, Any]:
    """Return the measured run whose id contains `part`."""
    return next(record for record in measured_records(f"{name}.json") if part in record["id"])


def replayed(path: Path) -> Replayed:
    """Replay the trace at `path` through the simulated caching allocator."""
    return replay(read_trace(path), AllocatorSettings())


def job_from(record: dict[str, Any]) -> TrainingJob:
    environ = {**os.environ, **record["env"]}
    words = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), *record["argv"]]
    arguments, world, _ = parse(words, environ=environ, folder=Path("/nowhere"))
    return build(arguments, world, environ=environ, gpu=hardware(record["gpu"], None)[0], folder=Path("/nowhere"))


@pytest.mark.parametrize("rank", [0, 4])
def test_peaks_of_a_measured_run_on_b200(rank: int, tmp_path: Path) -> None:
    """Eight B200s, Llama 3 70B shapes, TP1 PP2: allocated and reserved peaks of the first and the last stage."""
    record = measured("b200", "llama3_70b_l12_tp1_pp2_dp4")
    # the default on Blackwell in PyTorch 2.10 (January 2026), which the run used
    record = {**record, "env": {**record["env"], "CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}}
    usage = replayed(engine.run(job_from(record), [rank], cache_dir=tmp_path)[rank])
    truth = record["measured_per_rank"][str(rank)]
    assert usage.peak == pytest.approx(truth["peak_allocated_bytes"], rel=1e-4)
    assert usage.peak_reserved == pytest.approx(truth["peak_reserved_bytes"], rel=1e-3)


def test_reserved_memory_with_context_parallelism(tmp_path: Path) -> None:
    """The all-to-all allocates queries, keys, values and outputs on a second stream. The last rank reserves the most memory."""
    record = measured("b200", "llama3_70b_l12_tp1_cp8")
    usage = replayed(engine.run(job_from(record), [7], cache_dir=tmp_path)[7])
    assert usage.peak_reserved == pytest.approx(record["measured_per_rank"]["7"]["peak_reserved_bytes"], rel=1e-3)


def test_memory_of_a_measured_run_on_h100_with_tp4(tmp_path: Path) -> None:
    """NVIDIA's functional test of a 7B model with TP4: steady state, first iteration, peak."""
    record = measured("megatron_ci", "gpt3_7b_tp4_pp1_memory_speed/dev_dgx_h100")
    usage = replayed(engine.run(job_from(record), [record["rank"]], cache_dir=tmp_path)[record["rank"]])
    measured_bytes = record["measured"]
    assert usage.allocated == pytest.approx(measured_bytes["allocated_bytes"], rel=1e-4)
    assert usage.peak_first_iteration == pytest.approx(measured_bytes["peak_allocated_first_iteration_bytes"], rel=1e-4)
    assert usage.peak == pytest.approx(measured_bytes["peak_allocated_bytes"], rel=1e-4)


def test_peaks_of_a_measured_moe_run_with_mla(tmp_path: Path) -> None:
    """DeepSeek-V2 shapes on eight B200s, EP4 PP2. Balanced routing is close to that of an untrained router."""
    record = measured("b200", "deepseekv2_tp1_ep4_pp2")
    usage = replayed(engine.run(job_from(record), [0], cache_dir=tmp_path)[0])
    truth = record["measured_per_rank"]["0"]
    assert usage.peak == pytest.approx(truth["peak_allocated_bytes"], rel=3e-3)
    assert usage.peak_reserved == pytest.approx(truth["peak_reserved_bytes"], rel=5e-3)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_fake_cuda_restores_everything_on_exit() -> None:
    done = run_python(
        """
        import importlib.metadata, os, sys, torch
        from allocator_hook.shadow.facade import fake_cuda
        from allocator_hook.shadow.gpu import Gpu
        places = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module, torch.jit]
        places += [torch.version, importlib.metadata]
        before = [dict(vars(place)) for place in places], list(sys.meta_path), dict(os.environ), set(sys.modules)
        gpu = Gpu(name="X", capability=(9, 0), multiprocessors=132, memory_bytes=1)
        try:
            with fake_cuda(gpu, compiler=lambda f: f, memory_allocated=lambda: 0):
                tensor = torch.empty(3, device="cuda")
                assert tensor.is_cuda and str(tensor.device) == "cuda:0" and torch.cuda.is_available()
                raise KeyError
        except KeyError:
            pass
        assert not tensor.is_cuda and not torch.cuda.is_available()
        after = [dict(vars(place)) for place in places], list(sys.meta_path), dict(os.environ), set(sys.modules)
        assert before[0] == after[0] and before[1:3] == after[1:3]
        assert not {name for name in after[3] - before[3] if "transformer_engine" in name or "flash" in name or "apex" in name}
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_error_for_a_missing_kernel_names_it() -> None:
    done = run_python(
        """
        from allocator_hook.shadow.gpu import Gpu
        from allocator_hook.shadow.te_kernels import extension
        extension(Gpu(name="X", capability=(9, 0), multiprocessors=132, memory_bytes=1), version="2.11").convert_thd_to_bshd(1)
        """
    )
    assert "MissingKernelError" in done.stderr
    assert "convert_thd_to_bshd" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_an_interruption_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from allocator_hook.shadow import engine
        from tests.job_of import job_of
        engine.run(job_of("--num-layers 64 --global-batch-size 512"), [0], cache_dir=Path({str(tmp_path)!r}), microbatches=64)
    """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not (workers := children(caller.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    workers = [pid for worker in children(caller.pid) for pid in (worker, *children(worker))]
    caller.send_signal(number)
    assert caller.wait(timeout=20) != 0
    assert workers
    deadline = time.monotonic() + 10
    while (any(map(running, workers)) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if running(pid)]
    assert not list(tmp_path.iterdir())


def running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of `pid`, from /proc."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
