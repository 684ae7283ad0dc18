"""Reading logs: spellings of several releases and frameworks, and logs that are hard to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.time.run_log.read import parse, read_log
from analyzer.time.run_log.record import Iteration, RunLog, Timer, measured
from tests.time.run_log.logs import line, memory, timers

MIB = 2**20


def read(*lines: str) -> RunLog:
    found = parse(f"{each}\n" for each in lines)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "number", "seconds", "tflops", "batch"),
    [
        (line(10, 5.12, batch=256, tflops=456.7), 10, 5.12, 456.7, 256),
        (  # 2021, without a date
            " iteration      200/  500000 | consumed samples:       102400 | elapsed time per iteration (ms): 2345.6 | "
            "learning rate: 1.500E-04 | global batch size:   512 | lm loss: 6.1E+00 | loss scale: 1.0 |",
            *(200, 2.3456, None, 512),
        ),
        (  # Megatron-DeepSpeed of BigScience, in seconds
            " iteration     1000/  100000 | consumed samples:  2048000 | consumed tokens:   4194304000 | elapsed time per "
            "iteration (s): 105.12 | learning rate: 6.0E-05 | global batch size:  2048 | lm loss: 2.2E+00 | "
            "samples per second: 19.5 | TFLOPs: 150.01 |",
            *(1000, 105.12, 150.01, 2048),
        ),
        (  # the fork of AMD: of this iteration, and the mean
            " iteration       12/      50 | consumed samples:  96 | elapsed time per iteration (ms): 1234.5/1240.9 | hip mem "
            "usage/free/total/usage_ratio: 1.00GB/191.00GB/192.00GB/0.52% | throughput per GPU (TFLOP/s/GPU): 400.1/398.2 | "
            "global batch size:     8 |",
            *(12, 1.2345, 400.1, 8),
        ),
        (  # NeMo 2, whose iterations count from 0
            "0: [default0]:Training epoch 0, iteration 97/99 | lr: 1.469e-05 | global_batch_size: 128 | global_step: 97 | "
            "reduced_train_loss: 6.265 | train_step_timing in s: 12.22 | TFLOPS_per_GPU: 7.1e+02 | consumed_samples: 12544",
            *(98, 12.22, 710.0, 128),
        ),
    ],
)
def test_lines_about_iterations(text: str, number: int, seconds: float, tflops: float | None, batch: int) -> None:
    (found,) = read(text).iterations
    assert found == Iteration(number, seconds, tflops, batch)


def test_megatron_bridge_has_the_rate_on_a_line_before() -> None:
    step = "ain_fp8_mx/0 Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU"
    (found,) = read(step, "ain_fp8_mx/0 " + line(50, 9.089, tflops=None)).iterations
    assert (found.number, found.seconds, found.tflops) == (50, 9.089, 663.5)
    alone = read(step, step.replace("9.09", "9.11"))
    assert [(each.number, each.seconds, each.tflops) for each in alone.iterations] == [(1, 9.09, 663.5), (2, 9.11, 663.5)]


def test_colours_prefixes_carriage_returns_and_lines_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    glued = f"\x1b[32m[default7]:{line(10, 2.0)}\x1b[0m[default0]:{memory(0, 10, 1, 2, 3, 4)}{memory(8, 10, 5, 6, 7, 8)}"
    path.write_bytes(f"progress 1%\rprogress 2%\r{glued}\r\n\xff{line(20, 2.5)}\r\n".encode("latin-1"))
    found = read_log(path)
    assert [(each.number, each.seconds) for each in found.iterations] == [(10, 2.0), (20, 2.5)]
    assert found.memory[0][1:] == (MIB, 2 * MIB, 3 * MIB, 4 * MIB)
    assert found.memory[8][1:] == (5 * MIB, 6 * MIB, 7 * MIB, 8 * MIB)


def test_memory_reports() -> None:
    old = (
        "after 100 iterations memory (MB) | allocated: 1894.5 | max allocated: 9752.25 | reserved: 11342.0 | max reserved: 11344.0"
    )
    bridge = (
        "p4/0 [Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | mem-active-gigabytes: 63.66 | "
        "mem-inactive-gigabytes: 20.563 | mem-reserved-gigabytes: 182.2 | mem-max-allocated-gigabytes: 153.4 | "
        "mem-max-active-gigabytes: 169.96 | mem-max-reserved-gigabytes: 182.25 | mem-alloc-retires: 3 | mem-allocated-count: 507"
    )
    found = read(line(1, 1), memory(4, 1, 10, 20, 30, 40), old, bridge, memory(4, 10, 11, 21, 31, 41))
    assert found.memory[0] == (100, int(1894.5 * MIB), int(9752.25 * MIB), 11342 * MIB, 11344 * MIB)
    assert found.memory[1] == (2, 63_660_000_000, 153_400_000_000, 182_200_000_000, 182_250_000_000)
    assert found.memory[4] == (10, 11 * MIB, 21 * MIB, 31 * MIB, 41 * MIB)  # the last one
    assert found.retries == 3


def test_parameters_sizes_and_megatrons_own_estimate() -> None:
    found = read(
        "using world size: 16, data-parallel size: 4, context-parallel size: 1, hierarchical context-parallel sizes: None, "
        "tensor-model-parallel size: 2, pipeline-model-parallel size: 3",
        "  seq_length ...................................... 8192",
        "  global_batch_size ............................... 256",
        "  rampup_batch_size ............................... None",
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 4015263744",
        "Number of parameters in transformer block in billions:  6.98",
        "Total number of parameters in billions: 8.03",
        "Theoretical memory footprints: weight and optimizer=58137.81 MB, activation=1000.00 MB, total=59137.81 MB",
        line(1, 1),
    )
    assert found.facts == {
        "world_size": 16,
        "data_parallel_size": 4,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "seq_length": 8192,
        "global_batch_size": 256,
    }
    assert found.parameters == {(1, 0): 4_015_263_744}
    assert found.total_parameters == pytest.approx(8.03e9)
    assert found.theoretical_bytes == round(59137.81 * MIB)


def test_timers_of_all_options() -> None:
    found = read(
        "    model-and-optimizer-setup ......................: (1345.37, 1359.59)",
        line(10, 1),
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (26094.39, 26095.09)",
        "    optimizer ......................................: (3407.56, 3409.92)",
        line(20, 1),
        "max time across ranks (ms):",
        "    forward-backward ...............................: 25000.00",
        line(30, 1),
        "times across ranks (ms):",
        "  forward-compute:",
        "     rank  0: 120.50",
        "     rank  1: 130.00",
        "  some-other-timer:",
        "     rank  0: 7.00",
    )
    assert found.timers == {
        "forward-backward": [Timer(1, 26.09439, 26.09509), Timer(2, 25.0, 25.0)],
        "optimizer": [Timer(1, 3.40756, 3.40992)],
        "forward-compute": [Timer(3, 0.1205, 0.13)],
    }


def test_first_iterations_are_left_out() -> None:
    """An interval of ten: the first two lines are of the first ten iterations."""
    lines = [line(1, 60.0), line(10, 3.0), *(line(number, 2.0) for number in range(20, 101, 10))]
    found = measured(read(*lines))
    assert (found.left_out, found.used[0].number, found.used[-1].number) == (2, 20, 100)
    assert found.seconds == found.fast == found.slow == 2.0
    assert not found.with_warm_up


def test_of_a_short_log_half_is_left_out() -> None:
    found = measured(read(*(line(number, seconds) for number, seconds in ((1, 60.0), (2, 5.0), (3, 2.0), (4, 2.2)))))
    assert [each.number for each in found.used] == [3, 4]
    assert found.with_warm_up
    assert measured(read(line(1, 60.0))).seconds == 60.0


def test_restarts_copies_and_other_batch_sizes() -> None:
    ramp = [line(number, 1.0, batch=32) for number in range(1, 21)]
    first = [line(number, 2.0) for number in range(21, 41)]
    again = [line(30, 50.0), *(line(number, 2.0) for number in range(31, 51))]
    log = read(*ramp, *(copy for each in first for copy in (each, each)), *again)
    assert len(log.iterations) == 20 + 20 + 21
    found = measured(log)
    assert {each.batch for each in found.used} == {64}
    assert max(each.seconds for each in found.used) == 2.0  # neither the ramp-up nor the first iteration after the restart
    assert found.used[-1].number == 50


def test_percentiles() -> None:
    found = measured(read(*(line(100 + number, 1.0) for number in range(11)), *(line(111 + n, 1 + n / 10) for n in range(11))))
    assert len(found.used) == 12
    assert found.seconds == pytest.approx(1.45)
    assert found.slow == pytest.approx(1.89)


def test_timers_of_first_iterations_are_left_out() -> None:
    lines = []
    for number in range(1, 31):
        lines += [line(number, 1.0), *timers(optimizer=9.0 if number <= 10 else 0.25)]
    assert measured(read(*lines)).timers == {"optimizer": (0.25, 0.25)}


@pytest.mark.parametrize(
    "content",
    [b"", b"iteration 1/2 | elapsed time per iteration (ms): nan |", b"\x00" * 200_000, b"validation loss at iteration 10"],
)
def test_files_without_an_iteration(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"--info-log: .* has no iteration of a training; give the output"):
        read_log(path)
