"""The kernels run: with PyTorch on the CPU, on small tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from allocator_hook.calibrate.choose import LINEAR
from allocator_hook.calibrate.items import Item, Transfer
from allocator_hook.calibrate.measure import Unmeasurable, measure
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound

torch = pytest.importorskip("torch")

from allocator_hook.calibrate import gemms, kernels  # noqa: E402
from allocator_hook.calibrate.clock import CLOCK_RATE, SAMPLES, CudaClock, HostClock, Run  # noqa: E402
from allocator_hook.calibrate.gemms import gemm_run  # noqa: E402
from allocator_hook.calibrate.kernels import TorchRunner, bytes_of  # noqa: E402

FORWARD = Gemm("forward", 32, 16, 64)
DATA = Gemm("data gradient", 32, 16, 64)
WEIGHT = Gemm("weight gradient", 32, 16, 64, depth_is_tokens=True)
ATTENTION = Attention("forward", 1, 2, 64, 64, 2048, 32, 32)
RUNNABLE: list[Item] = [
    FORWARD,
    DATA,
    WEIGHT,
    WEIGHT._replace(output_bytes=4),
    WEIGHT._replace(output_bytes=12),
    FORWARD._replace(precision="32"),
    WEIGHT._replace(precision="32", output_bytes=8),
    WEIGHT._replace(precision="32", output_bytes=16),
    FORWARD._replace(batch=4),
    FORWARD._replace(batch=3, grouped=True),
    WEIGHT._replace(batch=3, grouped=True, output_bytes=12),
    FORWARD._replace(precision="8"),
    DATA._replace(precision="8"),
    WEIGHT._replace(precision="8", output_bytes=4),
    FORWARD._replace(precision="8", batch=3, grouped=True),
    ATTENTION,
    ATTENTION._replace(name="backward"),
    ATTENTION._replace(backend="flash"),
    MemoryBound("norm", 2.0**18),
    MemoryBound("residual add", 2.0**18),
    MemoryBound("quantization", 2.0**18, "cast"),
    MemoryBound("permutation", 2.0**18, "permute"),
    MemoryBound("reverse permutation", 2.0**18, "permute"),
]


class CountingClock:
    """Runs each function once. The first time it shows 1 second, then 2, and so on: an exact clock for an inexact machine."""

    def __init__(self) -> None:
        self.shown = 0
        self.runs = 0

    def seconds(self, runs: Sequence[Run], *, launches: int = 1) -> float:
        """The number of calls of this clock."""
        for run in runs:
            run()
        self.runs += len(runs)
        self.shown += launches > 0
        return float(self.shown)


@pytest.fixture
def runner() -> TorchRunner:
    return TorchRunner("cpu", clock=CountingClock())


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_COPIES", 2)


@pytest.mark.parametrize("item", RUNNABLE, ids=lambda item: f"{item[0]}-{'-'.join(map(str, item[1:]))}")
def test_every_kind_of_kernel_runs(item: Item, runner: TorchRunner) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runner.time(item) == 1
    assert runner.attention.used == ({"PyTorch"} if isinstance(item, Attention) else set())


def test_the_backward_is_what_both_passes_take_longer_than_the_forward(runner: TorchRunner) -> None:
    assert runner.time(ATTENTION) == 1
    assert runner.time(ATTENTION._replace(name="backward")) == 2 - 1


def test_small_kernels_run_on_several_copies(runner: TorchRunner) -> None:
    runner.time(FORWARD)
    assert isinstance(runner.clock, CountingClock)
    assert runner.clock.runs == kernels.MOST_COPIES


def test_the_clock_of_the_host_runs_all_copies() -> None:
    ran: list[int] = []
    clock = HostClock(samples=3, sample=1e-5)
    assert clock.seconds([lambda: ran.append(0), lambda: ran.append(1)]) > 0
    assert {0, 1} == set(ran)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (FORWARD._replace(m=33, precision="8"), "multiples of 16"),
        (FORWARD._replace(precision="4"), "4 bit"),
        (WEIGHT._replace(output_bytes=8), "fp32 buffer"),
        (LINEAR, "Transformer Engine"),
        (Transfer("all_reduce", 1024, 2, 2), "several GPUs"),
    ],
)
def test_what_cannot_run_gives_the_reason(item: Item, reason: str, runner: TorchRunner) -> None:
    if reason == "fp32 buffer" and runner.fuses_addition:
        pytest.skip("PyTorch adds products to an fp32 buffer on the CPU")
    with pytest.raises(Unmeasurable, match=reason):
        runner.time(item)


def test_an_error_of_pytorch_is_reported(runner: TorchRunner) -> None:
    unequal = Attention("backward", 1, 2, 64, 64, 2048, 48, 32)
    found = measure([unequal, FORWARD], [], runner, budget=1e9, show=lambda *_: None)
    assert [each.item for each in found.done] == [FORWARD]
    assert found.sentences() == ["attention backward: RuntimeError: No available kernel. Aborting execution."] or (
        found.sentences()[0].startswith("attention backward: RuntimeError")
    )


def product(gemm: Gemm) -> object:
    run = gemm_run(gemm, device="cpu", dtype=torch.float32 if gemm.precision == "32" else torch.bfloat16)
    run()
    return run()


@pytest.mark.parametrize("gemm", [FORWARD, DATA, WEIGHT, FORWARD._replace(precision="8")])
def test_products_have_the_shape_of_the_kernel(gemm: Gemm) -> None:
    assert product(gemm).shape == (32, 16)  # type: ignore[attr-defined]


def test_a_weight_gradient_is_added_to_its_buffer() -> None:
    run = gemm_run(WEIGHT._replace(precision="32", output_bytes=8), device="cpu", dtype=torch.bfloat16)
    once = run().clone()
    torch.testing.assert_close(run(), 2 * once)
    fresh = gemm_run(WEIGHT._replace(precision="32", output_bytes=4), device="cpu", dtype=torch.bfloat16)
    once = fresh().clone()
    torch.testing.assert_close(fresh(), once)


def test_the_memory_of_a_kernel_counts_its_copies() -> None:
    large = Gemm("forward", 2**15, 2**15, 2**15)
    tensors = 3 * 2**31
    assert tensors <= bytes_of(large) < 3 * tensors
    assert bytes_of(Gemm("forward", 1024, 1024, 1024)) >= 2 * 3 * 2**21, "small kernels run on several copies"


class FakeEvent:
    """An event of a GPU on which each run takes 2 ms."""

    runs = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Remembers how many runs were issued before."""
        self.before = FakeEvent.runs

    def synchronize(self) -> None:
        """Nothing runs."""

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        return 2.0 * (end.before - self.before)


@pytest.mark.parametrize("launches", [1, 50, 10_000])
def test_the_clock_of_a_gpu_divides_the_time_between_events(launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", pauses.append, raising=False)

    def run() -> None:
        FakeEvent.runs += 1

    assert CudaClock().seconds([run, run], launches=launches) == pytest.approx(0.002)
    assert len(pauses) == SAMPLES
    assert min(pauses) >= 50e-6 * CLOCK_RATE, "the host gets time to run ahead"


def test_experts_are_distributed_over_streams_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []
    current: list[str] = ["main"]
    ran: list[tuple[str, int]] = []

    class Stream:
        def __init__(self, name: str = "") -> None:
            self.name = name or f"side {len(sides)}"
            sides.append(self)

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    sides: list[Stream] = []
    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    runs = [partial(lambda number: ran.append((current[-1], number)), number) for number in range(6)]
    gemms._on_streams(runs, "cuda")()
    assert [name for name, _ in ran] == ["side 1", "side 2", "side 3", "side 4", "side 1", "side 2"]
    assert waits[:4] == [(f"side {number}", "main") for number in range(1, 5)]
    assert waits[4:] == [("main", f"side {number}") for number in range(1, 5)]


@pytest.mark.parametrize("works", [True, False])
def test_attention_of_transformer_engine_is_preferred_to_that_of_pytorch(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    class DotProductAttention:
        def __init__(self, heads: int, channels: int, *, qkv_format: str, attn_mask_type: str) -> None:
            assert (heads, channels, qkv_format, attn_mask_type) == (2, 32, "sbhd", "causal")

        def __call__(self, query: Any, key: Any, value: Any) -> Any:
            if not works:
                raise ValueError("no dot product attention backend is available")
            shapes.append(tuple(query.shape))
            return query * key * value

    engine = ModuleType("transformer_engine.pytorch")
    engine.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    runner = TorchRunner("cpu", clock=CountingClock(), engine=True)
    runner.time(ATTENTION)
    assert runner.attention.used == ({"Transformer Engine"} if works else {"PyTorch"})
    assert set(shapes) == ({(64, 1, 2, 32)} if works else set()), "tokens, samples, heads, elements of a head"


def test_the_host_is_timed_with_a_layer_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(inputs: int, outputs: int, *, bias: bool, params_dtype: Any) -> Any:
        return torch.nn.Linear(inputs, outputs, bias=bias, dtype=params_dtype)

    engine = ModuleType("transformer_engine.pytorch")
    engine.Linear = linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    assert TorchRunner("cpu", clock=CountingClock(), engine=True).time(LINEAR) > 0
