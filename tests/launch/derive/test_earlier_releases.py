"""Behaviour of Megatron-LM core 0.3 to 0.11 where it differs from later releases and from August 2023.

Sources: the packages megatron-core 0.3.0 to 0.12.3, and the parsers named in tools/options_before_0_12.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest

from analyzer.errors import InputError
from analyzer.memory.order import iteration_of
from analyzer.memory.ranks import highest_rank
from analyzer.modules.head import cross_entropy
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module, Parameter, total_bytes
from analyzer.passes.stages import stage_models
from analyzer.specs import SoftwareSpec, TrainingJob
from analyzer.states.buffers.gradient_buffers import bucket_divisor, bucket_size, chunk_buffers
from analyzer.states.buffers.parameter_order import ParameterRun
from tests.communication_job import make_job
from tests.job_of import BASE, job_of, states_of

CORE = "--use-mcore-models --transformer-impl transformer_engine"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"


def modules_of(tree: Module) -> Iterator[Module]:
    """Yield a module and everything below it."""
    yield tree
    for child in tree.children:
        yield from modules_of(child)


def core_job(release: str, line: str = "") -> TrainingJob:
    """Return a job with the layers of Transformer Engine in megatron-core."""
    words = CORE if release in ("0.4.0", "0.5.0", "0.6.0", "0.7.0") else "--transformer-impl transformer_engine"
    return job_of(f"{words} {line}", release=release)


@pytest.mark.parametrize(
    ("release", "ffn"),
    [("2023", 2688), ("0.3.0", 3072), ("0.4.0", 3072), ("0.5.0", 3072), ("0.8.0", 3072), ("0.11.0", 3072)],
)
def test_a_given_ffn_size_is_kept_since_core_0_3(release: str, ffn: int) -> None:
    """`validate_args`: `if args.ffn_hidden_size is None` (megatron/arguments.py, LumiOpen/Megatron-LM-lumi a2cca9d)."""
    assert job_of("--swiglu --ffn-hidden-size 3072", release=release).model.ffn_hidden_size == ffn


@pytest.mark.parametrize(
    ("line", "release", "implementation"),
    [
        ("", "0.3.0", "legacy"),
        ("", "0.4.0", "legacy"),
        ("", "0.5.0", "legacy"),
        ("--use-mcore-models", "0.5.0", "local"),
        (CORE, "0.4.0", "transformer_engine"),
        ("--transformer-impl local", "0.7.0", "legacy"),
        ("--use-mcore-models", "0.7.0", "transformer_engine"),
        ("", "0.8.0", "transformer_engine"),
        ("--use-mcore-models", "0.8.0", "transformer_engine"),
        ("--use-legacy-models --transformer-impl local", "0.8.0", "legacy"),
    ],
)
def test_core_models_are_the_default_since_0_8(line: str, release: str, implementation: str) -> None:
    assert job_of(line, release=release).model.implementation == implementation


@pytest.mark.parametrize("release", ["0.6.0", "0.7.0"])
def test_the_default_of_core_0_6_and_0_7_is_a_warning(release: str) -> None:
    """The default is a legacy model with layers of Transformer Engine, which is not modelled."""
    job = job_of("", release=release)
    assert job.model.implementation == "transformer_engine"
    assert any(each.startswith("--transformer-impl transformer_engine: legacy models") for each in job.warnings)


@pytest.mark.parametrize(("release", "fused"), [("0.4.0", False), ("0.5.0", True), ("0.11.0", True)])
def test_core_0_5_introduced_the_fused_rotation_and_the_fused_swiglu(release: str, fused: bool) -> None:
    """`apply_rope_fusion` and `bias_activation_fusion` are fields of TransformerConfig since 0.5.0."""
    model = core_job(release, "--position-embedding-type rope --swiglu").model
    assert (model.rope_fusion, model.bias_activation_fusion) == (fused, fused)


@pytest.mark.parametrize(
    ("release", "copied"), [("0.4.0", True), ("0.7.0", True), ("0.8.0", False), ("0.9.0", False), ("0.11.0", False)]
)
def test_the_cross_entropy_is_in_place_since_core_0_8(release: str, copied: bool) -> None:
    """0.7.0: `vocab_parallel_logits = vocab_parallel_logits - logits_max...`; 0.8.0: `vocab_parallel_logits -= ...`."""
    job = core_job(release)
    names = [tensor.name for tensor in cross_entropy(shapes_of(job)).forward_workspace]
    assert ("logits in fp32" in names) is copied


def test_the_copy_of_the_logits_raises_the_peak_of_core_0_7() -> None:
    # [s, b, v] in fp32; the vocabulary of 32001 tokens is padded to 32128; fragmentation differs by less than 2 MiB
    before, after = (highest_rank(core_job(release, "--recompute-activations")).memory for release in ("0.7.0", "0.8.0"))
    assert abs(before.peak_allocated_bytes - after.peak_allocated_bytes - 2048 * 32128 * 4) < 2 << 20


@pytest.mark.parametrize(("samples", "copied"), [(1, 0), (2, 1)])
def test_attention_after_the_fused_rotation_is_in_batches_before_core_0_14(samples: int, copied: int) -> None:
    """`TEDotProductAttention.forward` of 0.13.1: `x.transpose(0, 1).contiguous()`, and `core_attn_out.transpose(0, 1)`.

    The copies of q and k replace them, v is copied in both releases, and the projection saves a copy of the transposed output.
    """
    line = f"--position-embedding-type rope --micro-batch-size {samples}"
    software = SoftwareSpec(te="2.11", torch="2.10")
    before, after = (
        highest_rank(replace(core_job(release, line), software=software)).memory.activations_bytes
        for release in ("0.13.0", "0.14.0")
    )
    layers, output = 8, 2048 * samples * 1024 * 2
    assert before - after == copied * layers * output


@pytest.mark.parametrize(("release", "dtype"), [("0.13.0", "fp8"), ("0.14.0", "bf16")])
def test_the_projection_saves_its_16_bit_input_in_fp8_since_core_0_14(release: str, dtype: str) -> None:
    """0.14.0 is the first with `set_save_original_input(self.linear_proj)` (core/transformer/attention.py)."""
    job = core_job(release, "--fp8-format hybrid --fp8-recipe tensorwise")
    projection = next(each for each in modules_of(stage_models(job)[0].trees[0]) if each.name == "linear_proj")
    read = projection.saved[0]
    assert (read.dtype, prod(read.shape)) == (dtype, 2048 * 1024)


QKV, OUTPUT_LAYER = "dummy weight gradient [3072, 1024]", "dummy weight gradient [32128, 1024]"


@pytest.mark.parametrize(
    ("release", "te", "cached"),
    [
        ("0.11.0", "2.2", set()),
        ("0.13.0", "2.2", set()),
        ("0.13.0", "2.3", {QKV}),
        ("0.14.0", "2.2", set()),
        ("0.14.0", "2.3", {QKV, OUTPUT_LAYER}),
        ("0.16.1", "2.11", {QKV, OUTPUT_LAYER}),
    ],
)
def test_dummy_weight_gradients_are_cached_since_te_2_3_and_core_0_14(release: str, te: str, cached: set[str]) -> None:
    """`get_dummy_wgrad` exists in Transformer Engine 2.3 and later; 0.14.0 is the first to import it (tensor_parallel/layers.py).

    0.13.1 allocates `torch.empty(weight.main_grad.shape)` each time.
    """
    job = replace(core_job(release), software=SoftwareSpec(te=te, torch="2.7"))
    parts = {part.name for part in highest_rank(job).memory.runtime_parts}
    assert parts & {QKV, OUTPUT_LAYER} == cached


@pytest.mark.parametrize(("te", "cached"), [("2.9", False), ("2.10", True)])
def test_dummy_weight_gradients_of_grouped_experts_are_cached_since_te_2_10(te: str, cached: bool) -> None:
    """transformer_engine/pytorch/module/grouped_linear.py: `torch.empty` in 2.9.0, `get_dummy_wgrad` in 2.10.0."""
    line = "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 512 --disable-bias-linear"
    job = replace(core_job("0.15.3", line), software=SoftwareSpec(te=te, torch="2.9"))
    fc1 = next(each for each in modules_of(stage_models(job)[0].trees[0]) if "experts" in each.source or "Grouped" in each.source)
    parts = {part.name for part in highest_rank(job).memory.runtime_parts}
    assert ("dummy weight gradient [512, 1024]" in parts) is cached
    assert QKV in parts
    temporary = {tensor.name: tensor.shape for child in modules_of(fc1) for tensor in child.backward_workspace}
    # a grouped GEMM returns one for each expert, [8, 512, 1024] for fc1 and [8, 1024, 512] for fc2
    assert ("weight gradients" in temporary) is not cached


def parameters(*numels: int) -> list[ParameterRun]:
    return [ParameterRun(tuple(Parameter(name=str(numel), shape=(numel,), dtype="bf16") for numel in numels))]


@pytest.mark.parametrize(
    ("release", "padded"),
    [
        ("0.6.0", 156),  # 153 elements, padded to the 6 ranks (0.6.0, `_pad_if_needed`)
        ("0.7.0", 384),  # to lcm(6, 128) (0.7.0, `_pad_end_of_bucket_if_needed`)
        ("0.8.0", 384),
    ],
)
def test_padding_of_buckets(release: str, padded: int) -> None:
    job = make_job(megatron=release, world_size=6, distributed=True)
    (buffer,) = chunk_buffers(job, parameters(100, 3, 50), bucket_size=None)
    assert buffer.numel == padded
    assert padded % bucket_divisor(job, 6) == 0


@pytest.mark.parametrize(("release", "unpadded"), [("0.7.0", 153), ("0.8.0", 64 + 64 + 100)])
def test_parameters_start_at_multiples_of_64_elements_since_core_0_8(release: str, unpadded: int) -> None:
    """`_pad_start_of_param_if_needed` (param_and_grad_buffer.py, 0.8.0)."""
    job = make_job(megatron=release, world_size=6, distributed=True)
    (buffer,) = chunk_buffers(job, parameters(100, 3, 50), bucket_size=None)
    assert buffer.buckets[0].numel_unpadded == unpadded


@pytest.mark.parametrize(("release", "size"), [("0.4.0", 40_000_000), ("0.6.0", 40_000_000), ("0.7.0", 64_000_000)])
def test_the_default_bucket_grows_with_the_data_parallel_size_since_core_0_7(release: str, size: int) -> None:
    """0.6.0: `bucket_size: int = 40000000`; 0.7.0: `max(40000000, 1000000 * dp_size)`."""
    job = make_job(megatron=release, world_size=64, distributed=True, overlap_grad_reduce=True)
    assert bucket_size(job, pipeline_rank=0, chunk=0, rank_numel=10**9) == size


@pytest.mark.parametrize(("release", "separate"), [("0.4.0", True), ("0.5.0", True), ("0.6.0", False)])
def test_parameters_are_in_buffers_since_core_0_6(release: str, separate: bool) -> None:
    """grad_buffer.py (0.5.0) has gradients only; param_and_grad_buffer.py (0.6.0) has the parameters as well."""
    job = core_job(release, "--use-distributed-optimizer --hidden-size 1000 --num-attention-heads 10")
    alone = states_of(replace(job, optimizer=replace(job.optimizer, distributed=False)))
    assert (states_of(job).parameters == alone.parameters) is separate


@pytest.mark.parametrize(("release", "forwards"), [("0.4.0", 4), ("0.9.0", 4), ("0.10.0", 3)])
def test_all_forwards_of_a_single_group_come_first_before_core_0_10(release: str, forwards: int) -> None:
    """schedules.py: `if num_microbatches == pipeline_parallel_size: all_warmup_microbatches = True` until 0.9.0.

    In 0.10.0 the last of two ranks has (2 - 1 - 1) · 2 + (2 - 1) · 2 forwards in its warm-up, and one more before its first
    backward.
    """
    job = core_job(release, f"{INTERLEAVED} --global-batch-size 8")
    kinds = [step.kind for step in iteration_of(job, 1, 2, stage_models(job)[1].chunks).order]
    assert kinds.index("backward") == forwards


def test_sizes_are_reduced_to_the_world_size_before_core_0_9() -> None:
    """`args.tensor_model_parallel_size = min(args.tensor_model_parallel_size, args.world_size)` (`validate_args`, 0.8)."""
    job = job_of("--tensor-model-parallel-size 8", release="0.8.0", gpus=4)
    assert job.parallel.tensor == 4
    assert any(each.startswith("Megatron-LM core 0.8.0 reduces") for each in job.assumptions)
    with pytest.raises(InputError):
        job_of("--tensor-model-parallel-size 8", release="0.9.0", gpus=4)


def test_one_expert_per_token_needs_no_option_before_core_0_8() -> None:
    """`topk_softmax_with_capacity` (moe_utils.py) raises ValueError since 0.8.0; `TopKRouter` of 0.7.0 does not."""
    line = "--num-experts 8 --moe-router-topk 1 --disable-bias-linear"
    moe = core_job("0.7.0", line).model.moe
    assert moe is not None
    with pytest.raises(InputError, match="--moe-router-topk"):
        core_job("0.8.0", line)


@pytest.mark.parametrize("release", ["0.4.0", "0.8.0", "0.11.0"])
def test_gradients_of_bf16_are_in_fp32(release: str) -> None:
    """`bfloat16 requires gradient accumulation and all-reduce to be done in fp32` (`validate_args`)."""
    assert core_job(release).precision.gradients == "fp32"


@pytest.mark.parametrize(
    ("release", "line", "sentence"),
    [
        ("0.8.0", "", "Transformer Engine: memory as of core 0.12 is assumed, which may be more or less than in Megatron-LM core"),
        ("0.8.0", "--num-experts 8 --disable-bias-linear", "Transformer Engine and experts: memory as of core 0.12"),
        ("0.5.0", "", None),
        ("0.12.3", "", None),
        ("2023", "", None),
    ],
)  # fmt: skip
def test_what_is_computed_as_for_a_later_release_is_an_assumption(release: str, line: str, sentence: str | None) -> None:
    found = [each for each in job_of(line, base=BASE, release=release).assumptions if "memory as of core 0.12" in each]
    assert [each[: len(sentence or "")] for each in found] == ([sentence] if sentence else [])


@pytest.mark.parametrize(("release", "widths"), [("0.14.0", 3), ("0.15.3", 4)])
def test_the_linear_half_has_an_offset_since_core_0_15(release: str, widths: int) -> None:
    """`glu` of core/transformer/mlp.py; 0.14.0: `activation_func(x[0]) * x[1]`, which saves fc1's output of 2·f and the activated
    gate of f. 0.15.3: `activation_func(x_glu) * (x_linear + glu_linear_offset)`, which also saves the sum.
    """
    job = job_of("--swiglu --no-bias-swiglu-fusion --disable-bias-linear --ffn-hidden-size 4096", release=release)
    [tree] = stage_models(job)[0].trees
    activations = [module for _, module in tree.walk() if module.kind is ModuleKind.ACTIVATION]
    assert {total_bytes(module.saved) for module in activations} == {widths * 2 * 2048 * 4096}
