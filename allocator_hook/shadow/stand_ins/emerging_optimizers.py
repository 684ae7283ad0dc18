"""The part of emerging_optimizers (releases of November 2025 to July 2026) that megatron-core calls: Muon and Lion.

Operations and their order are those of the package, so that PyTorch allocates the same tensors. Values are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch

PACKAGE = "emerging_optimizers"


class _Decaying(torch.optim.Optimizer):
    """Creates the state `state_name` of each parameter at its first step, and applies decoupled weight decay."""

    state_name = ""

    def states_of(self, group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Create the missing states of a group. Then yield each parameter that has a gradient, and its state."""
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter][self.state_name] = torch.zeros_like(parameter.data)
        for parameter in group["params"]:
            if parameter.grad is not None:
                if group["weight_decay"]:
                    parameter.add_(parameter, alpha=-group["weight_decay"] * group["lr"])
                yield parameter, self.state[parameter][self.state_name]


class OrthogonalizedOptimizer(_Decaying):
    """`OrthogonalizedOptimizer`: momentum, then an update that a subclass orthogonalizes."""

    state_name = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        fp32_matmul_prec: str = "medium",
        weight_decay_method: str = "decoupled",
        **options: Any,
    ) -> None:
        """`momentum` and `nesterov` were named `momentum_beta` and `use_nesterov` before 2026."""
        self.nesterov = bool(options.pop("nesterov", options.pop("use_nesterov", False)))
        momentum = options.pop("momentum_beta", momentum)
        self.fp32_matmul_prec = fp32_matmul_prec
        # `_get_param_groups` of Megatron gives a rank without matrices the groups of other ranks, without parameters
        super().__init__(params or [{"params": []}], {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.scaled_orthogonalize_fn(grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, state in self.states_of(group):
                grad: torch.Tensor = p.grad  # type: ignore[assignment]
                state.lerp_(grad, 1 - group["momentum"])
                grad = grad.lerp(state, group["momentum"]) if self.nesterov else state
                with _matmul_precision(self.fp32_matmul_prec):
                    update = self.orthogonalize(p, grad)
                p.add_(update, alpha=-group["lr"])


class AdaptiveMuon(OrthogonalizedOptimizer):
    """A base class that megatron-core names from 0.18 on. No job uses it."""


class Lion(_Decaying):
    """`Lion`: one moment. The update is one fused kernel that writes the moment in place."""

    state_name = "exp_avg"

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01, **_: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, state in self.states_of(group):
                update = _lion_update(p.grad, state, *group["betas"])
                p.data.add_(update, alpha=-group["lr"])


def _lion_update(grad: Any, moment: torch.Tensor, beta1: float, beta2: float) -> torch.Tensor:
    """`calculate_lion_update`, which torch.compile fuses."""
    function = torch.compile(_unfused_lion_update)
    return function(grad, moment, beta1, beta2)


def _unfused_lion_update(grad: torch.Tensor, moment: torch.Tensor, beta1: float, beta2: float) -> torch.Tensor:
    update = moment.lerp(grad, 1 - beta1)
    moment.lerp_(grad, 1 - beta2)
    return torch.sign(update)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def newton_schulz(x: torch.Tensor, steps: int, *, transpose: bool | None = None, tp_group: Any = None) -> torch.Tensor:
    """`newton_schulz`: `steps` iterations in bf16 with the matmul precision "medium", otherwise in fp32."""
    transpose = x.shape[-2] > x.shape[-1] if transpose is None else transpose
    x = x.mT if transpose else x
    if tp_group is None:
        iterate = torch.nn.functional.normalize(x, p=2, dim=(-2, -1))  # type: ignore[arg-type]
    else:
        squares = (x * x).sum()
        torch.distributed.all_reduce(squares, group=tp_group)
        iterate = x / torch.sqrt(squares).clamp_min(1e-7)
    if torch.get_float32_matmul_precision() == "medium":
        iterate = iterate.to(torch.bfloat16)
    for _ in range(steps):
        iterate = _iteration(iterate, tp_group)
    iterate = iterate.to(torch.float32)
    return iterate.mT if transpose else iterate


def _iteration(iterate: torch.Tensor, tp_group: Any) -> torch.Tensor:
    square = iterate @ iterate.mT
    if tp_group is not None:
        torch.distributed.all_reduce(square, group=tp_group)
    polynomial = torch.addmm(square, square, square)
    return torch.addmm(iterate, polynomial, iterate)


def newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: int | None = None,
    mode: str = "duplicated",
    tp_mode: str | None = None,
) -> torch.Tensor:
    """`newton_schulz_tp`: the matrix is gathered on every rank ("duplicated"), or stays split ("distributed")."""
    if partition_dim is None:
        return newton_schulz(x, steps)
    if (tp_mode or mode) == "distributed":
        return newton_schulz(x, steps, transpose=partition_dim == 0, tp_group=tp_group)
    shards = [torch.empty_like(x) for _ in range(tp_group.size())]
    torch.distributed.all_gather(shards, x, tp_group)
    gathered = torch.cat(shards, dim=partition_dim)
    return newton_schulz(gathered, steps).chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]


def modules() -> dict[str, ModuleType]:
    """Return the replacement modules by import name."""
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".registry": {"get_optimizer_name_list": list},
        ".soap": {"SOAP": _Decaying},
        ".orthogonalized_optimizers": {
            "AdaptiveMuon": AdaptiveMuon,
            "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
            "get_muon_scale_factor": lambda *_, **__: 1.0,
        },
        ".orthogonalized_optimizers.muon_utils": {
            "newton_schulz": newton_schulz,
            "newton_schulz_tp": newton_schulz_tp,
            "NSCoeffT": Literal["simple", "quintic", "polar_express", "aol", "custom"],
        },
        ".scalar_optimizers": {"Lion": Lion},
    }
    made = {}
    for suffix, names in contents.items():
        module = ModuleType(PACKAGE + suffix)
        module.__path__ = []
        for name, value in names.items():
            setattr(module, name, value)
        made[PACKAGE + suffix] = module
    made[PACKAGE].registry = made[f"{PACKAGE}.registry"]  # type: ignore[attr-defined]
    return made
