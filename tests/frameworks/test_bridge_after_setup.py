"""Containers as Megatron-Bridge writes them after its setup (`runtime_config_update`, training/config.py, August 2026).

`TransformerConfig.__post_init__` of megatron-core has then replaced old names of fields and values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import analyzer
from analyzer.errors import InputError
from tests.frameworks.files import job, read, write
from tests.frameworks.test_bridge import CONFIG, WORLD

CORE_0_19 = "model.mtp_detach_heads=false"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"config.yaml": CONFIG})
    return tmp_path


LINEAR = "model.linear_attention_freq=4", "model.linear_conv_kernel_dim=4", "model.pipeline_model_parallel_size=1"
ONE_STAGE = "model.virtual_pipeline_model_parallel_size=null"


def test_linear_attention_has_its_new_name(folder: Path) -> None:
    """`experimental_attention_variant` is gdn in core 0.20, where gated_delta_net is an alias."""
    jobs = [
        job(folder, "config.yaml", f"model.experimental_attention_variant={name}", *LINEAR, ONE_STAGE, CORE_0_19, *WORLD)
        for name in ("gdn", "gated_delta_net")
    ]
    assert jobs[0] == jobs[1]
    assert jobs[0].model.linear_attention is not None


def test_the_old_switch_of_graphs_stands_beside_their_implementation(folder: Path) -> None:
    """`external_cuda_graph` sets `cuda_graph_impl`, and stays set."""
    graphs = "model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=[attn]"
    both = job(folder, "config.yaml", *graphs, "model.external_cuda_graph=true", CORE_0_19, *WORLD)
    assert both.graphs == job(folder, "config.yaml", *graphs, CORE_0_19, *WORLD).graphs
    assert both.graphs is not None


def test_a_layout_without_its_layers_is_named(folder: Path) -> None:
    """`PipelineParallelLayerLayout` has no attributes in YAML."""
    layout = "model.pipeline_model_parallel_layout={_target_: x.PipelineParallelLayerLayout, _call_: true}"
    with pytest.raises(InputError, match=r"model\.pipeline_model_parallel_layout: is an object without its layers"):
        job(folder, "config.yaml", layout, *WORLD)
    stages = "|".join(["Etttt", *["tttt"] * 6, "ttttL"])
    given = job(folder, "config.yaml", layout.replace("_call_: true", f"input_data: '{stages}'"), *WORLD)
    assert (
        given.parallel.pipeline_layout
        == job(folder, "config.yaml", f"model.pipeline_model_parallel_layout='{stages}'", *WORLD).parallel.pipeline_layout
    )


def test_overlap_depends_on_the_data_parallel_size(folder: Path) -> None:
    """`CommOverlapConfig.setup` overlaps gradients with more than one replica. The setup writes their number into comm_overlap."""
    assumed = "comm_overlap: data parallelism is assumed, with overlapped gradients and parameters, unless it turns them off."
    config = f"{folder}/config.yaml"
    unknown = analyzer.analyze([config], environ={})
    assert assumed in unknown.unknown
    assert unknown.job.optimizer.overlap_grad_reduce
    for words in (["comm_overlap.data_parallel_size=1"], ["--info-world-size", "4"], ["--info-world-size=4"]):
        report = analyzer.analyze([config, *words], environ={})
        assert assumed not in report.unknown
        assert not report.job.optimizer.overlap_grad_reduce
        assert report.job.optimizer.ddp_bucket_size is None
    more = analyzer.analyze([config, "--info-world-size", "8"], environ={}).job.optimizer
    assert (more.overlap_grad_reduce, more.ddp_bucket_size) == (True, 128 * 1024 * 1024)
    plain = "ddp.use_distributed_optimizer=false", "optimizer.use_distributed_optimizer=false"
    adam = "optimizer.use_precision_aware_optimizer=false", "ddp.overlap_grad_reduce=false"
    assert not job(folder, "config.yaml", *plain, *adam, "--info-world-size", "8").optimizer.overlap_grad_reduce
    assert not analyzer.analyze([config], environ={"WORLD_SIZE": "4", "RANK": "0"}).job.optimizer.overlap_grad_reduce
    tree = yaml.safe_load(CONFIG)
    assert not analyzer.analyze_config(tree, gpus=4, environ={}).job.optimizer.overlap_grad_reduce


@pytest.mark.parametrize("connections", ["1", "32"])
def test_connections_are_not_checked(folder: Path, connections: str) -> None:
    """`validate_args` of Megatron-LM requires 1 with tensor parallelism on Hopper; Megatron-Bridge does not call it."""
    found = job(folder, "config.yaml", f"+env_vars.CUDA_DEVICE_MAX_CONNECTIONS={connections}", "--info-gpu", "H100-80GB", *WORLD)
    assert found.flags.cuda_device_max_connections == connections


def test_muon_has_no_layout_of_buffers(folder: Path) -> None:
    """The model is wrapped without `param_layout`. Weights in FP8 have an allocation each; those in MXFP8 cannot be flattened."""
    muon = "optimizer.optimizer=dist_muon", "optimizer.use_distributed_optimizer=false", "ddp.use_distributed_optimizer=false"
    plain = "optimizer.use_precision_aware_optimizer=false", "comm_overlap=null", CORE_0_19
    found = job(folder, "config.yaml", *muon, *plain, *WORLD)
    assert found.optimizer.muon is not None
    assert (found.optimizer.muon.layer_wise, found.optimizer.muon.aligned) == (True, False)
    precision = "mixed_precision=bf16-with-fp8-current-scaling-mixed"
    in_fp8 = read(folder, "config.yaml", *muon, *plain, precision, "--info-gpu", "H100-80GB", *WORLD).job
    assert in_fp8.precision.fp8 is not None
    assert in_fp8.precision.fp8.stored_parameters
    assert not in_fp8.withheld
    in_blocks = read(
        folder, "config.yaml", *muon, *plain, "mixed_precision=bf16-with-mxfp8-mixed", "--info-gpu", "B200", *WORLD
    ).job
    assert any("model.fp8_param with dist_muon" in why for why in in_blocks.withheld)
    of_layers = ("model.fp8_param=false", "mixed_precision=bf16_mixed", "model.fp8=hybrid", "model.fp8_recipe=tensorwise")
    of_buffers = ("ddp.fp8_param_gather=true", "--info-gpu", "H100-80GB")
    gathered = read(folder, "config.yaml", *muon, *plain, *of_layers, *of_buffers, *WORLD).job
    assert any("ddp.fp8_param_gather" in why for why in gathered.withheld)


def test_a_router_type_that_means_none(folder: Path) -> None:
    """`TopKRouter.routing` raises logits for fp32 and fp64; performance recipes of DeepSeek-V3 give bf16."""
    experts = "model.num_moe_experts=8", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=1024"
    found = job(folder, "config.yaml", *experts, "model.moe_router_dtype=bf16", *WORLD)
    assert found.model.moe is not None
    assert found.model.moe.router_dtype is None


@pytest.mark.parametrize(("more", "release"), [("", "0.16.1"), (CORE_0_19, "0.19.0")])
def test_the_vocabulary_has_its_size(folder: Path, more: str, release: str) -> None:
    """NullTokenizer adds a token up to core 0.17, and model.vocab_size is the number of all."""
    report = analyzer.analyze([f"{folder}/config.yaml", *([more] if more else []), *WORLD], environ={})
    assert report.job.megatron == release
    assert report.job.model.vocab_size == 128256
