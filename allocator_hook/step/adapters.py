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
            _add_adapter(name, module, adapters, config)
    if job.model.head_outputs and model.post_process:
        model.output_layer.requires_grad_(True)
    _add_trained_copies(adapters, model)
    if config.recompute_method is not None or adapters.layers == "transformer_engine":
        model.decoder.forward = partial(with_input_gradient, model.decoder.forward)


def _add_trained_copies(adapters: AdapterSpec, model: Any) -> None:
    """Keep the weights of modules that are trained beside adapters in a frozen copy (`ModulesToSaveWrapper` of PEFT)."""
    modules = dict(model.named_modules())
    for path in ("embedding.word_embeddings", "output_layer"):
        layer = modules.get(path)
        if path.rpartition(".")[2] not in adapters.trained_copies or layer is None or layer.weight is None:
            continue
        layer.original_weight = torch.nn.Parameter(torch.empty_like(layer.weight), requires_grad=False)
        layer.weight.requires_grad_(True)


def _add_adapter(path: str, layer: Any, adapters: AdapterSpec, config: Any) -> None:
    """Replace the forward of a layer by that of its wrapper (`transform` of `LoRA`, `CanonicalLoRA` and `DoRA`)."""
    name = path.rpartition(".")[2]
    joins = {"linear_qkv": _interleaved, "linear_fc1": _concatenated}
    forward = _forward
    if adapters.method == "canonical" and name in joins and not path.endswith(".mlp.experts.linear_fc1"):
        layer.adapter = torch.nn.ModuleDict(
            {f"adapter_{part}": _Adapter(adapters, config, layer, rows=rows) for part, rows in _parts(name, layer, config).items()}
        )
        forward = partial(_canonical_forward, joins[name])
    elif adapters.layers == "transformer_engine":
        layer.adapter = _EngineAdapter(adapters, config, layer)
    elif adapters.per_expert and path.endswith((".mlp.experts.linear_fc1", ".mlp.experts.linear_fc2")):
        sizes = (layer.num_gemms, layer.in_features, layer.out_features, adapters.rank_of(experts=True))
        layer.adapter = _GroupedExpertAdapter(*sizes, dropout=adapters.dropout, config=config)
    else:
        layer.adapter = _Adapter(adapters, config, layer, path=path)
        if adapters.method == "dora":
            layer.adapter.add_magnitude(layer)
            forward = _dora_forward
    layer.forward = partial(forward, layer, layer.forward)


def _parts(name: str, layer: Any, config: Any) -> dict[str, int]:
    """The adapters of a layer with their numbers of outputs (`CanonicalLoRA.transform`)."""
    if name == "linear_qkv":
        query, key = (config.kv_channels * heads for heads in (config.num_attention_heads, config.num_query_groups))
        return {"q": query, "k": key, "v": key}
    width = layer.out_features * config.tensor_model_parallel_size // 2
    return {"up": width, "gate": width}


def _called(item: tuple[str, Any]) -> int:
    """The place of an adapter in the order of calls: gate is called before up, which is created first."""
    return ("adapter_q", "adapter_k", "adapter_v", "adapter_gate", "adapter_up").index(item[0])


def _base_forward(frozen_layer: Any, x: Any, *args: Any, **keywords: Any) -> tuple[Any, Any, Any]:
    """`AdapterWrapper.base_linear_forward`."""
    found = frozen_layer(x, *args, **keywords)
    if len(found) == 3:
        return found  # type: ignore[no-any-return]
    output, bias = found
    if isinstance(output, tuple):
        output, x = output
    return output, bias, x


def _canonical_forward(join: Any, module: Any, frozen_layer: Any, x: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
    """`LoRALinearSplitQKV.forward` and `LoRALinearSplitFC1UpGate.forward`."""
    output, bias, x = _base_forward(frozen_layer, x, *args, **keywords)
    parts = [adapter(x) for _, adapter in sorted(module.adapter.items(), key=_called)]
    adapted = join(module.config, *parts)
    return output + adapted, bias


def _interleaved(config: Any, query: Any, key: Any, value: Any) -> Any:
    """`LoRALinearSplitQKV._interleave_qkv`."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    each, leading = heads // groups, query.shape[:-1]
    query = query.reshape(-1, heads, size)
    key = key.reshape(-1, groups, size)
    value = value.reshape(-1, groups, size)
    chunks = []
    for i in range(groups):
        chunks += [query[:, i * each : (i + 1) * each, :], key[:, i : i + 1, :], value[:, i : i + 1, :]]
    joined = torch.cat(chunks, dim=1)
    return joined.reshape(*leading, -1)


def _concatenated(config: Any, gate: Any, up: Any) -> Any:
    del config
    return torch.cat([gate, up], dim=-1)


def _dora_forward(module: Any, frozen_layer: Any, x: Any) -> tuple[Any, Any]:
    """`DoRALinear.forward` without dropout, whose correction is a zero."""
    output, bias, x = _base_forward(frozen_layer, x)
    adapted = module.adapter(x.contiguous())
    return module.adapter.magnitude(module, output, adapted) + 0, bias


class _Magnitude(torch.nn.Module):
    """The product of `DoRALinear.forward` with the magnitude and the norm of the weight."""

    def forward(self, layer: Any, output: Any, adapted: Any) -> Any:
        """Return m / ||W + B A|| * (W x + B A x)."""
        scale = (layer.adapter.weight_magnitude / _weight_norm(layer)).view(1, 1, -1)
        return scale * (output + adapted)


def _weight_norm(layer: Any) -> Any:
    """`DoRALinear._get_weight_norm`."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    adapter = layer.adapter
    into, out_of = adapter.linear_in.weight, adapter.linear_out.weight
    if adapter.splits_input:
        out_of = gather_from_tensor_model_parallel_region(out_of.T).T
    else:
        into = gather_from_tensor_model_parallel_region(into.T).T
    weight = layer.weight + 2.0 * out_of @ into
    return torch.linalg.norm(weight, dim=1).to(weight.dtype).detach()


def with_input_gradient(forward: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
    """`maybe_enable_recompute_inputs_grad`: autograd calls checkpoints only if an input needs a gradient.

    `GPTModel._preprocess` of mcore-bridge, which ms-swift uses, requests one without checkpoints too.
    """
    if torch.is_tensor(hidden_states) and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_(True)
    return forward(hidden_states, *args, **keywords)


def _forward(module: Any, frozen_layer: Any, x: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
    """`AdapterWrapper.base_linear_forward` and `LoRALinear.forward`."""
    output, bias, x = _base_forward(frozen_layer, x, *args, **keywords)
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


def _can_regather(path: str, config: Any) -> bool:
    """`_sequence_parallel_input_regather_eligibility` without what depends on the call."""
    name, modules = path.rpartition(".")[2], config.recompute_modules or []
    covered = config.recompute_granularity == "full" or (name == "linear_fc1" and "mlp" in modules)
    return name in ("linear_qkv", "linear_fc1") and ".mlp.experts." not in path and not covered


class _Adapter(torch.nn.Module):
    """`ParallelLinearAdapter` with the defaults of `LoRA`."""

    def __init__(self, adapters: AdapterSpec, config: Any, layer: Any, *, path: str = "", rows: int | None = None) -> None:
        """`path`: that of the layer. `rows`: outputs of the adapter; None for those of the layer."""
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        whole = copy(config)
        whole.sequence_parallel = False
        self._split_input = hasattr(layer, "input_is_parallel") or type(layer).__name__.startswith("TERow")
        duplicated = type(layer).__name__ == "TELinear"
        tensor = config.tensor_model_parallel_size
        grouped = "Grouped" in type(layer).__name__
        tensor = 1 if grouped else tensor
        outputs, columns = (layer.out_features, layer.in_features) if grouped else layer.weight.shape
        rank = adapters.rank_of(experts=grouped)
        options = {"config": whole, "bias": False, "init_method": torch.nn.init.xavier_normal_, "is_expert": grouped}
        self._exchanges = config.sequence_parallel and not grouped
        self._regathers = adapters.regathers and config.sequence_parallel and _can_regather(path, config)
        self._per_expert = grouped and adapters.per_expert
        if self._per_expert:
            self.linear_in = _grouped(layer, columns, rank, whole)
            self.linear_out = _grouped(layer, rank, outputs, whole)
            self._finish(adapters, config)
            return
        if self._split_input:
            columns *= tensor
            self.linear_in = RowParallelLinear(columns, rank, input_is_parallel=True, skip_bias_add=True, **options)
        else:
            outputs *= 1 if duplicated else tensor
            self.linear_in = ColumnParallelLinear(
                columns, rank, gather_output=True, disable_grad_reduce=config.sequence_parallel, **options
            )
            if hasattr(layer, "return_layernorm_output"):
                layer.return_layernorm_output = True
                layer.return_layernorm_output_gathered = config.sequence_parallel and not adapters.regathers
                self._exchanges = self._exchanges and adapters.regathers
        if getattr(layer, "parallel_mode", "") is None:  # each rank adapts its own tokens, or a dispatcher exchanges them
            self._exchanges = self._regathers = False
        outputs = rows or outputs
        self.linear_out = ColumnParallelLinear(rank, outputs, gather_output=self._split_input or duplicated, **options)
        if grouped and config.expert_model_parallel_size > 1:
            for projection in (self.linear_in, self.linear_out):
                projection.weight.register_hook(_sum_over_experts)
        self._finish(adapters, config)

    @property
    def splits_input(self) -> bool:
        """Whether tensor-parallel ranks have parts of the input of the layer."""
        return bool(self._split_input)

    def add_magnitude(self, layer: Any) -> None:
        """`ParallelLinearDoRAAdapter.init_weight_magnitude`."""
        self.weight_magnitude = torch.nn.Parameter(torch.empty_like(layer.weight[:, 0]))
        self.magnitude = _Magnitude()

    def _finish(self, adapters: AdapterSpec, config: Any) -> None:
        self.dropout = torch.nn.Dropout(0.1) if adapters.dropout else torch.nn.Identity()
        if config.bf16 or config.fp16:
            self.to(torch.bfloat16 if config.bf16 else torch.float16)

    def forward(self, x: Any, *splits: Any) -> Any:
        """[s, b, k] → [s, b, n], or the parts of this rank. `splits`: tokens of each expert."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
        from megatron.core.tensor_parallel.random import is_checkpointing

        x = self.dropout(x)
        if self._per_expert:
            x, _ = self.linear_in(x, *splits)
            x, _ = self.linear_out(x, *splits)
            return x * 2.0
        regathers = self._regathers and not is_checkpointing()
        if self._regathers:
            self.linear_in.sequence_parallel = regathers
        if self._exchanges and not self._split_input and not regathers:
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
        self._per_expert = self._exchanges = self._regathers = self._split_input = False
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


class _GroupedExpertAdapter(torch.nn.Module):
    """`GroupedExpertLinearAdapter` (megatron/bridge/peft/utils.py) without expert-tensor parallelism, in bf16."""

    def __init__(self, experts: int, columns: int, rows: int, rank: int, *, dropout: bool, config: Any) -> None:
        super().__init__()
        self.linear_in = _WeightOfExperts(experts, rank, columns, config)
        self.linear_out = _WeightOfExperts(experts, rows, rank, config)
        self.dropout = torch.nn.Dropout(0.1) if dropout else torch.nn.Identity()

    def forward(self, x: Any, splits: Any) -> Any:
        """[rows, k] → [rows, n]. `splits`: tokens of each expert."""
        splits = splits.tolist() if torch.is_tensor(splits) else splits
        x = self.dropout(x)
        active, parts, start = [], [], 0
        for expert, size in enumerate(splits):
            if size:
                active.append(expert)
                parts.append(x.narrow(0, start, size))
                start += size
        read = parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)
        sizes = torch.tensor([splits[each] for each in active], device=x.device, dtype=torch.int32)
        offsets = sizes.cumsum(dim=0, dtype=torch.int32)
        weight = self.linear_in(active)
        hidden = torch.nn.functional.grouped_mm(read, weight.transpose(1, 2), offs=offsets)
        weight_out = self.linear_out(active)
        output = torch.nn.functional.grouped_mm(hidden, weight_out.transpose(1, 2), offs=offsets)
        return output * 2.0


class _WeightOfExperts(torch.nn.Module):
    """`_GroupedExpertAdapterWeight`."""

    def __init__(self, experts: int, rows: int, columns: int, config: Any) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(torch.empty(experts, rows, columns, device="cuda", dtype=config.params_dtype))
        weight.allreduce = config.expert_model_parallel_size == 1 == config.tensor_model_parallel_size
        self.weight = weight

    def forward(self, experts: list[int]) -> Any:
        """The weights of these experts, in a copy."""
        return self.weight[experts]
