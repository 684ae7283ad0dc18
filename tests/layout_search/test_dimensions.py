"""What a search changes: the options of its dimensions, never one that is kept, and those that a layout excludes."""

from __future__ import annotations

import pytest

from analyzer.api import problem_of, read_launch, search
from analyzer.errors import InputError
from analyzer.layout_search.dimensions import DIMENSIONS, Space, space_of
from analyzer.layout_search.overlaps import OVERLAPS
from analyzer.specs.option_names import flag_of
from tests.layout_search.every_layout import Every, layouts_of
from tests.layout_search.random_spaces import NOWHERE

STAGES = {
    *("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    *("microbatch_group_size_per_vp_stage", "defer_embedding_wgrad_compute", "overlap_p2p_comm_warmup_flush"),
    *("overlap_param_gather_with_optimizer_step",),
}
UNEVEN = {
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
}
PATTERN = {"hybrid_layer_pattern"}
"""It marks the stages of a hybrid model."""
OVERLAPPED = {"overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"}
CHANGED = {
    "tp": {"tensor_model_parallel_size", "sequence_parallel", "tp_comm_overlap"},
    "pp": STAGES | UNEVEN | PATTERN | OVERLAPPED,
    "vpp": STAGES | PATTERN | OVERLAPPED,
    "layers": STAGES | UNEVEN | PATTERN,
    "cp": {"context_parallel_size", "hierarchical_context_parallel_sizes"},
    "ep": {"expert_model_parallel_size"} | OVERLAPPED,
    "etp": {"expert_tensor_parallel_size"},
    "micro-batch": {"micro_batch_size"},
    "recompute": OVERLAPPED
    | {
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_activations"),
        *("moe_layer_recompute", "distribute_saved_activations"),
    },
    "optimizer": {"use_distributed_optimizer"},
    "overlap": set(OVERLAPS),
    "cp-comm": {"cp_comm_type"},
    "instances": {"num_distributed_optimizer_instances"},
    "fsdp": {"use_megatron_fsdp", "use_distributed_optimizer", "data_parallel_sharding_strategy"},
    "offload": {
        *("optimizer_cpu_offload", "use_precision_aware_optimizer", "use_distributed_optimizer"),
        *("fine_grained_activation_offloading", "offload_modules"),
    },
    "precision": {"fp8", "fp8_recipe"},
    "order": {"use_tp_pp_dp_mapping"},
}
"""The options that each dimension may change, with those that its layouts exclude."""
WORLD = {"global_batch_size"}
"""Named in a changed launch if the launch leaves it to its layout."""
LAUNCH = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --bf16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9984 "
    "--info-gpu H100-80GB --micro-batch-size 1 --global-batch-size 16 "
)


def test_only_searched_dimensions_change(every: Every) -> None:
    allowed = set().union(*(CHANGED[each] for each in every.case.over), WORLD)
    for each in every.layouts:
        assert each.changes.keys() <= allowed, each.changes


def test_kept_options_never_change(every: Every) -> None:
    kept = every.case.keep
    for each in every.layouts:
        assert not {flag_of(dest) for dest in each.changes} & set(kept)
        assert not each.evaluation.options.keys() & set(kept)


def space(line: str, *, over: tuple[str, ...] = (), keep: tuple[str, ...] = ()) -> Space:
    return space_of(problem_of(read_launch((LAUNCH + line).split(), environ={}, folder=NOWHERE)), over=over, keep=keep)


def test_every_dimension_is_known() -> None:
    assert set(CHANGED) == set(DIMENSIONS)


@pytest.mark.parametrize("keep", ["sequence-parallel", "--sequence-parallel"])
def test_sequence_parallelism_is_kept(keep: str) -> None:
    values = {split.sequence for split in space("", over=("tp",), keep=(keep,)).splits()}
    assert values == {False}
    assert {split.sequence for split in space("", over=("tp",)).splits() if split.tensor > 1} == {True}


def test_the_launch_without_sequence_parallelism_is_a_layout_of_its_own() -> None:
    splits = list(space("--tensor-model-parallel-size 2", over=("tp",)).splits())
    assert {(each.tensor, each.sequence) for each in splits} == {(1, False), (2, False), (2, True), (4, True), (8, True)}


def test_an_explicit_expert_tensor_size_stays() -> None:
    moe = "--num-experts 8 --disable-bias-linear --sequence-parallel --tensor-model-parallel-size 2 "
    explicit = space(moe + "--expert-tensor-parallel-size 2 --expert-model-parallel-size 2", over=("tp",)).splits()
    assert {(each.tensor, each.expert_tensor) for each in explicit} == {(1, 2), (2, 2), (4, 2), (8, 2)}
    implied = space(moe, over=("tp",)).splits()
    assert {(each.tensor, each.expert_tensor) for each in implied} == {(1, 1), (2, 2), (4, 4), (8, 8)}


def test_experts_without_expert_parallelism_are_split_as_other_weights() -> None:
    """Megatron would reduce their gradients over ranks with other parts of them. A launch that does so keeps its own sizes."""
    moe = "--num-experts 8 --disable-bias-linear --sequence-parallel --tensor-model-parallel-size 2 "
    found = list(space(moe, over=("tp", "ep", "etp")).splits())
    assert {each.expert_tensor == each.tensor for each in found if each.expert == 1} == {True}
    assert {(each.tensor, each.expert_tensor) for each in found if each.expert == 2} >= {(1, 2), (2, 1), (2, 2), (4, 1)}
    given = space(moe + "--expert-tensor-parallel-size 1", over=("tp",)).splits()
    assert {(each.tensor, each.expert_tensor) for each in given} == {(1, 1), (2, 1)}


def test_an_own_distribution_of_layers_stays_unless_layers_are_searched() -> None:
    line = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
    fixed = space(line, over=("pp",))
    assert {(each.pipeline, each.given) for each in fixed.stages(fixed.given.split)} == {(1, False), (2, True)}
    searched = space(line, over=("layers",))
    firsts = [(each.first, each.last) for each in searched.stages(searched.given.split) if not each.given]
    assert (None, None) in firsts
    assert (3, None) not in firsts  # that of the launch
    assert len(set(firsts)) == len(firsts)


def test_virtual_stages_layers_and_microbatches_are_all_listed() -> None:
    found = space("", over=("pp", "vpp", "micro-batch"))
    stages = {(each.pipeline, each.virtual) for split in found.splits() for each in found.stages(split)}
    assert stages == {(1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)}
    assert {split.micro_batch for split in found.splits()} == {1, 2, 4, 8}


def test_every_module_with_activations_is_recomputed() -> None:
    modules = {each.recompute.modules for each in layouts_of(space("--swiglu --disable-bias-linear", over=("recompute",)))}
    assert {("core_attn",), ("mlp",), ("core_attn", "mlp")} <= modules


@pytest.mark.parametrize(
    ("arguments", "option", "named"),
    [
        ({"over": ("tp", "speed")}, "--info-search-over", "speed"),
        ({"over": ("--tp",)}, "--info-search-over", "--tp"),
        ({"keep": ("tensor-size",)}, "--info-keep", "tensor-size"),
        ({"keep": ("--info-gpu",)}, "--info-keep", "--info-gpu"),
    ],
)
def test_unknown_dimensions_and_options_are_refused(arguments: dict[str, tuple[str, ...]], option: str, named: str) -> None:
    with pytest.raises(InputError) as raised:
        search(LAUNCH, environ={}, folder=NOWHERE, **arguments)  # type: ignore[arg-type]
    assert str(raised.value).startswith(option)
    assert named in str(raised.value)


def test_a_dimension_of_a_kept_option_is_not_searched() -> None:
    found = search(LAUNCH, environ={}, folder=NOWHERE, over=("tp", "micro-batch"), keep=("micro-batch-size",))
    assert {each.layout.split.micro_batch for each in found} == {1}
    assert len({each.layout.split.tensor for each in found}) > 1


@pytest.mark.parametrize(("release", "known"), [("0.12", False), ("0.13", True)])
def test_only_recipes_of_the_release_are_searched(release: str, known: bool) -> None:
    recipes = {setting.changes.get("fp8_recipe") for setting in space(f"--info-megatron {release}", over=("precision",)).settings}
    assert {"tensorwise", "delayed"} <= recipes
    assert ("blockwise" in recipes) == known
