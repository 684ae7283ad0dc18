"""The options of a layout: what to add to a launch, to change in it and to leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.model.hybrid import Pattern, pattern_dest, read_pattern
from analyzer.launch.derive.reading import since
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.specs import ParallelSpec, PipelineSpec
from analyzer.specs.option_names import flag_of
from analyzer.specs.stage_sizes import layers_of_stages

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.layout_search.problem import Changes

OF_STAGES: Final = (
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
)
OF_RECOMPUTE: Final = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "moe_layer_recompute",
    "distribute_saved_activations",
)
_NEED_VIRTUAL: Final = ("overlap_p2p_comm_warmup_flush", "overlap_param_gather_with_optimizer_step")
_OVERLAPPED: Final = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


def changes_of(layout: Layout, setting: Changes, arguments: Arguments, *, layers: int) -> dict[str, object]:
    """The options that differ between a launch and a layout of it, with their new values. `setting`: further options to change.

    Options that a layout excludes, such as `--tp-comm-overlap` without tensor parallelism, are left out.
    """
    wanted = {
        **_of_split(layout.split, arguments),
        **_of_stages(layout.stages, arguments, layers=layers),
        **_of_recompute(layout.recompute),
        **_excluded(layout),
        **setting,
    }
    changed = {dest: value for dest, value in wanted.items() if not _equal(arguments.get(dest), value)}
    return {dest: value for dest, value in changed.items() if value is not None or dest in arguments.given}


def _equal(given: object, wanted: object) -> bool:
    """Whether an option has a value already. An option that is not set equals a flag that is off."""
    if isinstance(given, tuple) or isinstance(wanted, tuple):
        return tuple(given or ()) == tuple(wanted or ())  # type: ignore[arg-type]
    return given == wanted or (not given and not wanted)


def _of_split(split: Split, arguments: Arguments) -> dict[str, object]:
    implied = split.expert_tensor == split.tensor and "expert_tensor_parallel_size" not in arguments.given
    found: dict[str, object] = {
        "context_parallel_size": split.context,
        "expert_model_parallel_size": split.expert,
        "tensor_model_parallel_size": split.tensor,
        "micro_batch_size": split.micro_batch,
    }
    for dest in ("context_parallel_size", "expert_model_parallel_size", "tensor_model_parallel_size"):
        if arguments.get(dest) is None and found[dest] == 1:
            del found[dest]
    if "expert_tensor_parallel_size" in arguments.values and not implied:
        found["expert_tensor_parallel_size"] = split.expert_tensor
    if split.tensor > 1:
        found["sequence_parallel"] = split.sequence
    if split.context != (arguments.get("context_parallel_size") or 1):
        found["hierarchical_context_parallel_sizes"] = None
    return found


def _of_stages(stages: Stages, arguments: Arguments, *, layers: int) -> dict[str, object]:
    if stages.given:
        return {}
    found: dict[str, object] = dict.fromkeys(OF_STAGES)
    found |= {
        "pipeline_model_parallel_size": stages.pipeline,
        "decoder_first_pipeline_num_layers": stages.first,
        "decoder_last_pipeline_num_layers": stages.last,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    if stages.pipeline == 1 and arguments.get("pipeline_model_parallel_size") is None:
        del found["pipeline_model_parallel_size"]
    pattern = staged_pattern(stages, arguments)
    if pattern is not None:
        found |= {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}
        return {**found, pattern_dest(arguments): pattern.written}
    if stages.virtual > 1 and "num_virtual_stages_per_pipeline_rank" in arguments.values:
        found["num_virtual_stages_per_pipeline_rank"] = stages.virtual
    elif stages.virtual > 1:
        found["num_layers_per_virtual_pipeline_stage"] = layers // (stages.pipeline * stages.virtual)
    return found


def staged_pattern(stages: Stages, arguments: Arguments) -> Pattern | None:
    """The pattern of a hybrid model with these stages, from core 0.17 on; None where no pattern marks stages."""
    given = read_pattern(arguments) if since(arguments, "0.17") else None
    if given is None or (stages.virtual == 1 and len(given.stages) == 1):
        return None
    split = PipelineSpec(num_layers_in_first=stages.first, num_layers_in_last=stages.last)
    virtual = stages.virtual if stages.virtual > 1 else None
    parallel = ParallelSpec(
        world_size=stages.pipeline,
        nodes=1,
        gpus_per_node=stages.pipeline,
        pipeline=stages.pipeline,
        virtual_pipeline=virtual,
        pipeline_layout=split,
    )
    return given.split(layers_of_stages(len(given.letters), parallel))


def _of_recompute(recompute: Recompute) -> dict[str, object]:
    if recompute.given:
        return {}
    found: dict[str, object] = dict.fromkeys(OF_RECOMPUTE)
    found |= {"recompute_activations": False, "moe_layer_recompute": False, "distribute_saved_activations": False}
    if recompute.granularity is not None:
        found["recompute_granularity"] = recompute.granularity
    if recompute.granularity == "full":
        found |= {"recompute_method": recompute.method, "recompute_num_layers": recompute.layers}
    elif recompute.granularity == "selective" and recompute.modules != ("core_attn",):
        found["recompute_modules"] = recompute.modules
    return found


def _excluded(layout: Layout) -> dict[str, object]:
    """Options that Megatron does not accept with a layout."""
    split, stages, recompute = layout.split, layout.stages, layout.recompute
    found: dict[str, object] = {}
    if split.tensor == 1:
        found["tp_comm_overlap"] = False
    if stages.virtual == 1:
        found |= dict.fromkeys(_NEED_VIRTUAL, False)
    if stages.pipeline == 1:
        found["defer_embedding_wgrad_compute"] = False
    if split.expert == 1 or (stages.pipeline > 1 and stages.virtual == 1) or recompute.granularity == "full":
        found |= dict.fromkeys(_OVERLAPPED, False)
    return found


def by_flag(changes: Changes, arguments: Arguments) -> dict[str, object]:
    """Changed options by their flag. A flag that is switched off is False, and an option that is left out is None."""
    found: dict[str, object] = {}
    for dest, value in changes.items():
        flag = (arguments.spelled.get(dest) if value is None or value is False else None) or flag_of(dest)
        found[flag] = list(value) if isinstance(value, tuple) else value
    return found


def as_text(options: dict[str, object]) -> str:
    """Changed options as words of a command line. Options to leave out come last, with a minus sign in front."""
    added = [_words(flag, value) for flag, value in options.items() if value is not None and value is not False]
    removed = [f"(without {flag})" for flag, value in options.items() if value is None or value is False]
    return " ".join((*added, *removed))


SHORT: Final = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--num-virtual-stages-per-pipeline-rank": "VPP",
    "--context-parallel-size": "CP",
    "--expert-model-parallel-size": "EP",
    "--expert-tensor-parallel-size": "ETP",
    "--micro-batch-size": "MBS",
    "--decoder-first-pipeline-num-layers": "first",
    "--decoder-last-pipeline-num-layers": "last",
}
"""Usual abbreviations of options, and the layers of the first and the last pipeline rank."""
OVERLAPS: Final = {
    "--overlap-grad-reduce": "gradients",
    "--overlap-param-gather": "parameters",
    "--tp-comm-overlap": "TP",
    "--overlap-moe-expert-parallel-comm": "EP",
}
"""Communication that overlaps with kernels."""
FUSIONS: Final = {"--cross-entropy-loss-fusion": "loss", "--moe-permute-fusion": "permutation"}
"""Fused kernels."""
PER_STAGE: Final = "--num-layers-per-virtual-pipeline-stage"
_RECOMPUTE: Final = tuple(map(flag_of, OF_RECOMPUTE))
_PATTERNS: Final = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


def as_short_text(options: dict[str, object]) -> str:
    """Changed options with the usual abbreviations: TP 2, PP 4, recompute mlp, overlap TP.

    Options to leave out have a "no" in front.
    """
    found = [f"{SHORT[flag]} {value}" for flag, value in options.items() if flag in SHORT and value is not None]
    recompute = {flag: value for flag, value in options.items() if flag in _RECOMPUTE}
    if recompute:
        found.append(_short_recompute(recompute))
    switched_on = {flag for flag in (*OVERLAPS, *FUSIONS) if options.get(flag) is True}
    for word, names in (("overlap", OVERLAPS), ("fuse", FUSIONS)):
        if not switched_on.isdisjoint(names):
            found.append(" ".join((word, *(name for flag, name in names.items() if flag in switched_on))))
    patterns = [str(options[flag]) for flag in _PATTERNS if options.get(flag) is not None]
    found += [
        f"{pattern.count('|') + 1} stages in the pattern" if "|" in pattern else "no stages in the pattern" for pattern in patterns
    ]
    rest = {flag: value for flag, value in options.items() if flag not in {*SHORT, *_PATTERNS, *recompute, *switched_on}}
    found += [_words(flag, value) for flag, value in rest.items() if value is not None and value is not False]
    implied = PER_STAGE if "--num-virtual-stages-per-pipeline-rank" in options else ""
    off = [flag for flag, value in options.items() if value is None or value is False]
    removed = [flag for flag in off if flag not in recompute and flag != implied]
    return ", ".join((*found, *(f"no {SHORT.get(flag, flag)}" for flag in removed)))


def _short_recompute(options: dict[str, object]) -> str:
    modules, layers = options.get("--recompute-modules"), options.get("--recompute-num-layers")
    if isinstance(modules, list):
        return f"recompute {' '.join(map(str, modules))}"
    if layers is not None:
        return f"recompute {options.get('--recompute-method') or ''} {layers}".replace("  ", " ")
    values = [str(value) for value in options.values() if value]
    return f"recompute {' '.join(values)}" if values else "no recompute"


def _words(flag: str, value: object) -> str:
    if value is True:
        return flag
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"
