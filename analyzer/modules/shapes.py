"""The shapes that all formulas share: what one rank holds of an activation.

Symbols: s sequence on this context-parallel rank, b micro-batch, h hidden, t tensor-parallel size, a heads,
g key/value groups, d elements of a head, f feed-forward width, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from analyzer.modules.tree import Collective, Phase, Tensor
from analyzer.specs import Fp8Spec, ModelSpec, TrainingJob
from analyzer.units import DTYPE_BYTES


@dataclass(frozen=True)
class Shapes:
    """Sizes of a launch as its modules see them. `t` is 1 and `sp` False for the model without parallelism."""

    job: TrainingJob

    @property
    def model(self) -> ModelSpec:
        """The model's own sizes."""
        return self.job.model

    @cached_property
    def t(self) -> int:
        """Tensor-parallel size."""
        return self.job.parallel.tensor

    @cached_property
    def sp(self) -> bool:
        """Whether activations between the parallel regions are split along the sequence."""
        return self.job.parallel.sequence_parallel and self.t > 1

    @cached_property
    def s(self) -> int:
        """Tokens of a sample on this rank, before sequence parallelism splits them further."""
        return self.job.batch.seq_length // self.job.parallel.context

    @cached_property
    def b(self) -> int:
        """Micro-batch size."""
        return self.job.batch.micro_batch_size

    @cached_property
    def dtype(self) -> str:
        """Element type of parameters and activations."""
        return self.job.precision.parameters

    @cached_property
    def residual_dtype(self) -> str:
        """Element type of the residual stream."""
        return "fp32" if self.model.fp32_residual_connection else self.dtype

    @cached_property
    def fp8(self) -> Fp8Spec | None:
        """How the linear layers multiply, None in 16 bit."""
        return self.job.precision.fp8

    @cached_property
    def in_16_bit(self) -> Shapes:
        """The same without FP8: of what is outside Transformer Engine's linear layers, and of layers kept in 16 bit."""
        if self.fp8 is None:
            return self
        return Shapes(replace(self.job, precision=replace(self.job.precision, fp8=None)))

    @cached_property
    def windowed(self) -> Shapes:
        """The same with the attention kernel of layers that see a window only."""
        if self.model.window_backend is None:
            return self
        return Shapes(replace(self.job, model=replace(self.model, attention_backend=self.model.window_backend)))

    def of_width(self, ffn_hidden_size: int) -> Shapes:
        """The same with a feed-forward block of another width."""
        return Shapes(replace(self.job, model=replace(self.model, ffn_hidden_size=ffn_hidden_size)))

    @cached_property
    def s_split(self) -> int:
        """Tokens of the residual stream on this rank: s/t under sequence parallelism."""
        return self.s // self.t if self.sp else self.s

    @property
    def recompute_core_attention(self) -> bool:
        """Selective recompute of the attention kernel."""
        recompute = self.job.recompute
        return recompute.granularity == "selective" and "core_attn" in recompute.modules

    @property
    def checkpoints_attention(self) -> bool:
        """Whether a checkpoint gets the attention mask as an argument: full recompute of any layer, or of core attention."""
        recompute = self.job.recompute
        if recompute.granularity == "full":
            return recompute.method == "uniform" or bool(recompute.num_layers)
        return self.recompute_core_attention

    def recomputes(self, module: str) -> bool:
        """Whether `--recompute-modules` names this module and recompute is selective."""
        return self.job.recompute.granularity == "selective" and module in self.job.recompute.modules

    @property
    def dropped_norm_output(self) -> tuple[Tensor, ...]:
        """With `--recompute-modules layernorm`, the output of a norm of its own, until the block that reads it is over."""
        return (self.hidden("recomputed norm output"),) if self.recomputes("layernorm") else ()

    @property
    def norm_output_made_again(self) -> tuple[Tensor, ...]:
        """The same in backward: as it is made, and copied into the storage that was emptied (`CheckpointWithoutOutput`)."""
        return tuple(
            each for again in self.dropped_norm_output for each in (again, replace(again, name=f"copy of the {again.name}"))
        )

    @property
    def keeper_of_mixture_input(self) -> str:
        """What has the input of a mixture of experts already: a checkpoint, or nothing where the norm is computed again."""
        if self.recomputes("moe"):
            return "mixture input"
        return "recomputed norm output" if self.recomputes("layernorm") else ""

    @property
    def branch_gradient(self) -> Tensor:
        """[s, b, h]: of a branch's output, a tensor of its own where dropout stands between it and the residual stream."""
        return self.hidden("output gradient", shares="" if self.model.hidden_dropout > 0 else "residual gradient")

    @property
    def made_again(self) -> tuple[Tensor, ...]:
        """The output of what a checkpoint runs again, which its frame names while that goes backward (`CheckpointFunction`)."""
        return (self.hidden("output made again", dtype=self.residual_dtype),)

    def hidden(self, name: str, *, gathered: bool = False, dtype: str | None = None, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, h], or its shard [s/t, b, h] under sequence parallelism unless `gathered`."""
        kind = dtype or self.dtype
        split = self.sp and not gathered
        return Tensor(
            name=name,
            shape=(self.s if not split else self.s_split, self.b, self.model.hidden_size),
            dtype=kind,
            formula=f"{DTYPE_BYTES[kind]}·s·b·h" + ("/t" if split else ""),
            shares=shares,
            made_in=made_in,
        )

    def wide(self, name: str, width: int, symbol: str, *, dtype: str | None = None, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, width]: an activation inside a parallel region, `width` already divided by t."""
        kind = dtype or self.dtype
        return Tensor(
            name=name,
            shape=(self.s, self.b, width),
            dtype=kind,
            formula=f"{DTYPE_BYTES[kind]}·s·b·{symbol}",
            shares=shares,
            made_in=made_in,
        )

    def statistics(self, name: str, rows: int, symbol: str = "4·s·b") -> Tensor:
        """fp32 numbers, one for each row that a norm or a softmax reduced."""
        return Tensor(name=name, shape=(rows,), dtype="fp32", formula=symbol)

    def tp(self, kind: str, phase: Phase, *, width: int | None = None, dtype: str | None = None) -> tuple[Collective, ...]:
        """A tensor-parallel collective over [s, b, h] (or `width`); none without tensor parallelism."""
        if self.t == 1:
            return ()
        return (
            Collective(
                kind=kind,  # type: ignore[arg-type]
                group="tp",
                shape=(self.s, self.b, width or self.model.hidden_size),
                dtype=dtype or self.dtype,
                phase=phase,
            ),
        )
