"""Layouts of students (`ModelSpec.distillation`), for the comparison with megatron-core and the losses of ms-swift and NeMo-RL."""

from __future__ import annotations

from typing import Any, Final

from analyzer.specs.distillation import DistillationSpec

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SP: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_TIED: Final = _LLAMA.replace("--untie-embeddings-and-output-weights ", "")
_ONE: Final = "--micro-batch-size 1 --global-batch-size 8"
_FORWARD: Final = DistillationSpec(divergence="forward")
_REVERSE: Final = DistillationSpec(divergence="reverse")
_JENSEN_SHANNON: Final = DistillationSpec()
_TOP: Final = DistillationSpec(topk=64)
_OF: Final = {
    "forward": (f"{_LLAMA} {_ONE}", _FORWARD),
    "reverse": (f"{_LLAMA} {_ONE}", _REVERSE),
    "both": (f"{_LLAMA} {_ONE}", _JENSEN_SHANNON),
    "both, two samples": (f"{_LLAMA} --global-batch-size 16", _JENSEN_SHANNON),
    "both, tied embeddings": (f"{_TIED} {_ONE}", _JENSEN_SHANNON),
    "forward, tp2 sp": (f"{_LLAMA} {_SP} {_ONE} --global-batch-size 4", _FORWARD),
    "reverse, tp2": (f"{_LLAMA} --tensor-model-parallel-size 2 {_ONE} --global-batch-size 4", _REVERSE),
    "both, tp2 sp": (f"{_LLAMA} {_SP} {_ONE} --global-batch-size 4", _JENSEN_SHANNON),
    "both, full recompute": (f"{_LLAMA} {_FULL} {_ONE}", _JENSEN_SHANNON),
    "both, adapters": (f"{_LLAMA} {_FULL} {_ONE} --info-lora 64", _JENSEN_SHANNON),
    "both, cp2": (f"{_LLAMA} --context-parallel-size 2 {_ONE} --global-batch-size 4", _JENSEN_SHANNON),
    "both, tp2 pp2 sp": (f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_ONE} --global-batch-size 2", _JENSEN_SHANNON),
    "both, part of a chunk": (f"{_LLAMA} {_ONE} --seq-length 768", _JENSEN_SHANNON),
    "forward, few tokens in the last chunk": (f"{_LLAMA} {_ONE} --seq-length 544", _FORWARD),
    "both, four microbatches": (f"{_LLAMA} {_ONE} --global-batch-size 32", _JENSEN_SHANNON),
    "top": (f"{_LLAMA} {_ONE}", _TOP),
    "top, two samples": (f"{_LLAMA} --global-batch-size 16", _TOP),
    "top, tp2 sp": (f"{_LLAMA} {_SP} {_ONE} --global-batch-size 4", _TOP),
    "top, reverse, adapters": (f"{_LLAMA} {_FULL} {_ONE} --info-lora 64", DistillationSpec(topk=64, divergence="reverse")),
}
_CP: Final = "--context-parallel-size 2"


def _nemo(*, topk: int = 64, **settings: Any) -> DistillationSpec:
    return DistillationSpec(framework="NeMo-RL", topk=topk, **settings)


_OF_NEMO_RL: Final = {
    "forward": (f"{_LLAMA} {_ONE}", _nemo(divergence="forward")),
    "reverse, two samples": (f"{_LLAMA} --global-batch-size 16", _nemo(divergence="reverse")),
    "mixed": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed")),
    "mixed, 256 logits": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed", topk=256)),
    "mixed, packed": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed", sequences=1)),
    "mixed, two sequences": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed", sequences=2)),
    "mixed, four sequences": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed", sequences=4)),
    "reverse, four sequences, tp2 cp2": (
        f"{_LLAMA} {_SP} {_CP} {_ONE} --global-batch-size 2",
        _nemo(divergence="reverse", sequences=4),
    ),
    "mixed, four sequences, tp2 pp2 cp2": (
        f"{_LLAMA} {_SP} {_CP} --pipeline-model-parallel-size 2 {_ONE} --global-batch-size 2",
        _nemo(divergence="mixed", sequences=4),
    ),
    "forward, tp2": (f"{_LLAMA} --tensor-model-parallel-size 2 {_ONE} --global-batch-size 4", _nemo(divergence="forward")),
    "mixed, full recompute": (f"{_LLAMA} {_FULL} {_ONE}", _nemo(divergence="mixed", sequences=4)),
    "mixed, tied embeddings": (f"{_TIED} {_ONE}", _nemo(divergence="mixed")),
    "mixed, adapters": (f"{_LLAMA} {_FULL} {_ONE} --info-lora 64", _nemo(divergence="mixed", sequences=4)),
    "vocabulary, forward": (f"{_LLAMA} {_ONE}", _nemo(divergence="forward", whole_vocabulary=True)),
    "vocabulary, mixed": (f"{_LLAMA} {_ONE}", _nemo(divergence="mixed", whole_vocabulary=True)),
    "vocabulary, mixed, part of a chunk": (
        f"{_LLAMA} {_ONE} --seq-length 2560 --max-position-embeddings 2560",
        _nemo(divergence="mixed", whole_vocabulary=True),
    ),
    "vocabulary, reverse, packed, tp2 cp2": (
        f"{_LLAMA} {_SP} {_CP} {_ONE} --global-batch-size 2",
        _nemo(divergence="reverse", whole_vocabulary=True, sequences=1),
    ),
    "vocabulary, mixed, two sequences": (
        f"{_LLAMA} {_ONE}",
        _nemo(divergence="mixed", whole_vocabulary=True, sequences=2),
    ),
    "vocabulary, mixed, four sequences, tp2": (
        f"{_LLAMA} {_SP} {_ONE} --global-batch-size 4",
        _nemo(divergence="mixed", whole_vocabulary=True, sequences=4),
    ),
}
_UNMASKED: Final = "--bf16 --no-create-attention-mask-in-dataloader"
_ALL: Final = {
    **{f"student, {name}": of for name, of in _OF.items()},
    **{f"student of NeMo-RL, {k}": v for k, v in _OF_NEMO_RL.items()},
}
STUDENTS: Final = {name: f"{_UNMASKED} {words}" for name, (words, _) in _ALL.items()}
DISTILLATIONS: Final = {name: spec for name, (_, spec) in _ALL.items()}
_IN_FULL: Final = "the logits of the teacher are counted in full throughout an iteration, and a forward frees its own"
KNOWN_OF_STUDENTS: Final = {
    "student, both, four microbatches": (3 * 2 * 1024 * 10112, _IN_FULL),
    "student, top, tp2 sp": (10 * 1024 * 64, _IN_FULL),
}
"""By how much the peak of the first iteration is too high at most, in bytes, and why."""
BATCHED: Final = {name for name in STUDENTS if "adapters" in name}
"""The gradient of the input of a frozen output layer is a product for each token, because the gradient of the logits is strided."""
