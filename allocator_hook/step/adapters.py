"""Adapters beside frozen linear layers, with the modules and the calls of Megatron-Bridge (megatron/bridge/peft).

`ParallelLinearAdapter` has layers of Megatron itself without sequence parallelism. `LoRALinear.forward` adds its output to that of
the frozen layer; here the layer itself does, so that its name stays.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch

from analyzer.specs import TrainingJob
from analyzer.specs.adapters import AdapterSpec


def add_adapters(job: TrainingJob, config: Any, model: Any) -> None:
    """Freeze a model and add the adapters of the job to its linear layers."""
    adapters = job.model.adapters
    if adapters is None:
        return
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in adapters.targets:
            kind = _Adapter if adapters.layers == "megatron" else _EngineAdapter
            module.adapter = kind(adapters, config, module)
            module.forward = partial(_forward, module, module.forward)
    if config.recompute_method is not None or adapters.layers == "transformer_engine":
        model.decoder.forward = partial(_with_input_gradient, model.decoder.forward)


def _with_input_gradient(forward: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
    """`maybe_enable_recompute_inputs_grad`: autograd calls checkpoints only if an input needs a gradient.

    `GPTModel._preprocess` of mcore-bridge, which ms-swift uses, requests one without checkpoints too.
    """
    if torch.is_tensor(hidden_states) and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_(True)
    return forward(hidden_states, *args, **keywords)


def _forward(module: Any, frozen_layer: Any, x: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
    """`AdapterWrapper.base_linear_forward` and `LoRALinear.forward`."""
    found = frozen_layer(x, *args, **keywords)
    if len(found) == 3:
        output, bias, x = found
    else:
        output, bias = found
        if isinstance(output, tuple):
            output, x = output
    adapted = module.adapter(x.contiguous(), *args)
    return output + adapted.reshape(output.shape), bias


def _grouped(layer: Any, inputs: int, outputs: int, config: Any) -> Any:
    """The projections of an adapter for each expert (`LoraParallelLinear` of ms-swift)."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    options = {"parallel_mode": None, "config": config, "init_method": torch.nn.init.xavier_normal_}
    return TEGroupedLinear(layer.num_gemms, inputs, outputs, bias=False, skip_bias_add=False, is_expert=True, **options)


def _sum_over_experts(gradient: Any) -> Any:
    """`_allreduce_shared_expert_grad`."""
    from megatron.core import parallel_state

    torch.distributed.all_reduce(gradient, group=parallel_state.get_expert_model_parallel_group())
    return gradient


class _Adapter(torch.nn.Module):
    """`ParallelLinearAdapter` with the defaults of `LoRA`."""

    def __init__(self, adapters: AdapterSpec, config: Any, layer: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        whole = copy(config)
        whole.sequence_parallel = False
        self._split_input = hasattr(layer, "input_is_parallel") or type(layer).__name__.startswith("TERow")
        duplicated = type(layer).__name__ == "TELinear"
        tensor = config.tensor_model_parallel_size
        grouped = "Grouped" in type(layer).__name__
        tensor = 1 if grouped else tensor
        rows, columns = (layer.out_features, layer.in_features) if grouped else layer.weight.shape
        options = {"config": whole, "bias": False, "init_method": torch.nn.init.xavier_normal_, "is_expert": grouped}
        self._exchanges = config.sequence_parallel and not grouped
        self._per_expert = grouped and adapters.per_expert
        if self._per_expert:
            self.linear_in = _grouped(layer, columns, adapters.rank, whole)
            self.linear_out = _grouped(layer, adapters.rank, rows, whole)
            self._finish(adapters, config)
            return
        if self._split_input:
            columns *= tensor
            self.linear_in = RowParallelLinear(columns, adapters.rank, input_is_parallel=True, skip_bias_add=True, **options)
        else:
            rows *= 1 if duplicated else tensor
            self.linear_in = ColumnParallelLinear(
                columns, adapters.rank, gather_output=True, disable_grad_reduce=config.sequence_parallel, **options
            )
            if hasattr(layer, "return_layernorm_output"):
                layer.return_layernorm_output = True
                layer.return_layernorm_output_gathered = config.sequence_parallel
                self._exchanges = False
        if getattr(layer, "parallel_mode", "") is None:  # each rank adapts its own tokens, or a dispatcher exchanges them
            self._exchanges = False
        self.linear_out = ColumnParallelLinear(adapters.rank, rows, gather_output=self._split_input or duplicated, **options)
        if grouped and config.expert_model_parallel_size > 1:
            for projection in (self.linear_in, self.linear_out):
                projection.weight.register_hook(_sum_over_experts)
        self._finish(adapters, config)

    def _finish(self, adapters: AdapterSpec, config: Any) -> None:
        self.dropout = torch.nn.Dropout(0.1) if adapters.dropout else torch.nn.Identity()
        if config.bf16 or config.fp16:
            self.to(torch.bfloat16 if config.bf16 else torch.float16)

    def forward(self, x: Any, *splits: Any) -> Any:
        """[s, b, k] → [s, b, n], or the parts of this rank. `splits`: tokens of each expert."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

        x = self.dropout(x)
        if self._per_expert:
            x, _ = self.linear_in(x, *splits)
            x, _ = self.linear_out(x, *splits)
            return x * 2.0
        if self._exchanges and not self._split_input:
            x = gather_from_sequence_parallel_region(x)
        x, _ = self.linear_in(x)
        x, _ = self.linear_out(x)
        if self._exchanges and self._split_input:
            x = scatter_to_sequence_parallel_region(x)
        return x * 2.0


class _EngineAdapter(_Adapter):
    """`LoraParallelLinear` of mcore-bridge, which ms-swift uses: layers of Transformer Engine."""

    def __init__(self, adapters: AdapterSpec, config: Any, layer: Any) -> None:
        if "Grouped" in type(layer).__name__:
            super().__init__(adapters, config, layer)
            return
        torch.nn.Module.__init__(self)
        from megatron.core.extensions import transformer_engine as engine

        tensor, split = config.tensor_model_parallel_size, type(layer).__name__.startswith("TERow")
        rows, columns = layer.weight.shape
        options = {"config": config, "bias": False, "skip_bias_add": False, "init_method": torch.nn.init.xavier_normal_}
        whole = {"parallel_mode": "duplicated", "skip_weight_param_allocation": False, **options}
        self._per_expert = self._exchanges = self._split_input = False
        if hasattr(layer, "return_layernorm_output"):
            layer.return_layernorm_output = True
        if split:
            self.linear_in = engine.TERowParallelLinear(
                columns * tensor, adapters.rank, input_is_parallel=True, is_expert=False, **options
            )
            self.linear_out = engine.TELinear(adapters.rank, rows, **whole)
            self.linear_in.parallel_mode = layer.parallel_mode
        else:
            self.linear_in = engine.TELinear(columns, adapters.rank, **whole)
            if type(layer).__name__ == "TELinear":
                self.linear_out = engine.TELinear(adapters.rank, rows, **whole)
            else:
                self.linear_out = engine.TEColumnParallelLinear(
                    adapters.rank, rows * tensor, gather_output=False, is_expert=False, **options
                )
                self.linear_out.parallel_mode = layer.parallel_mode
        if config.sequence_parallel:
            for each in (self.linear_in, self.linear_out):
                if type(each).__name__ == "TELinear":
                    each.weight.sequence_parallel = True
        self._finish(adapters, config)
