"""Options that shorten an iteration in about the same memory: communication that overlaps with kernels, and fused kernels.

They are the dimension `overlap` of a search. It does not try all combinations of them for each layout:

- `FUSIONS` and `ALWAYS` never lengthen an iteration in the time model. They are switched on wherever Megatron accepts them. A
  layout that does not fit with these is evaluated without `ALWAYS`, and then without both.
- `SEARCHED`: may lengthen an iteration, and need memory. Layouts with and without are nodes of their own, with their own bounds.
- `EXPERTS`: tried for the fastest layouts when the bounds have excluded all others: the memory of overlapped microbatches has no
  fast lower bound.

Options that the launch sets, and those of `--info-keep`, stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.layout_search.options import changes_of
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.specs.option_names import flag_of

if TYPE_CHECKING:
    from analyzer.layout_search.problem import Changes, Problem

ALWAYS: Final = ("overlap_grad_reduce", "overlap_param_gather")
"""Data-parallel communication beside the passes. Only the reduced or gathered buckets differ."""
SEARCHED: Final = ("tp_comm_overlap",)
"""Tensor-parallel communication in parts beside its GEMM, with the userbuffers of Transformer Engine."""
FUSIONS: Final = ("cross_entropy_loss_fusion", "moe_permute_fusion")
"""Fused kernels that the time model knows. It has no time of the router, so that `--moe-router-fusion` is left to the launch."""
EXPERTS: Final = ("overlap_moe_expert_parallel_comm",)
"""The exchange of tokens beside the passes of another microbatch."""
OVERLAPS: Final = (*ALWAYS, *SEARCHED, *FUSIONS, *EXPERTS)
"""All options of the dimension."""


class Setting(NamedTuple):
    """Options of a layout that are changed together."""

    changes: Changes
    base: int
    """Index of the setting without the options of this module. Layouts of both are ways to run one distribution of layers."""
    searched: bool = True
    """Whether its layouts are looked at from the start."""
    fallback: int | None = None
    """Index of the setting for layouts that do not fit with this one."""
    adds_to: int | None = None
    """Index of the setting to which it adds `EXPERTS`."""


def with_overlaps(
    problem: Problem, bases: Sequence[Changes], keep: Collection[str], dests: Sequence[str] = OVERLAPS
) -> tuple[Setting, ...]:
    """The settings of a search: `bases` in their order, then each of them with options of this module, those in `dests`.

    A base is not searched from the start if there is a setting that adds `FUSIONS` or `ALWAYS` to it.
    """
    usable = [dest for dest in dests if _may_switch_on(problem, dest, keep)]
    experts: Changes = dict.fromkeys((dest for dest in EXPERTS if dest in usable), True)
    plain: list[Setting] = []
    added: list[Setting] = []

    def add(setting: Setting) -> int:
        """Adds a setting, unless it is the base. Returns its index."""
        if setting.changes == bases[setting.base]:
            return setting.base
        added.append(setting)
        return len(bases) + len(added) - 1

    for base, changes in enumerate(bases):
        fused = {**changes, **_accepted(problem, changes, [dest for dest in FUSIONS if dest in usable])}
        hides = not changes.get("use_megatron_fsdp")  # whose communication always overlaps
        always = _accepted(problem, fused, [dest for dest in ALWAYS if dest in usable and hides])
        plain.append(Setting(changes, base, searched={**fused, **always} == changes))
        fallback = base if fused != changes else None
        if always:
            fallback = add(Setting(fused, base, searched=False, fallback=fallback))
        start: Changes = {**fused, **always}
        accepted = [dest for dest in SEARCHED if dest in usable and _is_accepted(problem, start, dest)]
        for more in ({}, *({dest: True} for dest in accepted)):
            place = add(Setting({**start, **more}, base, fallback=None if more else fallback))
            if experts:
                add(Setting({**start, **more, **experts}, base, searched=False, adds_to=place))
    return (*plain, *added)


def _may_switch_on(problem: Problem, dest: str, keep: Collection[str]) -> bool:
    """Whether an option is one of the release, is not set by the launch, and could have an effect in it."""
    arguments, job = problem.arguments, problem.given
    if dest not in arguments.values or dest in arguments.given or arguments.get(dest) or dest in keep:
        return False
    if dest in ("moe_permute_fusion", *EXPERTS) and job.model.moe is None:
        return False
    return dest not in ALWAYS or (job.fsdp is None and job.parallel.world_size > 1)


def _accepted(problem: Problem, base: Changes, dests: Collection[str]) -> Changes:
    """Those of some options that Megatron accepts with a setting, switched on one after the other."""
    found: dict[str, object] = {}
    for dest in dests:
        if _is_accepted(problem, {**base, **found}, dest):
            found[dest] = True
    return found


def _is_accepted(problem: Problem, setting: Changes, dest: str) -> bool:
    """Whether Megatron accepts an option in the layout of the launch, or refuses the layout for another reason."""
    layout = _tensor_parallel(problem) if dest in SEARCHED else {}
    fault = _fault(problem, {**layout, **setting, dest: True})
    if fault is None:
        return True
    without = _fault(problem, {**layout, **setting})
    return without is not None and fault.option not in (flag_of(dest), problem.arguments.spelled.get(dest))


def _tensor_parallel(problem: Problem) -> Changes:
    """Changes that give the launch two tensor-parallel ranks and no pipeline, which `SEARCHED` needs."""
    job = problem.given
    split = Split(tensor=2, expert_tensor=2, micro_batch=job.batch.micro_batch_size, sequence=True)
    return changes_of(Layout(0, split, Stages(), Recompute()), {}, problem.arguments, layers=job.model.num_layers)


def _fault(problem: Problem, changes: Changes) -> InputError | None:
    """Why Megatron refuses a changed launch; None if it does not."""
    try:
        problem.job({**changes, **problem.with_any_change})
    except InputError as error:
        return error
    except AnalyzerError as error:
        return InputError("", str(error), "")
    return None


def suits_split(changes: Changes, split: Split, *, domain: int) -> bool:
    """Whether a split has the communication that the options of a setting hide.

    `domain`: GPUs that NVLink connects. Userbuffers of tensor-parallel ranks lie in the memory of GPUs that it connects.
    """
    if changes.get("tp_comm_overlap") and not (1 < split.tensor <= domain and split.sequence):
        return False
    return not changes.get("overlap_moe_expert_parallel_comm") or split.expert > 1


def suits_layout(changes: Changes, stages: Stages, recompute: Recompute) -> bool:
    """Whether stages and recomputation do not exclude the options of a setting."""
    if not changes.get("overlap_moe_expert_parallel_comm"):
        return True
    return (stages.pipeline == 1 or stages.virtual > 1) and recompute.granularity != "full"


def without_effect(changes: Changes, replicas: int) -> Changes:
    """The changes without those of data-parallel communication if there is one replica of every parameter."""
    return changes if replicas > 1 else {dest: value for dest, value in changes.items() if dest not in ALWAYS}
