"""Fields of Megatron's configurations as options of Megatron-LM. All frameworks set these fields, with the same names.

Sources: TransformerConfig, ModelParallelConfig, OptimizerConfig and DistributedDataParallelConfig of megatron-core 0.16.1, and
megatron/training/arguments.py (`core_transformer_config_from_args`), which gives the option of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from analyzer.launch.options.option_table import Option

RENAMED: Final = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "use_te_rng_tracker": "te_rng_tracker",
    "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "use_custom_fsdp": "use_megatron_fsdp",
    "rope_scaling": "use_rope_scaling",
    "moe_hybridep_pad_variable_tokens": "moe_hybridep_pad_uneven_dispatch_inputs",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "tp_comm_overlap_disable_qkv": "tp_comm_overlap_rs_dgrad",
}
"""Fields of configurations whose options have other dests, and former names."""
SPLIT: Final = {"bias_activation_fusion": ("bias_swiglu_fusion", "bias_gelu_fusion")}
"""Fields that stand for several dests (`core_transformer_config_from_args`)."""
INVERTED: Final = {
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "persist_layer_norm": "no_persist_layer_norm",
    "perform_initialization": "no_initialization",
}
"""Fields that are true where the dest is false."""
WITHOUT_OPTION: Final = frozenset({
    "softmax_scale", "activation_func_fp8_input_store", "init_method", "output_layer_init_method", "embedding_init_method",
    "tp_only_amax_red", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "inference_sampling_seed", "beta_fast",
    "beta_slow", "autocast_dtype", "enable_autocast", "finalize_model_grads_func", "grad_scale_func", "no_sync_func",
    "grad_sync_func", "param_sync_func", "variable_seq_lengths", "batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs",
    "cpu_offloading_activations", "cpu_offloading_weights", "check_for_nan_in_grad", "decoupled_weight_decay",
    "hetereogenous_dist_checkpoint", "fused_single_qkv_rope", "tp_comm_split_ag", "tp_comm_split_rs", "tp_comm_atomic_ag",
    "tp_comm_atomic_rs", "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim", "rotary_scaling_factor",
    "original_max_position_embeddings", "param_name_patterns_for_fp32_local_accumulation",
})  # fmt: skip
"""Fields that have no option, and no effect on memory and communication."""
AT_DEFAULT: Final[Mapping[str, object]] = {
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "moe_dispatch_fwd_dtype": "bf16",
    "moe_combine_bwd_dtype": "bf16",
    "batch_invariant_backend": "te_native",
    "mamba_chunk_size": 128,
    "linear_cp_mode": "chunkwise",
    "min_dynamic_context_parallel_size": 1,
    "gdp_num_householder": 3,
    "gdp_num_chunk_states_to_recompute": 2,
}
"""Fields without an option in the catalogue that have no effect with this value (TransformerConfig of August 2026)."""
NOT_PASSED: Final = frozenset({
    "params_dtype", "pipeline_dtype", "perform_initialization", "timers", "local_rank", "overlap_p2p_comm", "barrier_with_L1_time",
    "use_cpu_initialization",
})  # fmt: skip
"""Fields that other options give, or that have no effect, although an option exists."""
_FALSE: Final[tuple[object, ...]] = (False, None, 0, 0.0, "", "none", "null", [], {})


_UNKNOWN: Final = "its effect on memory and communication is unknown"


@dataclass
class Words:
    """Megatron's words for fields, and the fields that have none."""

    words: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Names of fields that are set and neither options of Megatron-LM nor without effect."""

    def statements(self) -> tuple[str, ...]:
        """One sentence for each unknown field."""
        return tuple(f"{name} is not known and not counted: {_UNKNOWN}." for name in self.unknown)

    def withheld(self) -> tuple[str, ...]:
        """Why there can be no verdict."""
        return (f"{', '.join(self.unknown)}: the effect on memory is not known",) if self.unknown else ()

    def add(self, other: Words) -> None:
        """Appends another part."""
        self.words += other.words
        self.unknown += other.unknown


Special = Mapping[str, Callable[[object], Sequence[str]]]
"""By field: the function that gives the words for its value."""


class Fields:
    """Gives the words for fields of configurations. `known`: Megatron's options by flag."""

    def __init__(self, known: Mapping[str, Option]) -> None:
        self._by_dest: dict[str, list[tuple[str, Option]]] = {}
        for flag, option in known.items():
            self._by_dest.setdefault(option.dest, []).append((flag, option))

    def words(
        self,
        values: Mapping[str, object],
        *,
        renamed: Mapping[str, str] | None = None,
        ignored: Iterable[str] = (),
        special: Special | None = None,
        prefix: str = "",
        without_defaults: bool = False,
    ) -> Words:
        """The words for `values`, by name of the field.

        `renamed`: names of fields that only this framework has. `ignored`: its keys without effect. `special`: fields whose
        words a function gives. `prefix` is written before unknown names. `without_defaults`: values that are
        the defaults of Megatron's options are left out, for configurations that list all fields.
        """
        found = Words()
        skipped = NOT_PASSED.union(ignored)
        for name, value in values.items():
            if special is not None and name in special:
                found.words += special[name](value)
            elif name not in skipped and not name.startswith("_") and value is not None:
                words = self._one(name, value, renamed or {}, without_defaults=without_defaults)
                if words is None:
                    found.unknown += [prefix + name] if _matters(name, value) else []
                else:
                    found.words += words
        return found

    def has(self, dest: str) -> bool:
        """Whether Megatron-LM has an option for `dest`."""
        return dest in self._by_dest

    def _one(self, name: str, value: object, renamed: Mapping[str, str], *, without_defaults: bool) -> list[str] | None:
        """The words for one field; None if Megatron-LM has no option for it."""
        if name in SPLIT:
            return [word for dest in SPLIT[name] for word in option_words(self._by_dest[dest], value)]
        if name in INVERTED:
            dest, value = INVERTED[name], not value
        else:
            dest = renamed.get(name) or (name if name in self._by_dest else RENAMED.get(name, name))
        options = self._by_dest.get(dest)
        if options is None:
            return None
        if without_defaults and any(option.default == value for _, option in options):
            return []
        return list(option_words(options, value))


def _matters(name: str, value: object) -> bool:
    """Whether a field without an option may change memory."""
    return value not in _FALSE and name not in WITHOUT_OPTION and (name not in AT_DEFAULT or value != AT_DEFAULT[name])


def option_words(options: Sequence[tuple[str, Option]], value: object) -> Iterator[str]:
    """The words that set a dest to `value`, for the flags of the dest; none if that is what it is without an option."""
    for flag, option in options:
        if option.kind == "store":
            if value == [] and option.nargs in ("*", "+"):
                return
            yield flag
            yield from _values(option, value)
            return
        if option.kind == "boolean":
            if flag.startswith("--no-") == (not value):
                yield flag
                return
        elif is_true(value) is (option.kind != "false"):
            yield flag
            return


def is_true(value: object) -> bool:
    """Whether a value of a YAML file or of a command line is true."""
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)


def _values(option: Option, value: object) -> Iterator[str]:
    several = option.nargs not in (None, 0, 1, "?")
    if isinstance(value, list | tuple):
        if several:
            yield from (text(each) for each in value)
        elif option.dest == "pipeline_model_parallel_layout":
            yield pipeline_layout(value)
        elif option.type == "tuple_type":
            yield ",".join(text(each) for each in value)
        else:
            yield "[" + ",".join(text(each) for each in value) + "]"
    elif several and isinstance(value, str):
        yield from value.split()
    else:
        yield text(value)


def text(value: object) -> str:
    """A value as a word."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


_LETTERS: Final = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def pipeline_layout(stages: Sequence[object]) -> str:
    """The text of `--pipeline-model-parallel-layout` for lists of layers by stage: Et|tt|tL."""
    parts = []
    for stage in stages:
        layers = stage if isinstance(stage, list | tuple) else [stage]
        parts.append("".join(_LETTERS.get(str(layer), str(layer)) for layer in layers))
    return "|".join(parts)


def given(words: Sequence[str], flag: str) -> bool:
    """Whether `words` has the option `flag`."""
    return any(word.partition("=")[0] == flag for word in words)
