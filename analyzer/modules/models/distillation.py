"""The head of a student: logits of the vocabulary in fp32, and the divergence of the teacher's distribution from the student's.

Sources: `MegatronGKDTrainer` of ms-swift 4.6 (swift/megatron/trainers/gkd_trainer.py), and `gkd_loss` and `jsd_loss`
(swift/rlhf_trainers/gkd_loss.py), which goes through the tokens in chunks. What a chunk saves stays until its backward. All tokens
are counted as those of a response: others are left out before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.head import decoder_output_layer, logits
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import EndShapes
from analyzer.modules.tree import Collective, Module, Tensor, total_bytes
from analyzer.specs.distillation import DistillationSpec, Divergence
from analyzer.units import DTYPE_BYTES, ceil_div

CHUNK: Final = 512
"""Tokens of a chunk: the default of `jsd_loss`."""
_DIVERGENCES: Final[dict[Divergence, int]] = {"forward": 1, "reverse": 1, "Jensen-Shannon": 2}
"""KL divergences of a chunk."""


def distillation_head(shapes: EndShapes, *, pre_process: bool) -> tuple[Module, ...]:
    """Output layer and loss, after the final norm of the decoder. `pre_process`: the embedding is on the same stage."""
    layer = decoder_output_layer(shapes, pre_process=pre_process)
    # `Float16Module` converts the output, or its transposed copy; then nothing references the logits of the output layer
    converted = (logits(shapes, "logits", shapes.dtype), logits(shapes, "logits in fp32", "fp32"))
    return (replace(layer, forward_held=(), forward_workspace=converted), _loss(shapes))


def _loss(shapes: EndShapes) -> Module:
    spec = shapes.model.distillation
    assert spec is not None, "the model is a student"
    whole = logits(shapes, "logits in fp32", "fp32")
    selected = replace(whole, name="logits of responses")
    if spec.topk is None:
        of_teacher = logits(shapes, "logits of the teacher", shapes.dtype)
        compared: tuple[Tensor, ...] = (
            replace(whole, name="logits by temperature"),
            of_teacher,
            replace(of_teacher, name="logits of the teacher by temperature"),
        )
        kept: tuple[Tensor, ...] = ()
        parts = _Parts(shapes, width=whole.shape[-1], split=shapes.t > 1)
    else:
        # the backward of `torch.gather` saves its input
        parts = _Parts(shapes, width=spec.topk, split=False)
        compared = (
            parts.of_tokens("chosen logits by temperature", 4),
            parts.of_teacher("logits of the teacher"),
            parts.of_teacher("logits of the teacher by temperature"),
        )
        indices = parts.of_tokens("indices", 8, dtype="int64")
        kept = (selected, indices)
        if shapes.t > 1:  # `tp_gather_topk`: those of this rank, and which of them are
            compared += (replace(indices, name="indices of all ranks"),)
            masks = (parts.of_tokens(f"logits of {ranks}", 1, dtype="bool") for ranks in ("this rank", "other ranks"))
            kept += tuple(masks)
    gradients = [replace(whole, name="gradient of the logits")]
    if spec.topk is None:  # that of each chunk has the size of all tokens
        gradients.append(replace(whole, name="gradient of the logits of a chunk"))
    return Module(
        name="distillation",
        kind=ModuleKind.LOSS,
        function=True,
        saved=(*kept, *parts.saved(spec)),
        forward_workspace=(whole, *(() if kept else (selected,)), *compared, *parts.temporary(spec)),
        backward_workspace=tuple(gradients),
        collectives=_collectives(shapes, spec),
        source="gkd_loss of ms-swift",
    )


class _Parts:
    """The tensors of all chunks, with `width` logits for each token. `split`: over tensor-parallel ranks."""

    def __init__(self, shapes: EndShapes, *, width: int, split: bool) -> None:
        spec = shapes.model.distillation
        self._tokens, self._width, self._split = shapes.s * shapes.b, width, split
        self._dtype = "fp32" if spec is not None and spec.from_server else shapes.dtype

    def of_teacher(self, name: str) -> Tensor:
        """Of all tokens, in the dtype of the logits of the teacher."""
        return self.of_tokens(name, int(DTYPE_BYTES[self._dtype]), dtype=self._dtype)

    def of_tokens(self, name: str, size: int, *, copies: int = 1, dtype: str = "fp32") -> Tensor:
        """Of all tokens, in an allocation for each chunk. `size`: bytes of an element."""
        shape = (self._tokens, self._width) if copies == 1 else (copies, self._tokens, self._width)
        formula = f"{copies * size}·s·b·V/t" if self._split else f"{copies * size}·s·b·n"
        return Tensor(name=name, shape=shape, dtype=dtype, formula=formula, pieces=ceil_div(self._tokens, CHUNK))

    def saved(self, spec: DistillationSpec) -> tuple[Tensor, ...]:
        """For the backward of all chunks."""
        first = "exponentials of the student" if self._split else "log-probabilities of the student"
        of_student = (
            self.of_tokens("probabilities of the student", 4),
            self.of_tokens("differences of log-probabilities", 4),
        )
        of_teacher = self.of_teacher("probabilities of the teacher")
        mixture = (
            self.of_tokens("log-probabilities of both", 4, copies=2),
            self.of_tokens("log-probabilities of the mixture", 4),
        )
        found: dict[Divergence, tuple[Tensor, ...]] = {
            "forward": (of_teacher,),
            "reverse": of_student,
            "Jensen-Shannon": (*mixture, of_teacher, *of_student),
        }
        return (self.of_tokens(first, 4), *found[spec.divergence])

    def temporary(self, spec: DistillationSpec) -> tuple[Tensor, ...]:
        """At the end of a chunk: local variables, and the product that is summed over the vocabulary.

        If the last chunk is small, the peak can be in the one before, without what the last one saves.
        """
        names = ["product of probabilities and differences"]
        names += ["differences of log-probabilities"] if spec.divergence == "forward" else []
        names += ["log-probabilities of the student"] if self._split else []
        last = self._tokens - (ceil_div(self._tokens, CHUNK) - 1) * CHUNK
        saved, size = total_bytes(self.saved(spec)), self._width * (4 * len(names) + DTYPE_BYTES[self._dtype]) * self._tokens
        rows = last if self._tokens <= CHUNK else max(last, CHUNK - int(last * saved // size))
        of_teacher = Tensor(name="log-probabilities of the teacher", shape=(rows, self._width), dtype=self._dtype)
        return (of_teacher, *(Tensor(name=name, shape=(rows, self._width), dtype="fp32") for name in names))


def _collectives(shapes: EndShapes, spec: DistillationSpec) -> tuple[Collective, ...]:
    """Over tensor-parallel ranks: the chosen logits, or for each chunk maxima and sums of both models, and the divergences."""
    if shapes.t == 1:
        return ()
    if spec.topk is not None:
        shape = (shapes.s * shapes.b, spec.topk)
        return (Collective(kind="all_reduce", group="tp", shape=shape, dtype="fp32", phase="forward"),)
    whole, rest = divmod(shapes.s * shapes.b, CHUNK)
    times = _DIVERGENCES[spec.divergence]
    found = []
    each: tuple[tuple[tuple[int, ...], str, int], ...]
    for tokens, count in ((CHUNK, whole), (rest, int(rest > 0))):
        each = (((tokens, 1), "fp32", 2), ((tokens, 1), shapes.dtype, 2), ((tokens,), "fp32", times))
        found += [
            Collective(kind="all_reduce", group="tp", shape=size, dtype=dtype, phase="forward", count=calls * count)
            for size, dtype, calls in each
            if count
        ]
    return tuple(found)
