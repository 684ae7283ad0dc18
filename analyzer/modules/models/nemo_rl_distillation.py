"""The head of a student of NeMo-RL: logits of the vocabulary in fp32, and their divergence from the largest ones of a teacher.

Sources: `DistillationLossFn` (nemo_rl/algorithms/loss/loss_functions.py), `SequencePackingLossWrapper` (loss/wrapper.py), and
`get_distillation_topk_logprobs_from_logits` with what it calls (nemo_rl/distributed/model_utils.py) of NeMo-RL, August 2026. Each
packed sequence has a loss of its own, whose gradient has the size of the logits of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from analyzer.modules.head import decoder_output_layer, logits
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import EndShapes
from analyzer.modules.tree import Collective, Module, Tensor, total_bytes
from analyzer.specs.distillation import DistillationSpec
from analyzer.units import DTYPE_BYTES

CHUNK: Final = 1024
"""Tokens for which probabilities of the whole vocabulary are computed at a time."""


def nemo_rl_head(shapes: EndShapes, *, pre_process: bool) -> tuple[Module, ...]:
    """Output layer and loss, after the final norm of the decoder. `pre_process`: the embedding is on the same stage."""
    layer = decoder_output_layer(shapes, pre_process=pre_process)
    # `Float16Module` converts the output, or its transposed copy; then nothing references the logits of the output layer
    converted = (logits(shapes, "logits", shapes.dtype), logits(shapes, "logits in fp32", "fp32"))
    return (replace(layer, forward_held=(), forward_workspace=converted), *_Loss(shapes).modules())


class _Loss:
    """The loss of a microbatch."""

    def __init__(self, shapes: EndShapes) -> None:
        spec = shapes.model.distillation
        assert spec is not None, "the model is a student"
        assert spec.topk is not None, "NeMo-RL compares the largest logits"
        self._shapes, self._spec, self._topk = shapes, spec, spec.topk
        self._sequences = max(spec.sequences, 1)
        self._length = shapes.s // self._sequences
        """Tokens of a sequence on a context-parallel rank."""
        self._chunks = chunks_of(spec, self._length)
        self._whole = logits(shapes, "logits in fp32", "fp32")

    def modules(self) -> tuple[Module, Module]:
        """The choice of logits, and their divergence. Of the latter what is freed before the peak of the backward."""
        early, late = self._saved()
        choice = Module(
            name="choice_of_logits",
            kind=ModuleKind.LOSS,
            function=True,
            saved=(self._whole, *late),
            forward_workspace=self._probabilities(),
            backward_workspace=self._gradients(),
            collectives=(*self._collectives(),),
            source="get_distillation_topk_logprobs_from_logits of NeMo-RL",
        )
        divergence = Module(
            name="divergence",
            function=True,
            saved=early,
            forward_workspace=self._temporary(),
            backward_workspace=(self._of_chosen("gradient of the log-probabilities", "fp32", part=1 / self._sequences),),
            source="DistillationLossFn of NeMo-RL",
        )
        return choice, divergence

    def _of_chosen(self, name: str, dtype: str, *, everywhere: bool = True, part: float = 1.0) -> Tensor:
        """Of the chosen logits. `everywhere`: of all context-parallel ranks. `part`: of all sequences."""
        shapes = self._shapes
        tokens = round(shapes.s * part) * (shapes.split.context if everywhere else 1)
        pieces = max(round(self._sequences * part), 1)
        formula = f"{int(DTYPE_BYTES[dtype])}·s·b·n"
        return Tensor(name=name, shape=(tokens, shapes.b, self._topk), dtype=dtype, formula=formula, pieces=pieces)

    def _saved(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What is saved of the chosen logits, and freed before the peak of the backward; and what is there at this peak.

        With several sequences the peak is in the backward of the last but one, where both have freed theirs, or of the last one.
        """
        chosen, log = [*self._of_choice()], [*self._of_divergence()]
        if self._sequences == 1:
            return (*chosen[1:], *log), tuple(chosen[:1])
        freed = 1 if self._sequences == 2 and not self._spec.whole_vocabulary else 2
        parts = []
        for count, name in ((freed, "last sequences"), (self._sequences - freed, "first sequences")):
            found = (
                self._of_chosen(f"{each.name} of the {name}", each.dtype, everywhere=each in log, part=count / self._sequences)
                for each in (*chosen, *log)
            )
            parts.append(tuple(found) if count else ())
        return parts[0], parts[1]

    def _of_choice(self) -> Iterator[Tensor]:
        if not self._spec.whole_vocabulary:
            yield self._of_chosen("indices in the logits of this rank", "int64", everywhere=False)
            yield self._of_chosen("factors of the logits of other ranks", "fp32", everywhere=False)
        elif self._shapes.split.context > 1:
            yield self._of_chosen("indices", "int64", everywhere=False)

    def _of_divergence(self) -> Iterator[Tensor]:
        spec = self._spec
        if not spec.whole_vocabulary or spec.divergence != "forward":
            yield self._of_chosen("log-probabilities of the student", "fp32")
        if spec.divergence != "reverse":
            yield self._of_chosen("probabilities of the teacher", "fp32")
        if spec.divergence != "forward":
            yield self._of_chosen("probabilities of the student", "fp32")
            yield self._of_chosen("differences of log-probabilities", "fp32")

    def _temporary(self) -> tuple[Tensor, ...]:
        """At the end of the loss of a sequence: local variables, and those of the sum."""
        names = {
            "forward": ("probabilities of the student", "differences", "product"),
            "reverse": ("probabilities of the teacher", "product"),
            "mixed": ("forward products", "reverse products", "half of the forward products", "half of the others", "sum"),
        }[self._spec.divergence]
        found = (self._of_chosen(f"{name} in forward", "fp32", part=1 / self._sequences) for name in names)
        return (self._of_chosen("log-probabilities of the teacher", "fp32", part=1 / self._sequences), *found)

    def _of_chunk(self, name: str, rows: int) -> Tensor:
        width = self._whole.shape[-1]
        return Tensor(name=name, shape=(rows, self._shapes.b, width), dtype="fp32", formula="4·c·b·V/t")

    def _probabilities(self) -> tuple[Tensor, ...]:
        """The temporary tensors of the whole vocabulary in forward: of a chunk, and what variables of the one before reference."""
        if not self._spec.whole_vocabulary:
            return (self._of_chosen("chosen logits", "fp32", everywhere=False, part=1 / self._sequences),)
        entropy = self._spec.divergence != "forward"
        found = []
        for before, rows in zip((0, *self._chunks), self._chunks, strict=False):
            kept = 2 * before if entropy else before
            found.append(kept + (2 + (entropy and not before)) * rows)
            if entropy and before:  # the probabilities are those of this chunk at the product
                found.append(3 * rows)
        return (self._of_chunk("probabilities of chunks", max(found)),)

    def _gradients(self) -> tuple[Tensor, ...]:
        """The gradient of the logits of a sequence, which is copied into one of all sequences, and those of others so far."""
        size, packed = self._sequences, self._spec.sequences > 0
        own = replace(self._whole, name="gradient of the logits of a sequence", shape=(self._length, *self._whole.shape[1:]))
        whole = replace(self._whole, name="gradient of the logits")
        chosen = self._of_chosen("gradient of the chosen logits", "fp32", everywhere=False, part=1 / size)
        others = (replace(whole, name="gradient of the logits of preceding sequences"),) if size > 1 else ()
        computed: tuple[Tensor, ...] = (own, chosen)
        if self._spec.whole_vocabulary:
            rows = self._chunks[0]
            three = self._of_chunk("probabilities of a chunk", 3 * rows)
            indices = Tensor(name="indices of a chunk", shape=(rows, self._shapes.b, self._topk), dtype="int64")
            both = (replace(own, name="gradient through the entropy"),) if self._spec.divergence != "forward" else ()
            computed = (*computed, *both, three, indices, replace(indices, name="whether they are of this rank", dtype="bool"))
        if not packed or size == 1:  # the logits are free when the gradient is copied
            return computed
        copied = (own, whole, *(others if size > 2 else ()))
        if size == 2 and not self._spec.whole_vocabulary:
            return copied
        return max((*computed, *others), copied, key=total_bytes)

    def _collectives(self) -> Iterator[Collective]:
        shapes, count = self._shapes, self._sequences
        chosen = (shapes.b, self._length, self._topk)
        entropy = self._spec.whole_vocabulary and self._spec.divergence != "forward"
        if shapes.t > 1 and not self._spec.whole_vocabulary:
            yield Collective(kind="all_reduce", group="tp", shape=chosen, dtype="fp32", phase="forward", count=count)
        elif shapes.t > 1:
            yield from self._of_probabilities(entropy=entropy)
        if shapes.split.context > 1:
            tokens = (shapes.b, self._length * shapes.split.context)
            for shape in ((*tokens, self._topk), *((tokens,) if entropy else ())):
                yield Collective(kind="all_gather", group="cp", shape=shape, dtype="fp32", phase="forward", count=count)
                yield Collective(kind="all_reduce", group="cp", shape=shape, dtype="fp32", phase="backward", count=count)

    def _of_probabilities(self, *, entropy: bool) -> Iterator[Collective]:
        """Maxima, sums, log-probabilities and entropies of each chunk."""
        shapes, count = self._shapes, self._sequences
        for rows in self._chunks:
            one, times = (shapes.b, rows, 1), 2 * (1 + entropy)
            yield Collective(kind="all_reduce", group="tp", shape=one, dtype="fp32", phase="forward", count=times * count)
            yield Collective(kind="all_reduce", group="tp", shape=one, dtype="fp32", phase="backward", count=times * count)
            chosen = (shapes.b, rows, self._topk)
            yield Collective(kind="all_reduce", group="tp", shape=chosen, dtype="fp32", phase="forward", count=count)
            if entropy:
                yield Collective(kind="all_reduce", group="tp", shape=one[:2], dtype="fp32", phase="forward", count=count)
                yield Collective(kind="all_reduce", group="tp", shape=one[:2], dtype="fp32", phase="backward", count=count)


def chunks_of(spec: DistillationSpec, length: int) -> tuple[int, ...]:
    """Tokens of each chunk of a sequence, if its probabilities are those of the whole vocabulary."""
    size = max(1, min(length, CHUNK)) if spec.whole_vocabulary else length
    return tuple(min(size, length - start) for start in range(0, length, size))
