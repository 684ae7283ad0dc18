"""Model FLOPs of an iteration, as Megatron's `num_floating_point_operations` counts them (megatron/training/training.py).

The function changed several times. Model FLOPs are those of the GEMMs in forward and backward, without recomputation:

| releases | what is counted |
| --- | --- |
| until 0.4 | FFN width 4·h and no experts; heads of h / num_attention_heads elements; every score of attention |
| 0.5, 0.6 | FFN width and gate of the model; every layer has topk experts of the width of a dense FFN |
| 0.7 to 0.10 | heads of `kv_channels` elements; in 0.10, which introduces their option, shared experts |
| 0.11 | dense and MoE layers separately, with the width of an expert; half of the scores (causal mask) |
| 0.12 to 0.15 | multi-latent attention; MTP layers, whose logits are counted too; exact only up to rounded ratios |
| 0.16 | integers instead of ratios; gated delta nets and output gates |
| 0.17 | experts of a latent size, and the projections to it and from it |
| 0.18, 0.19 | the scores of attention are summed separately from the rest, which changes the rounding |

Sources: the tags core_v0.16.1 to core_v0.19.0 of NVIDIA/Megatron-LM, and copies of Megatron-LM in other projects, whose release
follows from their options: 0.4 (hetu-galvatron 2.1.0, with one of the options that 0.5 adds), 0.6 (hetu-galvatron 2.4.0), 0.7
(llm-jp/Megatron-LM), 0.9 (jsfanfanfan/Megatron-LM-core_r0.9.0), 0.10 (swiss-ai/Megatron-LM, with some of the options of 0.11), 0.12
(ningding-o/MeKi), 0.13 or 0.14 (ZJUAntgroup/MoEGambit), 0.15 (flag-scale 0.8.0 has core 0.15.0rc5).

No source was found for these releases: 0.5, for which the formula of 0.6 is used; 0.8, which lies between equal ones; 0.11, for
which that of code between 0.11 and 0.12 is used (kxlkxl1999/MOPE-38M-100M); releases before 0.4, which do not have the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from analyzer.specs import MlaSpec, ModelSpec, TrainingJob
from analyzer.specs.attention import COMPRESSION, OVERLAPPING, STRONGEST, CompressedAttentionSpec
from analyzer.specs.release import is_before

_PASSES: Final = 3
"""A GEMM runs in forward, for the gradient of its input and for that of its weight."""
_FMA: Final = 2
"""Operations of a multiplication and an addition."""


def model_flops(job: TrainingJob) -> int:
    """FLOPs of all GPUs together in an iteration with the full global batch, by the formula of the release `job.megatron`.

    Megatron returns a float. The operations here have the same order, so that the result has the same rounding error. A float below
    2**53 may have a fraction from the rounding of ratios; it is rounded to the nearest integer.

    Megatron counts as SwiGLU only `--swiglu`; other gated activations count as not gated. It counts windows as full attention, and
    layers that differ by configuration as equal ones. Layers that a release before 0.11 leaves out (`layers_built`) are not counted
    here, while Megatron counts `--num-layers`.
    """
    if job.model.hybrid is not None:
        from analyzer.time.work.hybrid_flops import hybrid_flops

        return round(hybrid_flops(job))
    formula = next(formula for first, formula in _FORMULAS if first is None or not is_before(job.megatron, first))
    return round(formula(job))


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Numbers of layers with MTP layers, which are of the kind of the last decoder layer."""

    dense: int
    moe: int
    topk: int
    expert_width: int
    shared_width: int

    @property
    def total(self) -> int:
        return self.dense + self.moe


def _layers(model: ModelSpec) -> _Layers:
    moe, mtp = model.moe, model.mtp_num_layers
    if moe is None:
        return _Layers(dense=model.num_layers + mtp, moe=0, topk=0, expert_width=model.ffn_hidden_size, shared_width=0)
    kinds = [*moe.layers, *[moe.layers[-1]] * mtp]
    return _Layers(
        dense=kinds.count(False),
        moe=kinds.count(True),
        topk=moe.topk,
        expert_width=moe.ffn_hidden_size,
        shared_width=moe.shared_ffn_hidden_size or 0,
    )


def _gate(model: ModelSpec) -> float:
    """Width of fc1 and fc2 together with `--swiglu`, relative to that without."""
    return 3 / 2 if model.activation == "swiglu" else 1


def _squares(job: TrainingJob) -> int:
    """Batch · sequence length · layers · h²: the factor of the formulas until 0.11."""
    model, batch = job.model, job.batch
    return batch.global_batch_size * batch.seq_length * model.num_layers * model.hidden_size * model.hidden_size


def _logits(model: ModelSpec) -> float:
    """The output layer relative to 12 · layers · h²."""
    return model.logits / (2 * model.num_layers * model.hidden_size)


def _query_ratio(model: ModelSpec) -> float:
    return model.query_projection_size / model.hidden_size


def _until_0_4(job: TrainingJob) -> float:
    model, sequence = job.model, job.batch.seq_length
    return (60 * _squares(job)) * (
        1
        + model.num_query_groups / (5 * model.num_attention_heads)
        + sequence / (5 * model.hidden_size)
        + model.logits / (10 * model.num_layers * model.hidden_size)
    )


def _routed(model: ModelSpec) -> float:
    """The FFN of topk experts, each of the width of a dense FFN."""
    topk = 1 if model.moe is None else model.moe.topk
    return (model.ffn_hidden_size / model.hidden_size) * topk * _gate(model)


def _from_0_5(job: TrainingJob) -> float:
    model = job.model
    groups = model.num_query_groups / model.num_attention_heads
    scores = job.batch.seq_length / model.hidden_size
    return (12 * _squares(job)) * (1 + _routed(model) + groups + scores + _logits(model))


def _from_0_7(job: TrainingJob) -> float:
    model = job.model
    groups = model.num_query_groups / model.num_attention_heads
    attention = (1 + groups + job.batch.seq_length / model.hidden_size) * _query_ratio(model)
    width = 0 if model.moe is None else model.moe.shared_ffn_hidden_size or 0
    shared = (width / model.hidden_size) * _gate(model)
    return (12 * _squares(job)) * (attention + _routed(model) + shared + _logits(model))


def _causal_attention(job: TrainingJob) -> float:
    """The attention of 0.11 to 0.15 relative to 12 · h²: half of the scores are masked."""
    model = job.model
    groups = model.num_query_groups / model.num_attention_heads
    return (1 + groups + job.batch.seq_length / model.hidden_size / 2) * _query_ratio(model)


def _from_0_11(job: TrainingJob) -> float:
    model, layers = job.model, _layers(job.model)
    widths = model.ffn_hidden_size * layers.dense + (layers.expert_width * layers.topk + layers.shared_width) * layers.moe
    ffn = widths * _gate(model) / (model.num_layers * model.hidden_size)
    return (12 * _squares(job)) * (_causal_attention(job) + ffn + _logits(model))


def _mla_projections(model: ModelSpec, mla: MlaSpec) -> int:
    """Weights of multi-latent attention. Each element of a latent has one more, for its norm."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries = heads * mla.query_head_dim
    query = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries + 1)
    key_value = mla.kv_lora_rank * (hidden + heads * (mla.qk_head_dim + mla.v_head_dim) + 1)
    return query + key_value + hidden * mla.qk_pos_emb_head_dim + heads * mla.v_head_dim * hidden


def _mla_scores(model: ModelSpec, mla: MlaSpec) -> float:
    """Multiplications for each pair of tokens: half of the pairs are masked."""
    return model.num_attention_heads * mla.query_head_dim / 2 + model.num_attention_heads * mla.v_head_dim / 2


def _mtp_and_logits(model: ModelSpec) -> tuple[int, int]:
    """FLOPs of a token: norms and projection of MTP layers (3·h + 2·h² weights each), and logits of the model and of these."""
    hidden, mtp = model.hidden_size, model.mtp_num_layers
    return (
        _PASSES * _FMA * mtp * (3 * hidden + 2 * hidden * hidden),
        _PASSES * _FMA * hidden * model.logits * (mtp + 1),
    )


def _from_0_12(job: TrainingJob) -> float:
    model, batch, layers = job.model, job.batch, _layers(job.model)
    hidden, gate = model.hidden_size, _gate(model)
    attention: float
    if model.mla is None:
        attention = 12 * layers.total * hidden * hidden * _causal_attention(job)
    else:
        scores = batch.seq_length * _mla_scores(model, model.mla)
        attention = _PASSES * _FMA * layers.total * (_mla_projections(model, model.mla) + scores)
    ffn = (
        model.ffn_hidden_size * gate * (layers.dense / layers.total)
        + layers.expert_width * layers.topk * gate * (layers.moe / layers.total)
        + layers.shared_width * gate * (layers.moe / layers.total)
    )
    mtp, logits = _mtp_and_logits(model)
    return batch.global_batch_size * batch.seq_length * (12 * layers.total * hidden * ffn + attention + mtp + logits)


def _routed_width(model: ModelSpec, layers: _Layers, *, latent: bool) -> float:
    """Width of the experts of a token, each counted with the matrices of its FFN. `latent`: with a latent size."""
    width = layers.expert_width * layers.topk * _matrices(model)
    size = model.moe.latent_size if latent and model.moe is not None else None
    return width if size is None else width * size / model.hidden_size + 2 * size


def _matrices(model: ModelSpec) -> int:
    """Matrices of an FFN: gate, up and down projection, or up and down projection."""
    return 3 if model.activation == "swiglu" else 2


def _attention(model: ModelSpec) -> tuple[int, float]:
    """FLOPs of a layer: of the projections of a token, and of the scores of a pair of tokens."""
    if model.mla is not None:
        return _PASSES * _FMA * _mla_projections(model, model.mla), _PASSES * _FMA * _mla_scores(model, model.mla)
    queries = model.query_projection_size
    outputs = queries + model.gate_projection_size + 2 * model.key_value_projection_size
    projections = model.hidden_size * outputs + queries * model.hidden_size
    return _PASSES * _FMA * projections, _PASSES * _FMA * queries / 2 * 2


def _linear_attention(model: ModelSpec) -> tuple[int, int]:
    """The number of layers with linear attention, and the FLOPs of a token in each. Megatron counts MTP layers by the frequency."""
    linear = model.linear_attention
    if linear is None:
        return 0, 0
    layers = sum(linear.layers)
    if linear.frequency is not None:
        layers = sum(layer % linear.frequency != 0 for layer in range(1, model.num_layers + model.mtp_num_layers + 1))
    return layers, _PASSES * _FMA * linear.multiplications(model.hidden_size)


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """FLOPs of a token in each part of the model, and of a pair of tokens in the scores of attention."""

    ffn: float
    projections: float
    scores: float
    mtp: int
    logits: int


def _terms(job: TrainingJob, *, latent: bool) -> _Terms:
    model, layers = job.model, _layers(job.model)
    matrices = _matrices(model)
    width = (
        model.ffn_hidden_size * matrices * layers.dense
        + _routed_width(model, layers, latent=latent) * layers.moe
        + layers.shared_width * matrices * layers.moe
    )
    mtp, logits = _mtp_and_logits(model)
    ffn = _PASSES * _FMA * model.hidden_size * width
    if model.compressed_attention is not None:
        projections, scores = _compressed_attention(model, model.compressed_attention, job.batch.seq_length)
        return _Terms(ffn=ffn, projections=projections, scores=scores, mtp=mtp, logits=logits)
    each, scores = _attention(model)
    linear_layers, linear = _linear_attention(model)
    full = layers.total - linear_layers
    return _Terms(ffn=ffn, projections=each * full + linear * linear_layers, scores=scores * full, mtp=mtp, logits=logits)


def _compressed_attention(model: ModelSpec, spec: CompressedAttentionSpec, sequence: int) -> tuple[float, float]:
    """FLOPs of all layers of DeepSeek-V4: of a token, with the keys of its window and those chosen, and of a pair of tokens.

    Source: `_dsv4_hybrid_self_attention_flops` (megatron/training/training.py) of the branch dev of Megatron-LM, August 2026.
    """
    hidden, heads, head = model.hidden_size, model.num_attention_heads, spec.head_dim
    layers = {ratio: spec.ratios.count(ratio) for ratio in COMPRESSION.values()}
    queries = spec.q_lora_rank * (hidden + heads * head + 1)
    outputs = heads * head * spec.output_rank + spec.output_groups * spec.output_rank * hidden
    token = float(sum(layers.values()) * (queries + (hidden + 1) * head + outputs + 2 * heads * spec.window * head))
    keys = hidden * 2 * head  # of each token, and their weights
    chosen = min(spec.topk, sequence // OVERLAPPING)
    chosen_on_average = chosen * (1 - chosen * OVERLAPPING / (2 * sequence))
    index = spec.index_heads * spec.index_head_dim
    indexer = hidden * 4 * spec.index_head_dim + spec.q_lora_rank * index + hidden * spec.index_heads
    token += layers[STRONGEST] * keys + layers[OVERLAPPING] * (2 * keys + 2 * heads * chosen_on_average * head + indexer)
    pair = layers[STRONGEST] * heads * head / STRONGEST + layers[OVERLAPPING] * index / OVERLAPPING
    return _PASSES * _FMA * token, _PASSES * _FMA * pair


def _from_0_16(job: TrainingJob, *, latent: bool = False) -> float:
    terms, batch = _terms(job, latent=latent), job.batch
    attention = terms.projections + terms.scores * batch.seq_length
    return batch.global_batch_size * batch.seq_length * (terms.ffn + attention + terms.mtp + terms.logits)


def _from_0_17(job: TrainingJob) -> float:
    return _from_0_16(job, latent=True)


def _from_0_18(job: TrainingJob) -> float:
    terms, sequence = _terms(job, latent=True), job.batch.seq_length
    tokens = job.batch.global_batch_size * sequence
    return tokens * (terms.ffn + terms.projections + terms.mtp + terms.logits) + tokens * sequence * terms.scores


_FORMULAS: Final[tuple[tuple[str | None, Callable[[TrainingJob], float]], ...]] = (
    ("0.18", _from_0_18),
    ("0.17", _from_0_17),
    ("0.16", _from_0_16),
    ("0.12", _from_0_12),
    ("0.11", _from_0_11),
    ("0.7", _from_0_7),
    ("0.5", _from_0_5),
    (None, _until_0_4),
)
"""The first release of each formula, newest first."""
