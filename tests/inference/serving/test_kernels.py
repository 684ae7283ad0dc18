"""Kernels of serving engines: floors by hand, tables against the measurements they are made of, and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.hardware.speeds import speed_of
from analyzer.inference.kernels import Machine, linear_seconds
from analyzer.inference.serving import floors
from analyzer.inference.serving.engines import engine_of
from analyzer.inference.serving.estimate import Replica, replica_of
from analyzer.inference.serving.step import StepWork
from analyzer.inference.serving.tables import AXES, grid_of, ratio
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.work.kernels import Gemm
from tests.inference.job_of import launch_of

GENERATION = "--info-inference batch=8,prompt=1024,generate=128 --info-megatron 0.16.1"


def speed(gpu: str) -> SpeedSpec:
    found = speed_of(gpu)
    assert found is not None
    return found


def replica(model: str, options: str, *, engine: str = "vllm", gpu: str = "H200-141GB") -> Replica:
    job = launch_of(f"--info-model {model} --info-gpu {gpu} {GENERATION} {options}").job
    return replica_of(job, engine, speed(gpu))  # type: ignore[arg-type]


def test_the_floor_of_a_product_reads_its_weight_once() -> None:
    h100 = speed("H100-80GB")
    assert floors.gemm_floor(h100, "16", 1, 8192, 8192) == pytest.approx(2 * 8192 * (8192 + 2) / 3.35e12 + 2e-6, rel=1e-3)
    assert floors.gemm_floor(h100, "8", 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 1979e12 + 2e-6, rel=1e-3)


def test_the_floor_of_experts_reads_those_that_are_chosen() -> None:
    """A token that chooses 8 of 128 experts reads 8; very many tokens read all."""
    h100 = speed("H100-80GB")
    shape = {"hidden": 4096, "width": 1536, "local": 128, "experts": 128, "topk": 8}
    weights = 3 * 4096 * 1536
    assert floors.experts_floor(h100, "8", tokens=1, **shape) == pytest.approx(8 * weights / 3.35e12 + 1e-5, rel=0.01)
    assert floors.experts_floor(h100, "8", tokens=300, **shape) == pytest.approx(128 * weights / 3.35e12 + 1e-5, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "engine", "kind", "rows", "columns", "milliseconds"),
    [
        ("H200-141GB", "trtllm", "16", 1, 8192, 0.035616),
        ("H200-141GB", "trtllm", "16", 16, 8192, 0.035680),
        ("B200-180GB", "trtllm", "16", 16, 8192, 0.025291),
        ("H200-141GB", "trtllm", "8", 1, 8192, 0.030032 - 0.007197 - 0.001312),
        ("H200-141GB", "trtllm", "8", 16, 1024, 0.016479 - 0.007372 - 0.001412),
    ],
)
def test_tables_have_the_measured_products(gpu: str, engine: str, kind: str, rows: int, columns: int, milliseconds: float) -> None:
    """Rows of gemm_perf and, in fp8, of computescale_perf and scale_matrix_perf (aiconfigurator-core 0.12.0), depth 8,192."""
    floor = floors.gemm_floor(speed(gpu), kind, rows, columns, 8192)
    found = ratio(speed(gpu), engine, f"gemm {kind}", "gemm", rows, columns, 8192)
    assert found is not None
    assert 1e3 * floor * found == pytest.approx(milliseconds, rel=0.011)  # values are in steps of 2 %


@pytest.mark.parametrize(
    ("tokens", "milliseconds"),
    [(64, 0.3413), (1024, 0.6665), (16384, 6.249)],
)
def test_tables_have_the_measured_experts_of_a_model(tokens: int, milliseconds: float) -> None:
    """Rows of moe_perf (aiconfigurator-core 0.12.0): DeepSeek-R1 in fp8 on H200 with SGLang, eight expert-parallel ranks."""
    h200 = speed("H200-141GB")
    shape = {"hidden": 7168, "width": 2048, "local": 32, "experts": 256, "topk": 8}
    floor = floors.experts_floor(h200, "8b", tokens=tokens, **shape)
    found = ratio(h200, "sglang", "experts 8b", "experts", tokens, 2048, 32, shape="7168 2048 256 8")
    assert found is not None
    assert 1e3 * floor * found == pytest.approx(milliseconds, rel=0.15)


def test_the_host_issues_the_operations_of_steps_with_prompts() -> None:
    """Those of a layer: 12 of multi-latent attention, 12 of experts, 4 of shared experts, 2 exchanges; of a dense MLP, 4.

    A step that is replayed as graphs has two for each layer: the graph and attention.
    """
    unit = replica("deepseek-ai/DeepSeek-R1", "--info-world-size 8 --tensor-model-parallel-size 8 --info-quantize w8a8kv8g128")
    work = StepWork(prompt_tokens=64, prompt_pairs=64 * 32.0, prompts=1, all_tokens=64)
    assert unit.steps.issued(work) == 58 * (12 + 12 + 4 + 2) + 3 * (12 + 4 + 2)
    assert unit.steps.issued(replace(work, captured=True)) == 61 * 2
    assert unit.steps.issued(StepWork(requests=8, length=64, all_tokens=8)) == 0
    assert unit.steps.seconds(work).total >= unit.steps.issued(work) * unit.engine.operation_seconds


def test_products_of_few_rows_of_megatron_are_measured_ones() -> None:
    """The row of gemm_perf above with one row, in 16 bit."""
    h200 = speed("H200-141GB")
    machine = Machine(h200, efficiencies_of(h200), tables=True)
    assert 1e3 * linear_seconds(Gemm("forward", 1, 8192, 8192), machine, None) == pytest.approx(0.035616, rel=0.011)


@pytest.mark.parametrize(
    ("engine", "gpu", "gib", "tokens"),
    [
        ("vllm", "H100-80GB", 79, 8192),
        ("vllm", "A100-80GB", 79, 2048),
        ("vllm", "L40S", 45, 2048),
        ("sglang", "L40S", 45, 4096),
        ("sglang", "H200-141GB", 140, 8192),
        ("sglang", "B200-180GB", 179, 16384),
        ("trtllm", "A100-80GB", 79, 8192),
    ],
)
def test_engines_take_fewer_tokens_of_prompts_on_smaller_gpus(engine: str, gpu: str, gib: int, tokens: int) -> None:
    """EngineArgs.get_batch_defaults of vLLM, ServerArgs of SGLang, BuildConfig of TensorRT-LLM."""
    assert engine_of(engine, gpu, gib * 2**30).chunk_tokens == tokens


def test_grids_have_all_points() -> None:
    for gpu, architecture in (("H100-80GB", "hopper"), ("A100-80GB", "ampere"), ("unknown", "blackwell")):
        for engine in ("trtllm", "vllm", "sglang"):
            grid = grid_of(gpu, architecture, engine, "gemm 16")
            assert grid is not None
            assert len(grid) == len(AXES["gemm"][0]) * len(AXES["gemm"][1]) * len(AXES["gemm"][2])


def test_beyond_the_ends_of_a_grid_its_end_is_used() -> None:
    h100 = speed("H100-80GB")
    last = ratio(h100, "vllm", "all_reduce", "all_reduce", 8, 2.0**28)
    assert ratio(h100, "vllm", "all_reduce", "all_reduce", 8, 2.0**40) == last
    assert ratio(h100, "vllm", "gemm 4", "gemm", 1, 128, 128) is None  # no NVFP4 on Hopper


def test_a_step_of_decode_takes_at_least_as_long_as_reading_the_weights() -> None:
    unit = replica("meta-llama/Llama-3.1-70B", "--info-world-size 1 --info-quantize w8a8kv8")
    found = unit.steps.seconds(StepWork(requests=1, length=1024, all_tokens=1))
    least = 70e9 / 4.8e12
    assert least < found.total < 1.8 * least
    assert found.communication == 0


def test_a_step_has_all_parts_and_grows_with_requests_and_length() -> None:
    unit = replica("Qwen/Qwen3-235B-A22B", "--info-world-size 4 --tensor-model-parallel-size 4 --info-quantize w8a8kv8g128")
    small = unit.steps.seconds(StepWork(requests=8, length=1024, all_tokens=8))
    longer = unit.steps.seconds(StepWork(requests=8, length=16384, all_tokens=8))
    more = unit.steps.seconds(StepWork(requests=64, length=1024, all_tokens=64))
    assert small.communication > 0
    assert longer.attention > small.attention
    assert longer.gemm == small.gemm
    assert more.total > small.total


def test_tensor_parallel_ranks_with_experts_of_their_own_add_up_their_outputs() -> None:
    """Expert parallelism over the tensor-parallel ranks: an all-reduce, as with experts that are split; no exchange of tokens."""
    split = replica("Qwen/Qwen3-235B-A22B", "--info-world-size 4 --tensor-model-parallel-size 4")
    whole = "--info-world-size 4 --tensor-model-parallel-size 4 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    work = StepWork(requests=8, length=1024, all_tokens=8)
    assert replica("Qwen/Qwen3-235B-A22B", whole).steps.seconds(work).communication == split.steps.seconds(work).communication


def test_groups_with_data_parallel_attention() -> None:
    unit = replica("Qwen/Qwen3-235B-A22B", "--info-world-size 4 --expert-model-parallel-size 4 --info-quantize w8a8kv8g128")
    assert unit.layout.attention_data == 4
    assert unit.layout.ranks == 4
    alone = replica("Qwen/Qwen3-235B-A22B", "--info-world-size 4 --tensor-model-parallel-size 4 --info-quantize w8a8kv8g128")
    share = unit.cache_tokens(0.9) / alone.cache_tokens(0.9)
    assert share < 1.1  # each group has the weights of attention, and caches all heads


def test_the_share_of_memory_bounds_the_cache() -> None:
    unit = replica("meta-llama/Llama-3.1-8B", "--info-world-size 1")
    size = unit.cache_tokens(0.9) - unit.cache_tokens(0.5)
    assert size == pytest.approx(0.4 * (unit.job.hardware.capacity_bytes or 0) / 131072, rel=1e-3)
