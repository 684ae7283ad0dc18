"""Lower bounds of the memory of all layouts with a split, from the number of parameters alone.

A pipeline rank has at least as many parameters as the ranks have on average. The parameters of experts are those of one rank,
divided by the expert-parallel sizes, so that the modules of a layer are built once for each tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Final

from analyzer.layout_search.bounds import ChunkParameters, parameters_of
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.overlaps import OVERLAPS
from analyzer.layout_search.space import Layout, Split, Stages, divides
from analyzer.layout_search.split_jobs import resized
from analyzer.memory.screen import least_state_bytes
from analyzer.modules.inputs import module_inputs
from analyzer.modules.models.gpt import chunk_modules, layer_kinds
from analyzer.modules.models.parts import ChunkKind
from analyzer.specs.rules.hybrid import hybrid_violations
from analyzer.specs.rules.model import model_violations
from analyzer.units import DTYPE_BYTES

ROUNDING: Final = 1024
"""Bytes that whole numbers of elements on each rank may take away from the average."""


class StateFloors:
    """The bounds of the splits of a space."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._models: dict[int, ChunkParameters] = {}
        self._averages: dict[tuple[Split, int], int] = {}

    def of(self, setting: int, split: Split) -> int:
        """Bytes of the model states on the rank with the most, at least; 0 if options of the setting change them."""
        space = self._space
        sizes = [each for each in space.sizes.pipeline if divides(split, each, space.scale)]
        return min((self._on_average(split, pipeline) for pipeline in sizes), default=0) if self._covers(setting) else 0

    def of_layout(self, layout: Layout) -> int:
        """The same for one layout; 0 also if its sizes do not divide the world."""
        split, pipeline = layout.split, layout.stages.pipeline
        covered = self._covers(layout.setting) and divides(split, pipeline, self._space.scale)
        return self._on_average(split, pipeline) if covered else 0

    def _covers(self, setting: int) -> bool:
        """Whether no option of a setting changes the model states."""
        return set(OVERLAPS).issuperset(self._space.settings[setting].changes)

    def _on_average(self, split: Split, pipeline: int) -> int:
        """Bytes of the states of a rank with the average number of parameters.

        They are sharded over data- and context-parallel ranks together, and do not depend on the microbatch.
        """
        key = (split._replace(context=1, micro_batch=1), pipeline)
        if key not in self._averages:
            self._averages[key] = self._computed(*key)
        return self._averages[key]

    def _computed(self, split: Split, pipeline: int) -> int:
        job = resized(self._space.problem.given, split, Stages(pipeline))
        model = self._model(split.tensor)
        dense = model.dense // pipeline
        experts = model.experts // (split.expert * split.expert_tensor * pipeline)
        size = int(DTYPE_BYTES[job.precision.parameters]) * (dense + experts)
        return max(0, least_state_bytes(job, dense=dense, experts=experts, parameter_bytes=size) - ROUNDING)

    def _model(self, tensor: int) -> ChunkParameters:
        """The parameters of all layers, without embeddings, on a rank with a tensor-parallel size and all experts."""
        if tensor not in self._models:
            given = self._space.problem.given
            job = resized(given, Split(tensor=tensor, sequence=tensor > 1), Stages())
            layers = ChunkKind(
                layers=layer_kinds(given.model, given.precision.fp8),
                pre_process=False,
                post_process=False,
                final_norm=False,
                mtp_layers=given.model.mtp_num_layers,
            )
            model = replace(given.model, padded_vocab_size=0)  # the vocabulary is padded for every size
            refused = chain(model_violations(model, job.parallel, megatron=job.megatron), hybrid_violations(job))
            legal = next(refused, None) is None
            self._models[tensor] = parameters_of((chunk_modules(module_inputs(job), layers) if legal else None) or ())
        return self._models[tensor]
