"""Expected values of token counts, propagated through operations on meta tensors.

The choice of the router depends on data, which meta tensors do not have. With balanced routing every expert gets the same number
of tokens. The mean of a routing map is then k / E, sums of it are exact, and the tensors that Megatron copies to the host (tokens
per expert, splits of an all-to-all) have equal elements. This module keeps the mean of each storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from analyzer.units import MIB, round_up

aten = torch.ops.aten

DEFAULT_MULTIPLE = 32
"""The multiple to which Transformer Engine pads rows on a GPU with FP4 outside of FP8 and FP4. That of FP4 is larger."""


@dataclass(frozen=True)
class ImagePlaces:
    """The first token of each sample is that of its image."""

    token: int
    """The number that stands for an image."""
    share: float
    """Of the tokens of the text."""
    number: int
    """Images in a microbatch."""


class Means:
    """The known means of tensor elements. Tensors that share a storage share the mean."""

    def __init__(self) -> None:
        self._by_storage: dict[int, float] = {}
        self._padded: set[int] = set()
        self.multiple = 1
        """Rows of each expert are padded to this multiple for FP8; numbers of tokens then differ by half of it, see `spread`."""
        self.images: ImagePlaces | None = None
        """Where the images of a vision-language model are; None for other models."""
        self.padded_on_arrival = True
        """Whether the experts or the flex dispatcher pad them; otherwise the map of the router is padded."""

    def of(self, tensor: Any) -> float | None:
        """Return the mean of a tensor or a number; None if it is unknown."""
        if isinstance(tensor, (int, float)):
            return float(tensor)
        return self._by_storage.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None

    def put(self, tensor: torch.Tensor, mean: float | None, *, padded: bool = False) -> None:
        """Set the mean of a tensor. `padded`: its elements are numbers of rows that padding has made multiples of `multiple`."""
        storage = tensor.untyped_storage()._cdata
        if mean is not None:
            self._by_storage[storage] = mean
            (self._padded.add if padded else self._padded.discard)(storage)

    def copy(self, target: torch.Tensor, source: Any, factor: float = 1.0) -> None:
        """Set the mean of a tensor to that of another one, or of a number, times a factor."""
        mean = self.of(source)
        self.put(target, mean if mean is None else mean * factor, padded=self._is_padded(source))

    def _is_padded(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._padded

    def forget(self, storage: int) -> None:
        """Remove the mean of a freed storage."""
        self._by_storage.pop(storage, None)
        self._padded.discard(storage)

    def propagate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Set the mean of the result of an operation, if there is a rule for it."""
        rule = _RULES.get(func) or (_OF_IMAGES.get(func) if self.images is not None else None)
        if rule is not None and isinstance(result, torch.Tensor) and result.is_meta:
            self.put(result, rule(self, args, kwargs or {}, result), padded=func in _KEEP_PADDING and self._is_padded(args[0]))

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a CPU tensor of the same shape.

        Its elements are zero if the mean is unknown; otherwise they are integers that have the mean and differ as in `spread`.
        """
        mean = self.of(tensor)
        if not mean and tensor.numel() > MIB:  # e.g. the initial values of a quantized weight: never read, so left uninitialized
            return torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
        host = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype)
        if not mean:
            return host
        total = round(mean * host.numel())
        numbers = self.spread(total, host.numel(), pads=host.dim() == 1, padded=self._is_padded(tensor))
        host.view(-1).copy_(torch.tensor(numbers))
        return host

    def spread(self, total: int, number: int, *, pads: bool = True, padded: bool = False) -> list[int]:
        """Return `number` integers with this sum that differ by at most 1.

        If a later step `pads` them and each is already a multiple of `multiple`, every second one is half of it more, the others
        half of it less. Padding then adds half of a multiple to each on average, as for random numbers. Of `padded` numbers the
        mean includes this half; they are such multiples. With FP4 the numbers differ less, so that the same holds for layers in
        16 bit, which pad to `DEFAULT_MULTIPLE`.
        """
        each, further = divmod(total, number)
        half = self.multiple // 2
        offset = half if padded else min(half, DEFAULT_MULTIPLE // 2)
        is_multiple = not (each - (half if padded else 0)) % self.multiple
        if ((pads and self.padded_on_arrival) or padded) and half and not further and each and is_multiple and not number % 2:
            return [each + offset, each - offset] * (number // 2)
        return [each + (index < further) for index in range(number)]

    def padded(self, rows: int, multiple: int) -> int:
        """Return the rows padded to a multiple; half of it more if they are one already, as on average for random numbers."""
        return rows + multiple // 2 if rows % multiple == 0 else round_up(rows, multiple)

    def selected(self, mask: torch.Tensor) -> int | None:
        """Return the number of elements that a mask selects; None if it is unknown."""
        mean = self.of(mask)
        return None if mean is None else round(mean * mask.numel())


means = Means()
"""The means of the tensors of this process, which records one rank."""


def padded(means: Means, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap Megatron's `pad_routing_map`, which pads the token count of every expert to a multiple of `multiple`."""

    def pad(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
        mean, tokens = means.of(routing_map), routing_map.shape[0]
        result = real(routing_map, multiple)
        if mean is not None:
            means.put(result, means.padded(round(mean * tokens), multiple) / tokens, padded=True)
        return result

    return pad


def permuting_and_padding(means: Means, real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fused permutation that pads the rows of each expert, whose numbers it computes on the GPU."""

    def permute(tokens: Any, probs: Any, routing_map: Any, tokens_per_expert: torch.Tensor, align_size: int) -> Any:
        counts = tokens_per_expert.to(tokens.device)
        means.put(counts, float(tokens_per_expert.sum()) / tokens_per_expert.numel())
        *rest, rows = real(tokens, probs, routing_map, counts, align_size)
        means.put(rows, means.of(rows), padded=True)
        return (*rest, rows)

    return permute


def equal_parts(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the copy of a dispatcher's splits to the host: every tensor-parallel rank has as many rows as this rank."""

    def copy(self: Any, point: str, *args: Any, **kwargs: Any) -> Any:
        result = real(self, point, *args, **kwargs)
        if point == self.cuda_dtoh_point and not self.drop_and_pad and self.output_splits_tp is not None:
            self.output_splits_tp[:] = sum(self.output_splits)
        return result

    return copy


def _same(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    return means.of(args[0])


def _sum(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs
    mean = means.of(args[0])
    return None if mean is None else mean * args[0].numel() / max(1, result.numel())


def _scatter(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    target, dim, index, value = args[:4]
    before, put = means.of(target), means.of(value)
    if before is None or put is None:
        return None
    share = index.numel() / target.numel() if target.numel() else 0.0
    del dim
    return before * (1 - share) + put * share


def _index_put(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """Values at distinct indices, as the deterministic `topk_routing_with_score_function` writes its choice."""
    del result
    target, _, values, *accumulate = args
    before, put = means.of(target), means.of(values)
    if before is None or put is None or any(accumulate) or kwargs.get("accumulate") or not target.numel():
        return None
    if len(args[1]) == 1 and args[1][0].dtype is torch.bool:
        selected = means.of(args[1][0])
        return None if selected is None else before * (1 - selected) + put * selected
    written = max((index.numel() for index in args[1] if index is not None), default=values.numel())
    share = max(written, values.numel()) / target.numel()
    return before * (1 - share) + put * share


def _differs(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """`indices != -1`: the mean of an index tensor with -1 for no choice is the share of its other elements.

    `mask != True`: the share of the elements that are not in the mask.
    """
    del kwargs, result
    mean = means.of(args[0])
    if args[1] is True:
        return None if mean is None else 1 - mean
    return mean if args[1] == -1 else None


def _scalar(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float:
    del means, kwargs, result
    return float(args[0])


def _constant(value: float) -> Callable[..., float]:
    return lambda *_: value


def _multiply(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    left, right = means.of(args[0]), means.of(args[1])
    return None if left is None or right is None else math.prod((left, right))


def _divide(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    left, right = means.of(args[0]), means.of(args[1])
    return None if left is None or not right else left / right


def _ceiling(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """Of numbers that differ by half a multiple, as in `Means.spread`, if the mean is an integer."""
    del kwargs, result
    mean = means.of(args[0])
    return mean if mean is None else mean + 0.5 if mean == int(mean) else math.ceil(mean)


_RULES: dict[Any, Callable[..., float | None]] = {
    aten.zeros.default: _constant(0.0),
    aten.zeros_like.default: _constant(0.0),
    aten.scalar_tensor.default: _scalar,
    aten.ones_like.default: _constant(1.0),
    aten.scatter.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_.value: _scatter,
    aten.index_put_.default: _index_put,
    aten._to_copy.default: _same,
    aten.clone.default: _same,
    aten.index_select.default: _same,
    aten.ne.Scalar: _differs,
    aten.logical_and.default: _same,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _divide,
    aten.ceil.default: _ceiling,
}
"""Rules for the operations between the router and a value on the host. Views share the storage and need no rule."""


def _is_image(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    return means.images.share if means.images is not None and args[1] == means.images.token else None


def _is_in_sequence(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """`places >= 0`, of the places before those of the tokens: images are at the begin of their samples, the text follows."""
    del kwargs, result
    return None if means.images is None or args[1] != 0 else float(args[0].numel() > means.images.number)


def _add(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    left, right = means.of(args[0]), means.of(args[1])
    return None if left is None or right is None else left + right


def _subtract(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    left, right = means.of(args[0]), means.of(args[1])
    return None if left is None or right is None else left - right


def _any(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    del kwargs, result
    share = means.of(args[0])
    return None if share is None else float(share > 0)


def _filled(means: Means, args: Any, kwargs: Any, result: torch.Tensor) -> float:
    del means, kwargs, result
    return float(args[1])


_OF_IMAGES: dict[Any, Callable[..., float | None]] = {
    aten.full.default: _filled,
    aten.ge.Tensor: _constant(0.0),  # places of padding: there is none
    aten.ones.default: _constant(1.0),
    aten.eq.Scalar: _is_image,
    aten.ge.Scalar: _is_in_sequence,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _subtract,
    aten.max.default: _same,
    aten.any.default: _any,
}
"""The same between the tokens of a vision-language model and the lengths of its sequences, which are equal."""
_KEEP_PADDING = frozenset({rule for rule in _RULES if _RULES[rule] in (_same, _sum)})
"""Operations whose results are numbers of padded rows if their first arguments are."""
