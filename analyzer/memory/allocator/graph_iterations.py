"""What a rank with CUDA graphs runs in the replay: iterations before the capture, the capture, and iterations that replay graphs.

The captured modules allocate in a pool of their own, as on a stream of their own. Before a capture unused segments are freed. The
warm-up of a capture is left out: it frees what it has allocated, and less than an iteration needs.

Sources: torch/cuda/graphs.py `graph.__enter__` (2.13); core/transformer/cuda_graphs.py `create_cudagraphs`,
`TECudaGraphHelper.create_cudagraphs` (0.16.1).
"""

from __future__ import annotations

from typing import Final

from analyzer.memory.allocator.caching_allocator import CAPTURES
from analyzer.memory.allocator.iterations import Phase, ReplayedIteration, first_steps
from analyzer.memory.allocator.script import Streams, script
from analyzer.memory.graphs.kept import kept_tensors
from analyzer.memory.graphs.peaks import captured_steps
from analyzer.memory.stages import StageAnalysis
from analyzer.modules.shapes import shapes_of
from analyzer.passes.graph_scopes import FULL_ITERATION, captured_modules, captured_tree, outside_tree
from analyzer.specs import GraphSpec, TrainingJob

_POOL: Final[Streams] = (("", CAPTURES),)
"""The stream of all tensors of a capture."""


def with_graphs(
    job: TrainingJob, graphs: GraphSpec, stage: StageAnalysis, first: ReplayedIteration, later: ReplayedIteration
) -> tuple[Phase, ...]:
    """The phases of a run with CUDA graphs. `first` and `later` are iterations without graphs."""
    moe, hidden = job.model.moe, shapes_of(job).hidden("static output")
    chunks = list(zip(stage.model.trees, stage.model.chunks, strict=True))
    full_iteration = FULL_ITERATION in graphs.scope
    captured = captured_steps(job, stage.model, stage.iterations[1], full_iteration=full_iteration)
    kinds = frozenset(
        module.kind for tree, _ in chunks for each in captured_modules(graphs, moe, tree) for _, module in each.walk()
    )
    before, after = kept_tensors(job, graphs, stage.model, captured, kinds, stage.workspaces)
    local, alone = graphs.implementation == "local" and not full_iteration, job.parallel.pipeline == 1
    capture = ReplayedIteration(
        tuple(script(captured_tree(graphs, moe, tree, static_output=hidden, alone=alone), _POOL) for tree, _ in chunks),
        captured.order,
        captured=(*before, *after),
        switches=local,
    )
    outside = tuple(
        script(outside_tree(graphs, moe, tree, hidden=shapes_of(job).hidden("input"), received=not chunk.pre_process))
        for tree, chunk in chunks
    )
    replays = [ReplayedIteration(outside, first_steps(each.order)) for each in stage.iterations]
    if graphs.implementation == "transformer_engine" and graphs.warmup_steps == 0:
        return capture, replays[0], None, replays[1]
    if local:
        return first, capture, None, replays[1]
    return (first, None, *((later,) if graphs.warmup_steps > 1 else ()), capture, replays[1])
