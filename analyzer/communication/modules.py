"""Calls of the modules of a stage, from the operations of its chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from analyzer.communication.calls import Call
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Collective, Module
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import with_paths

ONCE_PER_ITERATION: Final = ("gradient", "parameter")
"""Phases of calls that are made once per iteration, and not for each microbatch."""


def module_calls(stage: StageModel) -> Iterator[Call]:
    """One call for equal calls of modules with the same name, also in other layers and chunks, in model order."""
    counts: Counter[Call] = Counter()
    for tree in stage.trees:
        counts.update(tree.derived(_chunk_calls))
    for call, count in counts.items():
        if call.phase in ONCE_PER_ITERATION:
            yield call._replace(per_iteration=count)
        else:
            yield call._replace(per_microbatch=count)


def _chunk_calls(tree: Module) -> Counter[Call]:
    """Calls of one microbatch through a chunk. Counts are in the counter, not in the calls."""
    counts: Counter[Call] = Counter()
    for block in chunk_program(tree).blocks:
        for path, collective in block.module.derived(_block_calls):
            name = _table_name(f"{block.parent}.{path}" if block.parent else path)
            call = Call(collective.group, collective.kind, collective.phase, name, collective.shape, collective.dtype)
            counts[call] += block.times * collective.count
    return counts


def _block_calls(module: Module) -> list[tuple[str, Collective]]:
    """Every collective of a module's operations with its path, in the order of the modules in the model.

    A collective of the forward that is repeated in a recomputation follows that of the forward.
    """
    program = operations(module)
    placed = (*with_paths(program.forward), *with_paths(program.backward))
    found = [(path, each.module, each.call) for path, each in placed if each.call is not None]
    order: dict[str, int] = {}
    for place, (path, _) in enumerate(module.walk()):
        order.setdefault(path, place)

    def position(each: tuple[str, Module, Collective]) -> tuple[int, int, bool]:
        path, caller, call = each
        recomputed = call.phase == "recompute" and call not in caller.collectives
        place = next(i for i, listed in enumerate(caller.collectives) if listed == call or _is_repeated(listed, call))
        return order[path], place, recomputed

    return [(path, call) for path, _, call in sorted(found, key=position)]


def _is_repeated(listed: Collective, call: Collective) -> bool:
    """Whether a call is that of a recomputation, or of the first forward under a checkpoint."""
    dtype = listed.dtype_without_gradients if call.phase == "forward" else listed.dtype
    return replace(listed, phase="recompute" if call.phase == "recompute" else listed.phase, dtype=dtype) == call


def _table_name(path: str) -> str:
    """The path of a module without the root of its tree and without layer numbers."""
    root, *parts = path.split(".")
    return ".".join(part for part in parts if not part.isdigit()) or root
