"""Memory of a synthetic trace, replayed through the simulated caching allocator."""

from __future__ import annotations

from pathlib import Path

from allocator_hook.trace_writer import TraceWriter
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.trace.allocator_replay import KINDS, replay
from analyzer.trace.events import Header
from analyzer.trace.reader import read_trace
from analyzer.units import MIB


def write_step(path: Path) -> None:
    """Write two iterations with 40 MiB of parameters, 30 MiB of temporary tensors and 12 MiB of optimizer states."""
    with TraceWriter(path, Header(recorder="shadow")) as trace:
        trace.enter("", "build")
        trace.allocation(1, 40 * MIB)
        trace.label(1, "parameter", "weight", shape=(40 * MIB,), dtype="uint8", bytes=40 * MIB)
        trace.leave("", "build")
        for iteration in range(2):
            trace.enter("decoder", "forward", 0, iteration)
            trace.allocation(2, 30 * MIB)
            trace.free(2)
            trace.leave("decoder", "forward", 0, iteration)
            trace.enter("", "optimizer", -1, iteration)
            if iteration == 0:
                trace.allocation(3, 12 * MIB)
                trace.label(3, "optimizer", "exp_avg", shape=(12 * MIB,), dtype="uint8", bytes=12 * MIB)
            trace.leave("", "optimizer", -1, iteration)


def test_a_replay_gives_the_known_memory_of_a_synthetic_step(tmp_path: Path) -> None:
    write_step(tmp_path / "step.trace")
    found = replay(read_trace(tmp_path / "step.trace"), AllocatorSettings())
    zero = dict.fromkeys(KINDS, 0)
    assert found.allocated == 52 * MIB
    assert found.peak_first_iteration == 70 * MIB
    assert found.peak == 82 * MIB
    assert found.peak_at == "forward of microbatch 0, decoder"
    # the optimizer states use a part of the cached 30 MiB block, and the next iteration needs a new 30 MiB block
    assert found.peak_reserved == 100 * MIB
    assert found.after == {**zero, "parameter": 40 * MIB, "optimizer": 12 * MIB}
    # the 30 MiB are not freed in a backward, so they are temporary
    assert found.at_peak == {**zero, "parameter": 40 * MIB, "optimizer": 12 * MIB, "temporary": 30 * MIB}


def test_the_peak_can_be_in_the_creation_of_the_model(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.trace", Header(recorder="shadow")) as trace:
        trace.enter("", "build")
        trace.allocation(1, 60 * MIB)
        trace.free(1)
        trace.leave("", "build")
        trace.enter("decoder", "forward", 0, 0)
        trace.allocation(2, 30 * MIB)
        trace.leave("decoder", "forward", 0, 0)
    found = replay(read_trace(tmp_path / "step.trace"), AllocatorSettings())
    assert (found.peak_first_iteration, found.peak) == (60 * MIB, 60 * MIB)
    assert found.peak_at == "creation of the model"


def test_the_timeline_covers_the_last_iteration(tmp_path: Path) -> None:
    write_step(tmp_path / "step.trace")
    points = replay(read_trace(tmp_path / "step.trace"), AllocatorSettings()).timeline.points
    assert [sum(point) // MIB for point in points] == [82, 52]
