"""The routed experts of a rank: two GEMMs for each expert, grouped into one call or executed sequentially.

Source: core/transformer/moe/experts.py (0.16.1): TEGroupedMLP, SequentialMLP.
Symbols as in routing.py; fm is the width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.mlp import activates_sum, saved_by_gate, saves_half
from analyzer.modules.moe.expert_bias import bias_added, bias_gradients, expert_bias
from analyzer.modules.moe.routing import ROW_GRADIENTS, Routing, dispatched_rows, shared_output
from analyzer.modules.quantized import Split, backward_input, forward_input, output_gradient, saved_input
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import (
    ACTIVATION_OUTPUT,
    OUTPUT_GRADIENT,
    OUTPUTS_OF_EXPERTS,
    Module,
    Parameter,
    Tensor,
    for_weight,
    largest,
    total_bytes,
)

GROUPED_LINEAR: Final = "TEGroupedLinear"
"""Source of a layer of all experts in one GEMM."""
SAVED_BY_OTHERS: Final = "saved by other experts"
INPUT_GRADIENTS: Final = ("input gradients of the experts", "input gradients of other experts")
"""Of experts that run one after the other: concatenated after the backward of the last one."""
SAVED_BY_LAST: Final = "saved by the last expert"
UNWEIGHTED: Final = "unweighted activation"
WEIGHT_GRADIENTS_OF_EXPERTS: Final = "weight gradients"
"""Those of a grouped GEMM, for all local experts."""
WEIGHT_GRADIENT_OF_EXPERT: Final = "weight gradient of an expert"


@dataclass(frozen=True)
class _Experts:
    """Sizes and tensors that several parts of the experts share."""

    routing: Routing

    @property
    def shapes(self) -> ExpertShapes:
        return self.routing.shapes

    @property
    def width(self) -> int:
        """fm on one expert-tensor-parallel rank."""
        return self.routing.moe.ffn_hidden_size // self.routing.etp

    @property
    def gates(self) -> int:
        """fc1 outputs of `width` for each activation output."""
        return 2 if self.shapes.model.gated else 1

    @property
    def rows(self) -> int:
        return self.routing.multiplied_rows

    @property
    def rows_at_once(self) -> int:
        """Rows of one GEMM call."""
        return self.rows // self.routing.local_experts if self.routing.runs_sequentially else self.rows

    @property
    def drops_activation(self) -> bool:
        """`--recompute-modules moe_act`."""
        return self.shapes.recomputes("moe_act")

    @property
    def fuses_activation(self) -> bool:
        """Whether activation and probabilities are one kernel."""
        model = self.shapes.model
        return (model.bias_activation_fusion and model.gated) or (model.fused_squared_relu and self.routing.moe.grouped_gemm)

    @property
    def recomputed_output(self) -> tuple[Tensor, ...]:
        """With `drops_activation`, the output of the recomputation (`CheckpointWithoutOutput._recompute`).

        It is referenced until the backward of the activation.
        """
        return (replace(self.activation_output, name="recomputed activation output"),) if self.drops_activation else ()

    @property
    def copied_output(self) -> tuple[Tensor, ...]:
        """The recomputed output, from which the storage that fc2 reads was copied. From core 0.17 on both are one."""
        return self.recomputed_output if self.shapes.inputs.core.copies_recomputed else ()

    @property
    def split(self) -> Split:
        routing = self.routing
        return Split(experts=routing.local_experts, padded_to=routing.padded_to, in_one_buffer=routing.moe.grouped_gemm)

    def at_once(self, tensor: Tensor) -> tuple[Tensor, Split]:
        """The part of a matrix of rows that one GEMM call reads in FP8, and how it is quantized."""
        if self.shapes.fp8 is None or not self.routing.runs_sequentially:
            return tensor, self.split
        return replace(tensor, shape=(self.rows_at_once, tensor.shape[1])), Split()

    @property
    def fc1_output(self) -> Tensor:
        """Without an offset the product saves the other half as a view too, and so does clamping."""
        model = self.shapes.model
        output = self.routing.row_tensor("fc1 output", self.rows, self.gates * self.width, made_in="mlp.experts.linear_fc1")
        half = saves_half(model) and model.glu_offset and not model.activation_clamped
        return _by_expert(self.routing, replace(output, strided=saves_half(model), half_saved=half))

    @property
    def activation_input(self) -> Tensor:
        """fc1's output, to which the MLP of a sequential expert adds the bias first."""
        if self.routing.moe.grouped_gemm or not activates_sum(self.shapes.model):
            return self.fc1_output
        return replace(self.fc1_output, name="biased fc1 output", made_in="")

    @property
    def activation_output(self) -> Tensor:
        return self.at_once(self.routing.row_tensor(ACTIVATION_OUTPUT, self.rows, self.width))[0]

    @property
    def output_gradient(self) -> Tensor:
        return self.routing.row_tensor(OUTPUT_GRADIENT, self.rows)


def experts(shapes: ExpertShapes, *, dispatched: tuple[Tensor, ...]) -> Module:
    """Rows [R, hx] → [R, hx] through the local experts; routing probabilities are applied after the activation.

    `dispatched`: tensors of the dispatcher that local variables of the layer reference until the experts return.
    """
    sizes = _Experts(Routing(shapes))
    routing = sizes.routing
    fc2 = _fc2(sizes)
    activation = _activation(sizes, saved_after=fc2.saved)
    in_pages = routing.moe.page_factor is not None and shapes.fp8 is not None  # only fused kernels copy, and they read MXFP8
    children = (_fc1(sizes, saved_after=(*activation.saved, *fc2.saved)), activation, fc2)
    return Module(
        name="experts",
        kind=ModuleKind.EXPERTS,
        forward_workspace=(*dispatched, *shared_output(routing)),
        # sequential experts read views of one gradient of all experts
        backward_workspace=(replace(sizes.output_gradient, name=ROW_GRADIENTS),) if routing.runs_sequentially else (),
        children=tuple(_in_pages(routing, each) for each in children) if in_pages else children,
        source=_source(routing),
    )


def _in_pages(routing: Routing, module: Module) -> Module:
    """The module with what it saves as parts of pages, whose number follows from the mean number of rows.

    That is the number of allocated rows divided by the capacity. Source: core/transformer/moe/paged_stash.py (0.18)
    PagedStashManager.on_save_for_backward and allocate_stash_buffers.
    """
    moe = routing.moe
    assert moe.page_factor is not None
    assert moe.rank_capacity is not None
    factor = moe.page_factor / moe.rank_capacity

    def part(tensor: Tensor) -> Tensor:
        rows, *others = tensor.shape
        return replace(tensor, name=f"{tensor.name}, in pages", shape=(int(rows * factor), *others))

    return replace(module, saved=tuple(part(each) for each in module.saved))


def beside_pages_bytes(shapes: ExpertShapes) -> int:
    """Bytes of what the experts of one layer save before it is copied to pages, or after it is copied back; 0 without pages.

    The tensors of a layer stay until the experts of the next one begin (`PipelinePreScheduleFunction.forward`), and in the backward
    they are allocated when those of the layer after it have run (`reload_paged_tensors`).
    """
    moe = shapes.model.moe
    if moe is None or moe.page_factor is None:
        return 0
    inputs = shapes.inputs
    model = replace(inputs.model, moe=replace(moe, page_factor=None))
    whole = experts(type(shapes)(replace(inputs, model=model)), dispatched=())
    return sum(total_bytes(each.saved) for each in whole.children)


def with_constant_probabilities(experts: Module) -> Module:
    """Experts whose routing probabilities need no gradient, so that their product with the activation does not save this."""
    children = (replace(each, saved=tuple(one for one in each.saved if one.name != UNWEIGHTED)) for each in experts.children)
    return replace(experts, children=tuple(children))


def _source(routing: Routing) -> str:
    if not routing.moe.grouped_gemm:
        return "SequentialMLP"
    return "GroupedMLP" if routing.moe.legacy_grouped_gemm else "TEGroupedMLP"


def _fc1(sizes: _Experts, *, saved_after: tuple[Tensor, ...]) -> Module:
    """`saved_after`: what the next modules save."""
    routing, shapes, split = sizes.routing, sizes.shapes, sizes.split
    moe = routing.moe
    shape = (sizes.gates * sizes.width, routing.width)
    received = routing.row_tensor("input", sizes.rows, made_in="mlp.experts" if routing.pads else "mlp")
    received = _by_expert(routing, received) if routing.pads and shapes.fp8 is None else received
    read, split_at_once = sizes.at_once(received)
    output = routing.row_tensor("output gradient", sizes.rows_at_once, sizes.gates * sizes.width)
    gradients = (
        *output_gradient(shapes, output, split=split_at_once, fused=moe.grouped_gemm),
        *expert_weight_gradients(routing, shape),
    )
    original = _saves_original_input(routing)
    return Module(
        name="linear_fc1",
        kind=ModuleKind.FC1,
        parameters=(
            _expert_weight(routing, rows=shape[0], columns=shape[1], full=(sizes.gates * moe.ffn_hidden_size, routing.width)),
            *expert_bias(routing, sizes.gates * moe.ffn_hidden_size),
        ),
        saved=for_weight((received,) if original else saved_input(shapes, received, split=split)),
        forward_workspace=(
            *_referenced_rows(routing),
            *forward_input(shapes, read, in_16_bit=False, original=original, split=split_at_once),
            sizes.fc1_output,
        ),
        backward_workspace=(
            _sequential_gradients(sizes, gradients, saved_after)
            if routing.runs_sequentially
            else (
                *for_weight(backward_input(shapes, received, original=original, split=split)),
                *gradients,
                routing.row_tensor("input gradient", sizes.rows),
            )
        ),
        source=GROUPED_LINEAR if moe.grouped_gemm else "TEColumnParallelLinear for each expert",
    )


def _sequential_gradients(sizes: _Experts, own: tuple[Tensor, ...], saved_after: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Beside a matrix of all rows, at the GEMM of the first expert or of the last but one, or at the concatenation.

    The matrix is the output gradient of all experts, which is freed when the last expert has read it, or then the concatenation.
    Each expert frees what its activation and fc2 have saved, and allocates the gradient of its input.
    """
    experts = sizes.routing.local_experts
    rows = sizes.rows * (experts - 1) // experts
    others = replace(sizes.routing.row_tensor(INPUT_GRADIENTS[1], rows), pieces=experts - 1)
    saved, gradient = total_bytes(saved_after) // experts, others.bytes // (experts - 1)
    more = max(saved, saved * (experts - 1) + gradient - others.bytes)  # of the last expert but one, and of the first
    last = Tensor(name=SAVED_BY_LAST, shape=(more,), dtype="uint8")
    # at the concatenation the gradients in `own` have been freed
    beyond_own = max(0, sizes.output_gradient.bytes - total_bytes(own))
    inputs = Tensor(name=INPUT_GRADIENTS[0], shape=(beyond_own,), dtype="uint8", formula="T·k rows, minus freed gradients")
    return (*own, *largest((others, last), (inputs,)))


def _factors(sizes: _Experts) -> tuple[Tensor, ...]:
    """What an unfused activation saves in addition to fc1's output, also when it is recomputed, before the backward of fc2."""
    routing, model, rows, width = sizes.routing, sizes.shapes.model, sizes.rows, sizes.width
    gate = saved_by_gate(model, lambda name, elements: _by_expert(routing, routing.row_tensor(name, rows, elements)), width)
    if sizes.fuses_activation:
        return gate
    return (*gate, _by_expert(routing, routing.row_tensor(UNWEIGHTED, rows, width)))


def _activation(sizes: _Experts, *, saved_after: tuple[Tensor, ...]) -> Module:
    """Activation times probabilities. Unfused, the multiplication saves its factor, and a gated activation the activated gate.

    `saved_after`: what the next module saves. Its backward frees this for one sequential expert; the others run later.
    """
    routing, model, width = sizes.routing, sizes.shapes.model, sizes.width
    factors = _factors(sizes)
    unfused = not sizes.fuses_activation
    promoted: tuple[Tensor, ...] = ()
    if unfused and routing.arriving_dtype == "fp32":
        promoted = (routing.row_tensor("weighted in fp32", sizes.rows_at_once, width, dtype="fp32"),)
    recomputed = factors if sizes.drops_activation else ()
    # the checkpoint references the output's gradient too: the gradient of the factor that is converted from fp32 is another tensor
    converted = (routing.row_tensor("factor's gradient", sizes.rows_at_once, width),) if sizes.drops_activation and promoted else ()
    others = routing.local_experts - 1 if routing.runs_sequentially else 0
    later = total_bytes(saved_after) * others // routing.local_experts
    kept = (Tensor(name=SAVED_BY_OTHERS, shape=(later,), dtype="uint8"),) if later else ()
    # unfused, the backward multiplies the gradient by the factors before it reads fc1's output
    read = replace(sizes.activation_input, read_later=unfused and not sizes.drops_activation)
    if unfused and not sizes.drops_activation:
        factors = _read_in_order(factors, gated=model.gated, promoted=bool(promoted))
    parts = 1 if model.fused_squared_relu and not unfused else 2
    both: tuple[Tensor, ...] = (routing.row_tensor("gradients of both factors", sizes.rows_at_once, parts * width),)
    if not unfused and model.bias_linear and routing.runs_sequentially and routing.arriving_dtype == "fp32":
        # `weighted_bias_quick_geglu_back` converts the gradient of the biased output from fp32 twice
        both = (*both, replace(both[0], name="gradient of the bias before its sum"))
    biased = not unfused and model.bias_linear and routing.runs_sequentially
    summing = (*both, *sum_buffer(sizes.shapes, rows=sizes.rows_at_once, columns=parts * width)) if biased else ()
    return Module(
        name="activation_func",
        kind=ModuleKind.ACTIVATION,
        function=True,
        saved=(read,) if sizes.drops_activation else (read, *factors),
        forward_workspace=(*_referenced_rows(routing), *recomputed, *promoted, sizes.activation_output),
        backward_workspace=(
            *kept,
            *recomputed,
            *sizes.recomputed_output,
            *converted,
            # in fp32: gradients of the result, of the activation, and of the probabilities before their sum
            *largest((routing.row_tensor("output gradient", sizes.rows_at_once, width), *(promoted * 3 or both)), summing),
        ),
        source="activation times probabilities" if unfused else "weighted_bias_swiglu_impl",
    )


def _read_in_order(factors: tuple[Tensor, ...], *, gated: bool, promoted: bool) -> tuple[Tensor, ...]:
    """The factors of an unfused activation, marked with when the backward reads those that are offloaded.

    The product of both halves of a gated activation has three gradients and its two factors. The product with the probabilities has
    less, unless it is `promoted` to fp32: then its factor is freed before its gradient is converted from fp32.
    """
    if not (gated or promoted):
        return factors
    halves = ("activated gate", "linear half with its offset")
    return tuple(
        replace(each, read_first=True)
        if promoted and each.name == UNWEIGHTED
        else replace(each, read_later=promoted or each.name not in halves)
        for each in factors
    )


def _fc2(sizes: _Experts) -> Module:
    routing, shapes, split = sizes.routing, sizes.shapes, sizes.split
    moe, rows, width = routing.moe, sizes.rows, sizes.width
    dropped, sequential = sizes.drops_activation, routing.runs_sequentially
    shape = (routing.width, width)
    read = _by_expert(routing, routing.row_tensor("input", rows, width, made_in="mlp.experts"))
    activated = sizes.activation_output
    # freed before bias and padding are handled
    split_at_once = sizes.at_once(activated)[1]
    quantized = forward_input(shapes, activated, in_16_bit=False, original=dropped, split=split_at_once)
    unpadded = (routing.row_tensor("output without padding", routing.rows),) if routing.pads and moe.grouped_gemm else ()
    biased = bias_added(routing)
    unsaved = (activated,) if dropped or shapes.fp8 is not None else ()
    results: tuple[Tensor, ...]
    if sequential:  # the outputs are concatenated after the activation of the last expert is freed
        concatenated = routing.row_tensor("output", routing.rows)
        results = (routing.row_tensor(OUTPUTS_OF_EXPERTS, rows), *largest((*unsaved, *quantized), (concatenated,)))
    else:
        output, after = routing.row_tensor("output", rows), (*biased, *unpadded)
        # a recomputed activation is freed before bias and padding are handled
        results = (output, *largest((*unsaved, *quantized), after)) if dropped else (*unsaved, output, *largest(quantized, after))
    # the gradient of the view of a padded output is a new tensor
    shares = ROW_GRADIENTS if sequential and not (routing.pads and shapes.fp8 is not None) else ""
    gradient = replace(sizes.at_once(sizes.output_gradient)[0], shares=shares)
    return Module(
        name="linear_fc2",
        kind=ModuleKind.FC2,
        parameters=(
            _expert_weight(routing, rows=shape[0], columns=shape[1], full=(routing.width, moe.ffn_hidden_size)),
            *expert_bias(routing, routing.width),
        ),
        saved=() if dropped else for_weight(saved_input(shapes, read, split=split)),
        forward_workspace=(*_referenced_rows(routing), *results),
        backward_workspace=largest(
            (
                *((activated, *_factors(sizes)) if dropped else ()),
                *sizes.copied_output,
                *output_gradient(shapes, gradient, split=split_at_once, fused=moe.grouped_gemm),
                *for_weight(backward_input(shapes, activated, original=dropped, split=split_at_once)),
                *(biased[:1] if moe.grouped_gemm else ()),
                routing.row_tensor("input gradient", sizes.rows_at_once, width),
                *expert_weight_gradients(routing, shape),
            ),
            (gradient, *bias_gradients(routing, sizes.rows_at_once)),
        ),
        source=GROUPED_LINEAR if moe.grouped_gemm else "TERowParallelLinear for each expert",
    )


def _saves_original_input(routing: Routing) -> bool:
    """Whether the first layer saves its 16-bit input in FP8 too, for `--offload-modules expert_fc1`."""
    return routing.shapes.inputs.offloads_expert_input and _source(routing) == "TEGroupedMLP"


def _by_expert(routing: Routing, tensor: Tensor) -> Tensor:
    """A tensor that each sequential expert allocates for itself."""
    if not routing.runs_sequentially:
        return tensor
    return replace(tensor, pieces=routing.local_experts)


def _expert_weight(routing: Routing, *, rows: int, columns: int, full: tuple[int, int]) -> Parameter:
    """Weights of all local experts of a layer: [E/ep, rows, columns]."""
    return Parameter(
        name="weight",
        shape=(routing.local_experts, rows, columns),
        dtype=routing.shapes.dtype,
        sharding="expert",
        full_shape=(routing.moe.num_experts, *full),
        quantized=routing.shapes.fp8 is not None,
        pieces=1 if routing.moe.legacy_grouped_gemm else routing.local_experts,
    )


def expert_weight_gradients(routing: Routing, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """A grouped GEMM returns the gradients of all local experts at once. Sequential experts return them one by one."""
    gradients = weight_gradient(routing.shapes, shape, cached=routing.shapes.inputs.cached_dummies.experts)
    if not gradients:
        return ()
    one = gradients[0]
    if not routing.moe.grouped_gemm:
        return (replace(one, name=WEIGHT_GRADIENT_OF_EXPERT),)
    all_weights = (routing.local_experts, *shape)
    return (replace(one, name=WEIGHT_GRADIENTS_OF_EXPERTS, shape=all_weights, formula="weights of the local experts"),)


def _referenced_rows(routing: Routing) -> tuple[Tensor, ...]:
    """Rows as received and as padded. Local variables reference them until the experts return.

    In FP8 no layer saves them, and of sequential experts only one has padded rows at a time. In 16 bit the first layer saves the
    rows that it reads, which are padded ones if the launch uses FP8; so it does if these are offloaded.
    """
    quantized = routing.shapes.fp8 is not None and not _saves_original_input(routing)
    rows = routing.multiplied_rows // (routing.local_experts if routing.runs_sequentially else 1)
    padded = (routing.row_tensor("padded rows", rows),) if routing.pads and quantized else ()
    return (*dispatched_rows(routing), *padded)
