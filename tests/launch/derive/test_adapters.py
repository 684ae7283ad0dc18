"""Adapters: their parameters, and what they and frozen weights keep in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.launch.derive.adapters import adapter_spec
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, total_bytes
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.specs.adapters import DEFAULT_TARGETS, AdapterLayers, AdapterSpec
from analyzer.specs.fine_tuning import Adapter
from tests.job_of import job_of

LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 128255"
)
WEIGHTS = 8_030_261_248
"""Parameters of Llama 3.1 8B."""


def launched(line: str, gpus: int = 8) -> Report:
    words = f"--nproc-per-node {gpus} pretrain_gpt.py {LLAMA_8B} --info-gpu H100-80GB {line}"
    return analyze([*words.split(), "--global-batch-size", "8"])


def test_parameters_of_adapters() -> None:
    """Each has r·(k + n) of them, by hand for a layer of k inputs and n outputs."""
    r, h, f = 16, 4096, 14336
    layer = r * ((h + 6144) + (h + h) + (h + 2 * f) + (f + h))
    report = launched(f"--info-lora {r}", gpus=1)
    assert (report.parameters, report.parameters_adapters) == (WEIGHTS, 32 * layer)
    rank = report.ranks[0]
    assert rank.parameters == WEIGHTS + 32 * layer
    assert rank.memory.parameters_bytes == 2 * rank.parameters
    assert rank.memory.gradients_bytes == 4 * 32 * layer
    assert rank.memory.optimizer_bytes == 12 * 32 * layer


def test_a_named_layer_has_an_adapter() -> None:
    rank = launched("--info-lora 8:linear_proj", gpus=1).ranks[0]
    assert rank.parameters == WEIGHTS + 32 * 8 * (4096 + 4096)


@pytest.mark.parametrize(
    ("scope", "targets", "modelled"),
    [
        ("mlp", "linear_qkv", True),
        ("attn", "linear_fc1,linear_fc2", True),
        ("attn mlp", "linear_qkv", False),
        ("attn", "linear_proj", False),
        ("mlp", "linear_fc2", False),
    ],
)
def test_graphs_of_layers_without_adapters(scope: str, targets: str, modelled: bool) -> None:
    """Graphs capture frozen layers as they are; those of adapters have workspaces of their own, which are not counted."""
    line = f"--info-lora 16:{targets} --cuda-graph-impl transformer_engine --cuda-graph-scope {scope}"
    assert (launched(line).job.withheld == ()) == modelled
    assert launched(line.replace("transformer_engine", "local").replace(f"--cuda-graph-scope {scope}", "")).job.withheld != ()


def _added(line: str) -> int:
    """Parameters of adapters on one GPU, in 2 layers with 2,048 elements, a rank of 4."""
    base = (
        "--num-layers 2 --hidden-size 2048 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
        "--max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --bf16 --tokenizer-type NullTokenizer --vocab-size 999 --info-gpu H100-80GB"
    )
    return analyze([*f"--nproc-per-node 1 pretrain_gpt.py {base} {line}".split()]).parameters_adapters


MLA = "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
"""Moonlight-16B-A3B without the compression of queries, DeepSeek-V2 with a smaller one."""


def test_parameters_beside_latent_attention() -> None:
    """By hand, r·(k + n) for each layer: 16 heads with 192 elements of queries, 128 of keys and 128 of values."""
    keys = (2048 + 512 + 64) + (512 + 16 * 256) + (2048 + 16 * 128)
    line = "--info-lora 4:linear_kv_down_proj,linear_kv_up_proj,linear_proj"
    assert _added(f"{MLA} {line},linear_q_proj") == 2 * 4 * (2048 + 16 * 192 + keys)
    compressed = (2048 + 256) + (256 + 16 * 192)
    assert _added(f"{MLA} --q-lora-rank 256 {line},linear_q_down_proj,linear_q_up_proj") == 2 * 4 * (compressed + keys)


def test_parameters_beside_linear_attention_and_mtp() -> None:
    """Qwen3-Next: 16 key heads and 32 value heads of 128 elements, and two numbers for each value head; one MTP depth."""
    line = (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 16 "
        "--linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 --info-lora 4:in_proj,out_proj"
    )
    projected = 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32
    assert _added(line) == 4 * ((2048 + projected) + (32 * 128 + 2048))  # one of both layers has linear attention
    assert _added("--mtp-num-layers 1 --info-lora 4:eh_proj,linear_fc2") == 4 * (3 * (4096 + 2048) + (2 * 2048 + 2048))


def test_a_name_without_a_layer_has_no_effect_beside_others() -> None:
    assert _added("--info-lora 4:linear_proj,in_proj") == 2 * 4 * (2048 + 2048)
    assert "adapters, which are not modelled for the modules in_proj" in launched("--info-lora 8:in_proj").job.withheld[0]


@pytest.mark.parametrize(("layers", "parts"), [("megatron", 1), ("transformer_engine", 2)])
def test_adapters_keep_the_output_of_norms(layers: AdapterLayers, parts: int) -> None:
    """Qwen3-8B with sequence parallelism: 2 bytes · tokens · hidden for each column-parallel layer of 36 layers: 4.83 GB.

    Those of ms-swift keep the part of the sequence on their rank.
    """
    qwen = LLAMA_8B.replace("--num-layers 32", "--num-layers 36").replace("--ffn-hidden-size 14336", "--ffn-hidden-size 12288")
    line = f"{qwen} --kv-channels 128 --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel"
    job = job_of(line, base="")
    adapters = AdapterSpec(rank=8, targets=("linear_qkv", "linear_fc1"), layers=layers)
    tree = predict(replace(job, model=replace(job.model, adapters=adapters))).ranks[0].trees[0]
    kept = [module for _, module in tree.walk() if module.kind in (ModuleKind.ADAPTER_IN, ModuleKind.ADAPTER_ENGINE_IN)]
    assert sum(total_bytes(module.saved) for module in kept) == 36 * 2 * 2 * 8192 * 4096 // parts


_SP = "--tensor-model-parallel-size 2 --sequence-parallel"


def _chunk(line: str, *, regathers: bool) -> Module:
    """The modules of Llama 3.1 8B with adapters of Megatron-Bridge."""
    job = job_of(f"{LLAMA_8B} {line}", base="")
    adapters = AdapterSpec(rank=8, targets=DEFAULT_TARGETS, regathers=regathers)
    return predict(replace(job, model=replace(job.model, adapters=adapters))).ranks[0].trees[0]


def test_inputs_that_are_gathered_again_are_not_kept() -> None:
    """`sequence_parallel_input_regather`: the layer and its adapter save one tensor, the part of the norm's output on this rank.

    The frozen first layer, whose input needs no gradient, does not save it.
    """
    gathered = 2 * 8192 * 4096
    kept, again = (_chunk(_SP, regathers=each) for each in (False, True))
    assert kept.retained_bytes - again.retained_bytes == 32 * 2 * gathered - gathered // 2


def test_the_buffer_of_gathered_inputs_stays_allocated() -> None:
    """`LinearWithGradAccumulationAndAsyncCommunication` gathers in the global buffer "mpu"."""
    ranks = [launched(f"{_SP} --info-lora 8 {flag}").ranks[0] for flag in ("", "--info-lora-regather")]
    kept, again = ({part.name: part.bytes for part in rank.memory.runtime_parts} for rank in ranks)
    name = "Megatron's global memory buffer"
    assert (kept.get(name), again.get(name)) == (None, 2 * 8192 * 4096)


def test_projections_that_gather_again_have_two_more_messages() -> None:
    """The layer gathers for its own GEMM in both cases; the first projection before it is split, and in the backward."""
    found = [module for _, module in _chunk(_SP, regathers=True).walk() if module.kind is ModuleKind.ADAPTER_REGATHERED_IN]
    assert len(found) == 64
    calls = [("all_gather", "forward", 4096), ("all_gather", "forward", 8), ("all_gather", "backward", 4096)]
    for module in found:
        assert [(each.kind, each.phase, each.shape[-1]) for each in module.collectives] == [
            *calls,
            ("reduce_scatter", "backward", 4096),
        ]


@pytest.mark.parametrize(
    ("line", "number"),
    [
        (f"{_SP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 0),
        (f"{_SP} --recompute-granularity selective --recompute-modules mlp", 32),
        (f"{_SP} --recompute-granularity selective --recompute-modules core_attn", 64),
    ],
)
def test_some_recomputation_keeps_the_usual_path(line: str, number: int) -> None:
    """`ParallelLinearAdapter._sequence_parallel_input_regather_eligibility`."""
    kinds = [module.kind for _, module in _chunk(line, regathers=True).walk()]
    assert kinds.count(ModuleKind.ADAPTER_REGATHERED_IN) == number


@pytest.mark.parametrize("line", ["", "--tensor-model-parallel-size 2"])
def test_nothing_is_gathered_again_without_sequence_parallelism(line: str) -> None:
    assert _chunk(line, regathers=True) == _chunk(line, regathers=False)


def test_the_option_needs_adapters() -> None:
    with pytest.raises(InputError, match="--info-lora-regather: is only used with --info-lora"):
        launched("--info-lora-regather")


def test_each_rank_has_whole_projections_of_ms_swift() -> None:
    """The first of linear_qkv and the second of linear_proj, by hand for 32 layers on two tensor-parallel ranks."""
    job = job_of(f"{LLAMA_8B} --tensor-model-parallel-size 2", base="")
    adapters = AdapterSpec(rank=8, targets=("linear_qkv", "linear_proj"), layers="transformer_engine")
    report = predict(replace(job, model=replace(job.model, adapters=adapters)))
    without = predict(job).ranks[0].parameters
    assert report.ranks[0].parameters - without == 32 * 8 * ((4096 + 6144 // 2) + (4096 // 2 + 4096))
    assert report.parameters_adapters == 32 * 8 * (4096 + 6144 + 4096 + 4096)


def test_a_rank_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be split over 8"):
        launched("--info-lora 12 --tensor-model-parallel-size 8")


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(InputError, match="'lm_head' is no linear layer that can have an adapter"):
        launched("--info-lora 8:linear_proj,lm_head")


@pytest.mark.parametrize(
    "line",
    [
        "--info-lora 8 --fp8-format hybrid --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--info-lora 8 --optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 0.5",
        "--info-lora 8 --fine-grained-activation-offloading --offload-modules qkv_linear",
        "--info-lora 8 --transformer-impl local",
    ],
)
def test_there_is_no_verdict_with_adapters_that_are_not_modelled(line: str) -> None:
    report = launched(line)
    assert report.verdict.fits is None
    assert any("adapters, which are not modelled" in each for each in report.job.withheld)


def test_latent_attention_has_adapters_of_all_projections_or_none() -> None:
    words = LLAMA_8B.replace("--group-query-attention --num-query-groups 8", MLA)
    report = analyze([*f"--nproc-per-node 8 pretrain_gpt.py {words} --info-lora 8:linear_kv_up_proj --info-gpu H100-80GB".split()])
    assert "for some of the projections of multi-latent attention only" in report.job.withheld[0]


def test_frozen_weights_in_fp8_have_a_16_bit_input_beside_them() -> None:
    """By hand for each layer: the adapter of qkv saves the 16-bit output of the norm, and the frozen layer an FP8 copy of it."""
    job = job_of(f"{LLAMA_8B} --fp8-format hybrid", base="")
    spec = AdapterSpec(rank=16, targets=("linear_qkv",))
    tree = predict(replace(job, model=replace(job.model, adapters=spec))).ranks[0].trees[0]
    last = tree.children[-3].children[-2]
    (qkv,) = (module for _, module in last.walk() if module.kind is ModuleKind.QKV)
    (adapter,) = (module for _, module in last.walk() if module.kind is ModuleKind.ADAPTER_IN)
    assert total_bytes(adapter.saved) == 2 * 8192 * 4096
    assert sum(each.bytes for each in qkv.saved if "in fp8" in each.name and "scales" not in each.name) == 8192 * 4096


def test_frozen_weights_are_stored_in_fp8() -> None:
    """By hand for one GPU: a byte for each element along rows and along columns, one scale of a weight in a block of 512 bytes."""
    lines = (f"--info-lora 16 --fp8-format hybrid --fp8-recipe delayed {line}" for line in ("", "--fp8-param-gather"))
    in_16_bit, stored = (launched(line, gpus=1).ranks[0].memory for line in lines)
    weights = 32 * (4096 * (6144 + 4096) + 4096 * (28672 + 14336))
    assert in_16_bit.parameters_bytes == 2 * (WEIGHTS + 32 * 16 * (10240 + 8192 + 32768 + 18432))
    assert stored.parameters_bytes == in_16_bit.parameters_bytes + 32 * 4 * 512
    assert in_16_bit.gradients_bytes == stored.gradients_bytes
    assert in_16_bit.runtime_bytes - stored.runtime_bytes >= 2 * weights  # the copies of weights in FP8, which are cast once


def test_a_frozen_model_needs_less_time() -> None:
    room = "--info-gpu-memory 200GiB"  # a launch that does not fit gets advice, which takes longer
    trained, adapted = launched(room).time, launched(f"--info-lora 8 {room}").time
    assert trained is not None
    assert adapted is not None
    assert adapted.iteration_seconds < trained.iteration_seconds


# adapters of each expert, as in Megatron-Bridge

EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 "
    "--expert-model-parallel-size 4 --swiglu --disable-bias-linear"
)


def _of_each_expert(rank: int = 8) -> TrainingJob:
    job = job_of(f"{EXPERTS} --global-batch-size 8")
    adapter = Adapter(kind="lora", rank=rank, share_expert_adapters=False)
    spec, reason = adapter_spec(adapter, job)
    return replace(job, model=replace(job.model, adapters=spec), withheld=(reason,) if reason else ())


def _adapter_of_fc1(job: TrainingJob) -> dict[str, Module]:
    trees = (tree for stage in stage_models(job) for tree in stage.trees)
    found = (module for tree in trees for _, module in tree.walk() if module.name == "linear_fc1.adapter")
    return {child.name: child for child in [*found][-1].children}


def test_experts_of_bridge_save_a_copy_of_their_rows_and_of_the_weights_of_their_adapters() -> None:
    """`GroupedExpertLinearAdapter`: 2048 tokens of 1024 in 2 experts each; 2 experts on a rank, with 2·512 outputs of fc1."""
    parts = _adapter_of_fc1(_of_each_expert())
    rows = 2 * 2048
    assert [each.shape for each in parts["linear_in"].saved] == [(rows, 1024), (2, 8, 1024)]
    assert [each.shape for each in parts["linear_out"].saved] == [(rows, 8), (2, 1024, 8)]
    assert [each.shape for each in parts["rows"].backward_workspace] == [(rows, 1024)] * 3
    (weight,) = parts["linear_out"].parameters
    assert (weight.pieces, weight.sharding) == (1, "expert")


def test_adapters_of_experts_that_pytorch_does_not_multiply_in_groups_have_no_verdict() -> None:
    """`_can_use_grouped_mm`: bf16, and all sizes are multiples of 8."""
    assert _of_each_expert().withheld == ()
    (reason,) = _of_each_expert(rank=12).withheld
    assert "of each expert without grouped GEMMs of PyTorch" in reason
