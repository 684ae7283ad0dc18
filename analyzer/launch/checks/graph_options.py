"""Checks of CUDA graphs with recomputation and offloading (`TransformerConfig.__post_init__`, 0.16 to 0.19).

What a graph can contain is checked in `analyzer.launch.derive.cuda_graphs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import integer, since
from analyzer.specs.option_names import flag_of
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import GraphSpec, TrainingJob

_NAMED: Final = ("cuda_graph_impl",)
_EXPERT_PARTS: Final = frozenset({"expert_fc1", "moe_act"})
"""Offloaded parts that are outside Megatron's own graphs of parts of a layer."""


def graph_violations(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """The checks of CUDA graphs that a launch breaks."""
    graphs = job.graphs
    if graphs is None or not since(arguments, "0.16"):
        return
    if job.recompute.granularity == "selective":
        yield from _recomputed(arguments, job, graphs)
    if job.activation_offload is not None and job.activation_offload.modules and since(arguments, "0.18"):
        yield from _offloaded(arguments, job.activation_offload.modules, graphs)


def recomputed_modules(arguments: Arguments) -> frozenset[str]:
    """`--recompute-modules` as Megatron's config has it, with modules that the model does not have, and without a granularity."""
    value = arguments.get("recompute_modules")
    given = ("core_attn",) if value is None else value if isinstance(value, list | tuple) else (value,)
    more = ("moe",) if arguments.get("moe_layer_recompute") else ()
    return frozenset(map(str, (*given, *more)))


def _recomputed(arguments: Arguments, job: TrainingJob, graphs: GraphSpec) -> Iterator[Violation]:
    """A recomputed module of a graph must not use random numbers, nor contain a graph.

    Dropout that is only Megatron's default is not refused: recipes of frameworks that set it to 0 often do not write it.
    """
    modules, scope = recomputed_modules(arguments), graphs.scope
    named = ("recompute_modules",)
    if graphs.implementation == "transformer_engine" and "moe" in modules and "moe_router" in scope:
        yield Violation(named, "moe contains moe_router, which is captured in a CUDA graph", "leave moe out")
    for module, dest in recomputed_dropout(arguments, job):
        if dest in arguments.given:
            fault = f"{module} has dropout, and a CUDA graph cannot recompute it"
            yield Violation(named, fault, f"add {flag_of(dest)} 0, or --recompute-modules with other modules")
    if arguments.get("moe_input_jitter_eps") is not None and "moe" in modules and _captured(graphs, "moe"):
        yield Violation(named, "moe has --moe-input-jitter-eps, and a CUDA graph cannot recompute it", "leave moe out")


def recomputed_dropout(arguments: Arguments, job: TrainingJob) -> Iterator[tuple[str, str]]:
    """Recomputed modules with dropout that CUDA graphs capture, each with the dest of its dropout."""
    if job.graphs is None or job.recompute.granularity != "selective":
        return
    modules = recomputed_modules(arguments)
    dropouts = {"attention_dropout": job.model.attention_dropout, "hidden_dropout": job.model.hidden_dropout}
    parts = (("core_attn", "attn", "attention_dropout"), ("mlp", "mlp", "hidden_dropout"), ("moe", "moe", "hidden_dropout"))
    for module, part, dest in parts:
        if dropouts[dest] and module in modules and _captured(job.graphs, part):
            yield module, dest


def _captured(graphs: GraphSpec, part: str) -> bool:
    """Whether graphs capture a part of the layers."""
    return not graphs.scope or "full_iteration" in graphs.scope or part in graphs.scope


def _offloaded(arguments: Arguments, modules: tuple[str, ...], graphs: GraphSpec) -> Iterator[Violation]:
    """Activations that are offloaded while graphs are captured, since 0.18."""
    if graphs.scope == ("full_iteration",):
        limit = integer(arguments, "fine_grained_offloading_max_inflight_offloads")
        if limit is None or limit < 0:
            fault = "graphs of full iterations need a number of offloads at a time"
            yield Violation(("fine_grained_offloading_max_inflight_offloads",), fault, "give 0 or more, such as 2")
    elif graphs.implementation == "local":
        yield from _offloaded_from_own_graphs(arguments, modules, graphs)
    if "moe" in graphs.scope:
        yield Violation(_NAMED, "graphs with moe cannot be used with offloading", "leave moe out of --cuda-graph-modules")
    if graphs.warmup_steps <= 0:
        yield Violation(("cuda_graph_warmup_steps",), "offloading needs an iteration before graphs are captured", "give 1 or more")


def _offloaded_from_own_graphs(arguments: Arguments, modules: tuple[str, ...], graphs: GraphSpec) -> Iterator[Violation]:
    """Megatron's own graphs exclude offloading in 0.18. In 0.19, parts of experts outside the graphs can be offloaded."""
    if not since(arguments, "0.19"):
        yield Violation(_NAMED, "local cannot be used with offloading", "use --cuda-graph-impl transformer_engine")
        return
    wrong = [module for module in modules if module not in _EXPERT_PARTS]
    if wrong:
        yield Violation(
            ("offload_modules",),
            f"{wrong[0]} cannot be offloaded from local CUDA graphs",
            "use --cuda-graph-impl transformer_engine",
        )
    if not graphs.scope:
        yield Violation(_NAMED, "local graphs of whole layers cannot be used with offloading", "add --cuda-graph-modules attn")
