"""The central type: a tree of modules, each with its parameters, saved tensors, workspace and collectives.

Formulas build one tree per kind of pipeline chunk, and all reports are computed from it. Symbols in formulas follow
the papers: s sequence (local to a context-parallel rank), b microbatch, h hidden, a heads, g key/value groups,
d elements of a head, f feed-forward width, V padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final, Literal, TypeVar

from analyzer.modules.kinds import ModuleKind
from analyzer.units import BLOCK, ceil_div, dtype_bytes, round_up

Sharding = Literal["tensor", "replicated", "expert"]
Phase = Literal["forward", "backward", "recompute", "gradient", "parameter"]
Part = Literal["", "encoder", "decoder", "cross", "vision", "projector", "text", "tags"]
"""A part of a T5: encoder, decoder, or the attention between them. A part of a vision-language model beside the decoder."""

STREAM = "stream"
LAYER = "."
MODEL_PATH = "/"
OUTPUT_GRADIENT = "output gradient"
"""Name of the gradient of a module's output."""
ACTIVATION_OUTPUT = "activation output"
"""Name of the output of the experts' activation."""
OUTPUTS_OF_EXPERTS = "outputs of the experts"
"""Name of the outputs of sequential experts, before they are concatenated."""

SIDE_STREAM: Final = 1
"""The second CUDA stream of attention, and that of the communication of experts. The default stream is 0."""
LAYER_STREAM: Final = 5
"""The stream of the shared experts. In some releases each layer has one of its own (`shared_expert_streams`)."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A weight as one rank stores it."""

    name: str
    shape: tuple[int, ...]
    """Local shape, after tensor-parallel sharding."""
    dtype: str
    sharding: Sharding = "replicated"
    full_shape: tuple[int, ...] = ()
    """Shape without parallelism; empty if equal to `shape`."""
    shared_embedding: bool = False
    """Tied word embedding with pp > 1: its gradient is all-reduced over the embedding group, in a separate bucket."""
    sequence_parallel: bool = False
    """Its gradient is summed over tensor-parallel ranks once per step (norm weights, row biases under SP; q/k norms always)."""
    averaged: bool = False
    """Its gradient is averaged over tensor-parallel ranks once per step, apart from those that are summed."""
    frozen: bool = False
    """Not trained: it has no gradient and no optimizer states, and no buffer."""
    original: bool = False
    """Frozen, and copied: the copy is trained, and is the parameter of the model (`AdapterSpec.trained_copies`)."""
    read_by_reference: bool = False
    """Megatron reads the parameter that it created, not that of the module. FSDP2 replaces the latter, which gets no gradient."""
    quantized: bool = False
    """Used in FP8 GEMMs: cast from `dtype`, or stored in FP8 with `--fp8-param-gather`."""
    pieces: int = 1
    """Number of equal parameters that it represents: one per local expert."""

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return prod(self.shape)

    @property
    def full_numel(self) -> int:
        """Elements without parallelism."""
        return prod(self.full_shape or self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """An activation or a temporary tensor. `formula` describes its size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    formula: str = ""
    shares: str = ""
    """Name of the tensor whose storage it uses. Then it adds no memory."""
    pieces: int = 1
    """Number of allocations of equal size."""
    made_in: str = ""
    """Path of the module that allocates it, relative to the layer (outside layers: to the model). Empty: the module that lists it.

    `STREAM` is the preceding layer, embedding or pipeline stage, `LAYER` the layer itself. A path that begins with
    `MODEL_PATH` is relative to the model, also inside layers.
    """
    lingers: bool = False
    """A module attribute references it after its backward, until the module's next forward; also under a checkpoint."""
    in_graph: bool = False
    """The context of an autograd function references it, so that it exists as long as the output of its microbatch. The schedule
    replaces that output by the one of the next forward."""
    discarded: bool = False
    """A group of checkpoints frees it when the last layer of the chunk has run, and allocates it again before the backward of that
    layer (`Module.discards`)."""
    strided: bool = False
    """Saved as a view that is not contiguous. Transformer Engine leaves it on the GPU when it offloads a layer."""
    read_first: bool = False
    """The backward of its module begins by copying it, and no longer references it. It is freed then if it was copied back from
    the host."""
    read_later: bool = False
    """The backward of its module reads it after the peak of that backward. If this backward copies it back from the host, it is not
    on the GPU at the peak."""
    half_saved: bool = False
    """Saved as a view of half of each row. Its copy in host memory, and the one back on the GPU, have half of its elements."""
    for_weight: bool = False
    """Only the gradients of the weights of its module need it. It does not exist if these are frozen (`freezing.frozen`)."""
    stream: int = 0
    """The stream that is current when it is allocated, if that is not the default one: `SIDE_STREAM`, or `LAYER_STREAM`. PyTorch's
    allocator uses its block again only for requests of that stream."""

    bytes: int = field(init=False, compare=False, repr=False)
    """Allocated bytes, rounded up to allocator blocks; 0 if it uses the storage of another tensor."""

    def __post_init__(self) -> None:
        size = 0
        if not self.shares:
            size = self.pieces * round_up(ceil_div(dtype_bytes(self.dtype, prod(self.shape)), self.pieces), BLOCK)
        object.__setattr__(self, "bytes", size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Communication that a module issues once per microbatch (phases forward, backward, recompute) or per iteration."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast"]
    group: str
    """Key of the JSON report's `groups`: tp, pp, dp, dp_cp, cp, ep, etp, edp, tp_ep, embd, pos_embd, mp."""
    shape: tuple[int, ...]
    """Shape of the full tensor for all_gather and reduce_scatter, else of the message."""
    dtype: str
    phase: Phase
    count: int = 1
    """Number of consecutive calls with this shape."""
    for_weight: bool = False
    """Only the gradients of the weights of its module need it."""
    dtype_without_gradients: str = ""
    """Element type in the first forward under a checkpoint, if it differs there."""

    @property
    def message_bytes(self) -> int:
        """Payload of one call on one rank in bytes: the full tensor, even if a rank contributes only a part."""
        return dtype_bytes(self.dtype, prod(self.shape))


@dataclass(frozen=True, kw_only=True)
class Module:
    """One node of the tree. The tensors of a node do not include those of its children."""

    name: str
    kind: ModuleKind = ModuleKind.OTHER
    parameters: tuple[Parameter, ...] = ()
    saved: tuple[Tensor, ...] = ()
    """Saved for backward: allocated from its forward until its backward."""
    offloaded: tuple[Tensor, ...] = ()
    """Saved for backward in host memory: copied to the host after its forward, and back before its backward."""
    reloaded_early: bool = False
    """`offloaded` is copied back before the backward of the layer begins, by a module of the following layer."""
    reloaded_within: bool = False
    """`offloaded` is copied back by the backward of a later module of the layer (`reloads`)."""
    reloaded_ahead: tuple[Tensor, ...] = ()
    """Those of `backward_workspace` that are offloaded tensors of preceding layers. They are on the GPU before its backward."""
    saved_by_hooks: bool = False
    """`saved` is referenced by hooks that give each tensor away when the backward reads it."""
    reloads: tuple[Tensor, ...] = ()
    """Tensors allocated at the end of its backward until the backward of the block ends: offloaded tensors of a preceding module
    that are copied back, and gradients that FSDP has not reduced."""
    frees_reloads: bool = False
    """The end of its backward frees `reloads` of its parts. A block can contain several such modules."""
    forward_workspace: tuple[Tensor, ...] = ()
    """Temporary tensors at the peak of its forward, in addition to everything saved up to and including itself."""
    recompute_workspace: tuple[Tensor, ...] | None = None
    """The same for the forward that a checkpoint runs again; None if equal to `forward_workspace`."""
    absent_without_gradients: frozenset[str] = frozenset()
    """Names in `saved` and `forward_workspace` of tensors that are not allocated at the peak of the first forward under a
    checkpoint."""
    backward_workspace: tuple[Tensor, ...] = ()
    """Temporary tensors at the peak of its backward, in addition to everything saved up to and including itself."""
    referenced: tuple[Tensor, ...] = ()
    """Referenced by a module attribute from one forward to the next, not by autograd. One copy exists, however many
    microbatches are in flight."""
    outlives: tuple[Tensor, ...] = ()
    """Still allocated after its backward, until its next forward: a submodule attribute holds a tensor whose autograd graph
    references it."""
    discards: tuple[Tensor, ...] = ()
    """Saved tensors of earlier modules that its forward frees, and that its backward allocates again: what a group of checkpoints
    recomputes together."""
    forward_held: tuple[Tensor, ...] = ()
    """Kept alive by a local variable of the calling function until the chunk's forward returns; freed before backward."""
    waiting: tuple[Tensor, ...] = ()
    """The gradient of a tied embedding that its backward computes: allocated until the backward of the embedding adds to it."""
    collectives: tuple[Collective, ...] = ()
    overlaps_collectives: bool = False
    """A linear layer whose tensor-parallel communication overlaps with its GEMMs (`--tp-comm-overlap`)."""
    children: tuple[Module, ...] = ()
    """In order of execution. The workspace of a node with children is allocated throughout all of them."""
    repeats: bool = False
    """It has the weights of an earlier module, so those of it and its children are not counted again."""
    output_of: str = ""
    """The child whose tensor is returned as the output; empty if the module allocates its output."""
    fsdp_unit: bool = True
    """Of a layer: Megatron-FSDP gathers its parameters together (`buffers.fsdp.is_unit`)."""
    function: bool = False
    """A function call inside its parent, not a Megatron module: recorders attribute its allocations to the parent."""
    recomputed_last: tuple[Tensor, ...] = ()
    """Of a checkpoint: what its recomputation allocates last. It is referenced until the backward of the checkpoint ends."""
    inner_stream: int = 0
    """The same for all tensors of its children."""
    recomputed: bool = False
    """The children's saved tensors are freed after forward and computed again in backward; `saved` lists what stays allocated."""
    input_gradient: bool = True
    """False: its weights are trained, and its input needs no gradient (`freezing.without_input_gradient`)."""
    frozen: bool = False
    """Its weights, or those that it shares with another module, are not trained."""
    differentiable: bool = True
    """False: it has no backward, because neither its weights nor its input need gradients (`freezing.frozen`)."""
    part: Part = ""
    """Where the module is in a T5 or a vision-language model, which decides the sizes of its kernels (`ModuleInputs.of_part`)."""
    source: str = ""
    """The module of megatron-core or Transformer Engine that it models; empty for a few. Some formulas tell implementations of one
    kind apart by it."""

    @cached_property
    def retained_bytes(self) -> int:
        """Bytes saved for backward by this module and its children."""
        own = total_bytes(self.saved) - total_bytes(self.discards)
        return own if self.recomputed else own + sum(child.retained_bytes for child in self.children)

    @cached_property
    def copied_back(self) -> tuple[Tensor, ...]:
        """The offloaded tensors on the GPU in backward. Tensors that shared a storage are separate copies."""
        return tuple(replace(half_of(tensor) if tensor.half_saved else tensor, shares="") for tensor in self.offloaded)

    @cached_property
    def copied_on_demand(self) -> tuple[Tensor, ...]:
        """Of `copied_back`, the tensors on the GPU at the same time if its own backward copies each one when it reads it."""
        names = {tensor.name for tensor in self.offloaded}
        pairs = zip(self.copied_back, self.offloaded, strict=True)
        return tuple(back for back, tensor in pairs if tensor.shares not in names and not (tensor.read_first or tensor.read_later))

    @cached_property
    def retained_before_backward(self) -> int:
        """Bytes for the backward of this module and its children that are on the GPU when it begins."""
        early = total_bytes(self.copied_back) if self.reloaded_early else 0
        own = early + total_bytes(self.saved) - total_bytes(self.discards)
        return own if self.recomputed else own + sum(child.retained_before_backward for child in self.children)

    @cached_property
    def lingering_bytes(self) -> int:
        """Bytes that module attributes reference between iterations, in this module and its children."""
        own = (*self.referenced, *self.outlives, *(tensor for tensor in self.saved if tensor.lingers))
        return total_bytes(own) + sum(child.lingering_bytes for child in self.children)

    @cached_property
    def lingering_once(self) -> int:
        """Of `lingering_bytes`, those that nothing else references, or that a checkpoint would free: one copy exists."""
        if self.recomputed:  # what a checkpoint inside leaves is counted with its backward
            inside = sum(child.lingering_once if child.recomputed else child.lingering_bytes for child in self.children)
            return total_bytes(self.referenced) + inside
        return total_bytes(self.referenced) + sum(child.lingering_once for child in self.children)

    @cached_property
    def graph_bytes(self) -> int:
        """Bytes of `Tensor.in_graph` in this module and its children, outside checkpoints."""
        own = sum(tensor.bytes for tensor in self.saved if tensor.in_graph)
        return 0 if self.recomputed else own + sum(child.graph_bytes for child in self.children)

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Every node with its dotted path, parents first."""
        path = f"{prefix}.{self.name}" if prefix else self.name
        yield path, self
        for child in self.children:
            yield from child.walk(path)

    def derived(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """`function(module, *arguments)`, cached per module object. `function` must depend on its arguments only."""
        cache: dict[object, object] = self.__dict__.setdefault("_derived", {})
        key = (function, *arguments) if arguments else function
        if key not in cache:
            cache[key] = function(self, *arguments)
        return cache[key]  # type: ignore[return-value]

    def forget(self) -> None:
        """Drops what `derived` has cached in this module and its children.

        Operations refer back to their module, so that only the garbage collector would free both.
        """
        self.__dict__.pop("_derived", None)
        for child in self.children:
            child.forget()


def with_part(module: Module, part: Part) -> Module:
    """The module with its children in a part of the model. Those that are in another part stay there."""
    if module.part:
        return module
    return replace(module, part=part, children=tuple(with_part(child, part) for child in module.children))


def for_weight(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, marked as needed for the gradients of weights only."""
    return tuple(replace(tensor, for_weight=True) for tensor in tensors)


def half_of(tensor: Tensor) -> Tensor:
    """Half of each row of a tensor."""
    return replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] // 2), half_saved=False)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that are allocated at the same time."""
    return sum(tensor.bytes for tensor in tensors)


def largest(*groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The largest, in bytes, of groups of tensors that are never allocated at the same time."""
    return max(groups, key=total_bytes)


def parameters(tree: Module) -> Iterator[Parameter]:
    """Every parameter of a tree, in the order of execution."""
    if tree.repeats:
        return
    yield from tree.parameters
    for child in tree.children:
        yield from parameters(child)
