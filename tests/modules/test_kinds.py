"""The facts of each kind of module agree with the trees of launches in which all kinds occur.

The layouts are those that the shadow engine compares with megatron-core, so that their modules, tensors and collectives are real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import cache
from pathlib import Path

import pytest

from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.memory.workspaces import workspaces
from analyzer.modules.kinds import Gemms, Kernels, ModuleKind, Parallel
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module, Parameter
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.specs.attention import PluginLayers
from analyzer.specs.vision_part import VisionWeight
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Gemm
from analyzer.time.work.of_module import formula, work_of
from tests.allocator_hook.shadow.adapter_layouts import adapter_fields
from tests.allocator_hook.shadow.distillation_layouts import DISTILLATIONS
from tests.allocator_hook.shadow.head_layouts import HEAD_OUTPUTS, TOKEN_SCORES, VALUE_HEADS
from tests.allocator_hook.shadow.test_formulas_against_shadow import SINCE, words_of
from tests.job_of import job_of

LAYOUTS = (
    "qwen3-next, mtp",
    "vision, local",
    "hybrid, latent experts",
    "deepseek, attention recomputed",
    "lora, dropout",
    "lora, engine",
    "lora, gathered again, tp2 sp",
    "lora, each expert",
    "lora, canonical, all layers",
    "lora, dora, all layers",
    "bert, full recompute",
    "t5, fp32",
    "multimodal, radio",
    "multimodal, internvit, tiles with tags, tp8",
    "multimodal, radio-g",
    "heterogeneous layers",
    "overlapped microbatches, delayed weight gradients, cp2 pp2",
    "sparse attention",
    "absorbed attention, cudnn, shared keys",
    "head, reward, adapters",
    "head, embedding",
    "head, reranker",
    "student, both",
    "head, value",
)
"""Together they have modules of every kind."""
DEEPSEEK_V4 = "--info-model deepseek-ai/DeepSeek-V4-Flash --nproc-per-node 8 --mtp-num-layers 1 --info-megatron 0.19.0"
SPLIT = (
    "hybrid, tp2 sp",
    "hybrid, experts, tp2 sp",
    "delta net in all layers, tp2 sp",
    "gpt, tp2 sp",
    "mixtral, imbalanced, tp2 sp",
)


GROUPED = (ModuleKind.ADAPTER_EXPERTS_IN, ModuleKind.ADAPTER_EXPERTS_OUT)
"""Kinds of PyTorch's grouped GEMM, a kernel of CUTLASS, which uses no handle of cuBLAS (`aten/src/ATen/native/cuda/GroupMM.cu`)."""


@cache
def job_of_layout(name: str) -> TrainingJob:
    """The job of a layout of the shadow engine."""
    release = ("--info-megatron", SINCE[name]) if SINCE.get(name, "0.16") not in ("0.15", "0.16") else ()
    job = job_of_words([*words_of(name), *release])
    job = replace(job, model=replace(job.model, head_outputs=HEAD_OUTPUTS.get(name), distillation=DISTILLATIONS.get(name)))
    job = replace(job, model=replace(job.model, token_score=name in TOKEN_SCORES, value_head=name in VALUE_HEADS))
    if job.model.adapters is None:
        return job
    return replace(job, model=replace(job.model, adapters=replace(job.model.adapters, **adapter_fields(name))))


def job_of_words(words: Sequence[str]) -> TrainingJob:
    """The job of a launch."""
    arguments, world, options = parse(words, environ={}, folder=Path("/nowhere"))
    gpu, _ = hardware(options.gpu, None)
    return build(arguments, world, environ={}, gpu=gpu, folder=Path("/nowhere"))


def modules_of(job: TrainingJob) -> Iterator[Module]:
    """Every module of the model."""
    for stage in stage_models(job):
        for tree in stage.trees:
            yield from (module for _, module in tree.walk())


def test_the_layouts_have_modules_of_every_kind() -> None:
    found = {module.kind for name in LAYOUTS for module in modules_of(job_of_layout(name))}
    images = VisionWeight(name="weight", shape=(8, 8))
    job = job_of_layout("lora, engine")
    found |= {module.kind for module in modules_of(replace(job, model=replace(job.model, vision_weights=(images,))))}
    plugin = PluginLayers(plugin="", described="", layers=(True,) * 99, weights=(("w", (8,)),), replaces=True, summed=False)
    found |= {module.kind for module in modules_of(replace(job, model=replace(job.model, plugin=plugin)))}
    found |= {module.kind for module in modules_of(job_of_words(DEEPSEEK_V4.split()))}
    assert found == set(ModuleKind)


def test_every_kind_of_kernels_has_a_formula() -> None:
    assert all(callable(formula(kernels)) for kernels in Kernels)
    assert {kind.facts.kernels for kind in ModuleKind} == set(Kernels)


def test_a_kind_without_facts_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="POOLING has no facts"):

        class Kinds(Enum):
            __init__ = ModuleKind.__init__
            POOLING = auto()


def test_a_module_with_parameters_and_without_kernels_is_an_error_that_names_it() -> None:
    module = Module(name="pooling", kind=ModuleKind.OTHER, parameters=(Parameter(name="weight", shape=(8, 8), dtype="bf16"),))
    with pytest.raises(ValueError, match=r"pooling.*OTHER"):
        work_of(module, work_context(job_of("")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_modules_with_matrices_run_gemms_of_a_library(name: str) -> None:
    """A weight of two dimensions is multiplied, except in embeddings, tables of positions and convolutions."""
    job = job_of_layout(name)
    tables = {Kernels.EMBEDDING, Kernels.COPIES}
    for module in modules_of(job):
        matrix = any(each.name == "weight" and len(each.shape) == 2 for each in module.parameters)
        if module.children or not matrix or module.kind.facts.kernels in tables:
            continue
        assert module.kind.facts.gemms is not Gemms.NONE, module.name
        assert any(isinstance(kernel, Gemm) for kernel in work_of(module, work_context(job)).forward), module.name


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_gemm_has_the_workspace_of_its_library(name: str) -> None:
    """The first GEMM of a library allocates its workspace, so a kind that runs GEMMs is among those that allocate one."""
    job = job_of_layout(name)
    for stage in stage_models(job):
        allocating = {
            kind for each in workspaces(job, stage.trees) if "GEMM" in each.name or "cuBLAS" in each.name for kind in each.kinds
        }
        for tree in stage.trees:
            for _, module in tree.walk():
                work = () if module.children else work_of(module, work_context(job)).forward
                if module.kind not in GROUPED and any(isinstance(kernel, Gemm) for kernel in work):
                    assert module.kind in allocating, module.name


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_that_accumulate_get_no_gradient_of_their_own(name: str) -> None:
    """With fused accumulation and cached dummies, autograd gets a gradient only from products of PyTorch (`weight_gradient`)."""
    job = job_of_layout(name)
    if not job.flags.gradient_accumulation_fusion or job.flags.overlap_moe_expert_parallel_comm:
        pytest.skip("gradients are not accumulated in the GEMM of each layer")
    accumulating = {Gemms.LAYER, Gemms.TRANSFORMER_ENGINE, Gemms.MEGATRON}
    cached = shapes_of(job).inputs.cached_dummies
    assert cached.layers
    for module in modules_of(job):
        own = {"weight gradient"} & {tensor.name for tensor in module.backward_workspace}
        if module.kind.facts.gemms in accumulating and module.part != "vision":
            assert not own, module.name
        if module.kind.facts.gemms is Gemms.PYTORCH and any(each.name == "weight" for each in module.parameters):
            assert own, module.name


@pytest.mark.parametrize("name", SPLIT)
def test_split_layers_exchange_what_their_split_requires(name: str) -> None:
    """Under sequence parallelism a column-parallel layer gathers its input and scatters its gradient; a row-parallel one scatters
    its output and gathers its gradient (Korthikanti et al. 2022, figure 5)."""
    column = {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")}
    row = {("reduce_scatter", "forward"), ("all_gather", "backward")}
    found = set()
    for module in modules_of(job_of_layout(name)):
        calls = {(call.kind, call.phase) for call in module.collectives if call.group == "tp"}
        if not module.children and module.kind.facts.gemms is Gemms.LAYER and calls in (column, row):
            assert module.kind.facts.parallel is (Parallel.COLUMN if calls == column else Parallel.ROW), module.name
            found.add(module.kind.facts.parallel)
    assert found == {Parallel.COLUMN, Parallel.ROW}
