"""Write in which releases the sources of megatron-core and Transformer Engine have the lines that prove `specs/release_changes.py`.

    python tools/release_truth.py MEGATRON TRANSFORMER_ENGINE

Both are clones with the tags or branches of all releases. tests/data/truth/releases.json gets the releases, and for each field the
regular expression, its files, and its value: that of the first release in which the line is looked for, and each changed one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

OUTPUT: Final = Path(__file__).resolve().parent.parent / "tests/data/truth/releases.json"
NEWEST: Final = "0.20.0"
"""The release of the branch main of Megatron-LM."""
CORE_RELEASES: Final = (*(f"0.{minor}.0" for minor in range(4, 20)), NEWEST)
ENGINE_RELEASES: Final = (*(f"1.{minor}" for minor in range(2, 14)), *(f"2.{minor}" for minor in range(19)))


class Line(NamedTuple):
    """A line of the sources whose presence decides a field."""

    pattern: str
    paths: str
    """Files and folders, separated by spaces."""
    present: bool | str | int = True
    """The value of the field where the line is."""
    absent: bool | str | int = False
    since: str = ""
    """The first release that has the feature; it is not looked for in earlier ones."""


_C: Final = "megatron/core"
_T: Final = "transformer_engine/pytorch"
CORE: Final = {
    "attention_in_batches": Line("apply_rope_fusion and qkv_format ==", _C, since="0.5.0"),
    "concatenates_rotated_samples": Line(r"for x in torch\.split\(t, seqlens\)", f"{_C}/models/common/embeddings", since="0.5.0"),
    "writes_rotated_samples": Line(r"output\.narrow\(0, output_offset", f"{_C}/models/common/embeddings"),
    "first_angles_stay": Line(
        "self.forward.cache_clear()", f"{_C}/models/common/embeddings/yarn_rotary_pos_embedding.py", False, True
    ),
    "saves_original_input": Line("set_save_original_input", _C),
    "caches_dummies": Line("get_dummy_wgrad", f"{_C}/tensor_parallel/layers.py"),
    "copies_recomputed": Line(r"\.copy_\(", f"{_C}/tensor_parallel/random.py", since="0.12.0"),
    "copies_logits": Line("vocab_parallel_logits = vocab_parallel_logits - logits_max", f"{_C}/tensor_parallel/cross_entropy.py"),
    "few_query_groups": Line("num_query_groups < world_size", f"{_C}/transformer/attention.py"),
    "convolves_rows": Line("from fla.modules.convolution import causal_conv1d$", f"{_C}/ssm"),
    "prepares_gates": Line(r"g, variant_kernel_inputs = self\._compute_gates\(", f"{_C}/ssm"),
    "glu_offset": Line("glu_linear_offset", f"{_C}/transformer/mlp.py"),
    "keeps_previous_output": Line("del output_tensor$", f"{_C}/pipeline_parallel/schedules.py", False, True),
    "router_in_te": Line("def te_general_gemm", f"{_C}/extensions/transformer_engine.py"),
    "router_needs_workspace": Line(r"workspace=get_workspace\(\)", f"{_C}/extensions/transformer_engine.py", since="0.13.0"),
    "adds_by_index": Line("index_add_", f"{_C}/transformer/moe/moe_utils.py"),
    "sorts_positions": Line("num_out_tokens is required for the argsort-based permute", f"{_C}/transformer/moe/moe_utils.py"),
    "pads_in_permutation": Line(r"align_size=get_align_size_for_quantization", f"{_C}/transformer/moe/token_dispatcher.py"),
    "pads_16_bit_rows": Line(r"^    return 16$", f"{_C}/transformer/moe/moe_utils.py"),
    "frees_arrivals": Line("dispatched_indices = None", f"{_C}/transformer/moe/token_dispatcher.py"),
    "frees_unsaved_rows": Line("num_local_experts > 1 or config.moe_token_dispatcher_type", _C),
    "marks_split_experts": Line("partition_dim", f"{_C}/extensions/transformer_engine.py"),
    "skips_final_norm": Line("config.mtp_num_layers and empty_decoder and", _C),
    "mtp_attention_of_last_layer": Line("get_transformer_layer_with_experimental_attention_variant_spec", "gpt_builders.py"),
    "keeps_dispatched_gradients": Line("delay_grads_release", f"{_C}/pipeline_parallel/utils.py", since="0.16.0"),
    "holds_returning_rows": Line(
        "the shared experts fc2 is not overlapped with routed experts fc1", f"{_C}/transformer/moe/token_dispatcher.py"
    ),
    "stream_of_each_layer": Line(r"if self\.stream is None", f"{_C}/transformer/moe/shared_experts.py", since="0.10.0"),
    "mtp_layer": Line(r"self\.mtp_model_layer", f"{_C}/transformer", "mtp_model_layer", "transformer_layer"),
    "recomputes_hybrid_stacks": Line("import checkpointed_forward", f"{_C}/models/hybrid"),
    "holds_mtp_logits": Line("def process_mtp_loss", f"{_C}/transformer", False, True),
    "counts_mtp_predictions": Line("def _compute_mtp_acceptance_counts", f"{_C}/transformer"),
    "parameters_in_buffers": Line("param_data", f"{_C}/distributed"),
    "buckets_by_ranks": Line(r"max\(40000000", _C),
    "aligns_buckets": Line("data_parallel_world_size, 128", f"{_C}/distributed {_C}/optimizer"),
    "aligns_parameters": Line("param_start_index, 64", f"{_C}/distributed {_C}/optimizer"),
    "keeps_16_bit_parameters": Line(
        "if not self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:$",
        f"{_C}/distributed/param_and_grad_buffer.py",
        since="0.14.0",
    ),
    "has_first_batch": Line("is_first_batch", f"{_C}/distributed"),
    "has_number_of_buckets": Line("ddp[-_]num[-_]buckets", "megatron"),
    "adam_keeps_masters": Line("use_precision_aware_optimizer_no_fp8_or_ds_fp8", f"{_C}/optimizer", False, True),
    "statistics_of_all_ranks": Line(
        r"getattr\(self, .grad_stats_parallel_group., None\)", f"{_C}/optimizer/distrib_optimizer.py", False, True
    ),
    "chained_optimizers_count_zeros": Line(r"num_zeros_in_grad = self\.count_zeros\(\)$", f"{_C}/optimizer/optimizer.py"),
    "muon_compares_groups": Line(r"\.remove\(", f"{_C}/optimizer/muon.py"),
    "layer_wise_receives_own": Line(r"gather_list\.append\(src\)", f"{_C}/optimizer/layer_wise_optimizer.py", False, True),
    "has_layer_wise_layout": Line("use_layer_wise_param_layout", "megatron"),
    "fsdp_gradients_in_fp32": Line(
        "if ddp_config.grad_reduce_in_fp32", f"{_C}/distributed/fsdp/mcore_fsdp_adapter.py", since="0.17.0"
    ),
    "fsdp_units_without_sharding": Line(
        "if self.ddp_config.data_parallel_sharding_strategy != .no_shard", f"{_C}/distributed/fsdp/mcore_fsdp_adapter.py"
    ),
    "fsdp_meshes_of_instances": Line("def _get_hsdp_tp_mesh", f"{_C}/distributed/fsdp/mcore_fsdp_adapter.py"),
    "fsdp_expert_instances": Line("hybrid_fsdp_expt_group", f"{_C}/distributed/fsdp/mcore_fsdp_adapter.py"),
    "fsdp_marks_all_modules": Line(
        "for sub_module in root_module.modules", f"{_C}/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
    ),
    "fsdp_units_of_mamba": Line(
        r"\[TransformerLayer, MoETransformerLayer, MambaLayer\]", f"{_C}/distributed/fsdp/mcore_fsdp_adapter.py"
    ),
    "legacy_interleaving": Line("microbatch_group_size_per_vp_stage", f"{_C}/pipeline_parallel/schedules.py", False, True),
    "flops_of_experts": Line("def moe_layer_flops", "megatron/training/training.py"),
    "flops_of_depths": Line(r"vocab_size \* \(1 \+ mtp_num_layers\)", "megatron/training/training.py"),
}
ENGINE: Final = {
    "reorders_each_sample": Line("reorder_seq_chunks_after_a2a_before_attn_thd", _T),
    "norms_save_views": Line(r"inputmat = inp\.view", f"{_T}/module/layernorm.py"),
    "general_gemm": Line("^def general_gemm", _T),
    "has_get_workspace": Line("^def get_workspace", f"{_T}/module/base.py"),
    "caches_dummies": Line("^def get_dummy_wgrad", f"{_T}/module/base.py"),
    "caches_grouped_dummies": Line("get_dummy_wgrad", f"{_T}/module/grouped_linear.py"),
    "stores_remainders": Line("store_param_remainders", f"{_T}/optimizers/fused_adam.py"),
    "updates_bf16_moments": Line("fuse_unscale", f"{_T}/optimizers/fused_adam.py"),
    "pads_in_permutation": Line("def moe_permute_and_pad_with_probs", f"{_T}/permutation.py"),
    "fp4_padding": Line("return 128", f"{_T}/quantization.py", 128, 64, since="2.11"),
    "tensorwise_scales": Line(r"amax = torch\.empty\(1,", f"{_T}/tensor/float8_tensor.py", since="2.3"),
}


def has_line(clone: Path, revision: str, line: Line) -> bool:
    """Whether a line of a revision matches. `git grep` ends with 1 if none does."""
    words = ["git", "-C", str(clone), "grep", "-qE", "-e", line.pattern, revision, "--", *line.paths.split()]
    code = subprocess.run(words, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"git grep of {revision} ends with {code}")
    return code == 0


def records(table: str, lines: dict[str, Line], clone: Path, revisions: dict[str, str]) -> dict[str, object]:
    """The releases of a table and its fields. `revisions`: the tag or branch of each release, oldest first."""
    releases = list(revisions)
    found: dict[str, object] = {}
    for name, line in lines.items():
        values: dict[str, bool | str | int] = {}
        for release in releases[releases.index(line.since) if line.since else 0 :]:
            value = line.present if has_line(clone, revisions[release], line) else line.absent
            if not values or [*values.values()][-1] != value:
                values[release] = value
        found[name] = {"line": line.pattern, "paths": line.paths, "values": values}
    return {table: {"releases": releases, "fields": found}}


def main() -> None:
    """Writes the file."""
    megatron, engine = map(Path, sys.argv[1:])
    core = {release: "main" if release == NEWEST else f"core_v{release}" for release in CORE_RELEASES}
    found = records("CoreBehavior", CORE, megatron, core)
    found |= records("EngineBehavior", ENGINE, engine, {release: f"release_v{release}" for release in ENGINE_RELEASES})
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
