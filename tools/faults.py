"""The faults that `tools/mutants.py` plants: one line of a file each, by package, and the fast test that must fail."""

from __future__ import annotations

from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A line of a file, and what replaces it. Indentation does not count."""

    name: str
    file: str
    old: str
    new: str
    test: str
    """A fast test that fails with the fault, as pytest names it, without parameters."""


FAULTS: Final = (
    Fault(
        "half of the capture's cuBLAS workspaces",
        "analyzer/memory/graphs/kept.py",
        "workspace = 2 * cublas_workspace_bytes(job)  # each of two threads has a handle",
        "workspace = cublas_workspace_bytes(job)",
        "tests/memory/test_cuda_graphs.py::test_the_streams_of_a_capture_have_cublas_workspaces",
    ),
    Fault(
        "no unused segments",
        "analyzer/memory/allocator/replay.py",
        "unused=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,",
        "unused=0,",
        "tests/memory/test_allocator_replay.py::test_expandable_segments_in_the_environment_reduce_reserved_memory",
    ),
    Fault(
        "1F1B frees the input of an earlier microbatch",
        "analyzer/schedule/references.py",
        "inputs.update(each for each in (self._input, self._output) if each is not None)",
        "inputs.update(each for each in (self._input,) if each is not None)",
        "tests/memory/test_messages.py::test_a_steady_forward_has_the_input_and_both_gradients_of_the_previous_microbatch",
    ),
    Fault(
        "overlapped microbatches without the experts' backward",
        "analyzer/memory/overlapped/microbatches.py",
        "feed_forward = self._run_backward(of_experts[len(reading) :], None, (*rows, *permuted, *shared, *held))",
        "feed_forward = self._run_backward((), None, (*rows, *permuted, *shared, *held))",
        "tests/memory/overlapped/test_microbatches.py::test_every_half_of_a_layer_runs_beside_what_the_other_microbatch_has_saved",
    ),
    Fault(
        "overlapped attention without the gradient of the residual",
        "analyzer/memory/overlapped/microbatches.py",
        "pending = () if other is None else (*residual, *other.recomputed)",
        "pending = ()",
        "tests/memory/overlapped/test_microbatches.py::test_the_gradient_of_the_residual_stays_until_the_backward_of_attention",
    ),
    Fault(
        "gradient of the residual kept after an early backward of attention",
        "analyzer/memory/overlapped/microbatches.py",
        "pending = read = rows = ()",
        "read = rows = ()",
        "tests/memory/overlapped/test_microbatches.py::test_the_gradient_of_the_residual_stays_until_the_backward_of_attention",
    ),
    Fault(
        "input left by a checkpoint of another chunk subtracted",
        "analyzer/memory/iteration.py",
        "found += chunk.leftover + (chunk.leftover_input if moment.others[number] else 0)",
        "found += chunk.leftover - (chunk.leftover_input if moment.others[number] else 0)",
        "tests/memory/test_left_by_checkpoints.py::test_another_chunk_runs_beside_what_a_checkpoint_has_left",
    ),
    Fault(
        "input left by a checkpoint subtracted in the next backward",
        "analyzer/memory/block_memory.py",
        "earlier = self.leftover + (self.leftover_input if backward else 0)",
        "earlier = self.leftover - (self.leftover_input if backward else 0)",
        "tests/memory/test_left_by_checkpoints.py::"
        "test_a_backward_after_a_backward_has_the_input_and_the_gradient_of_the_earlier_one",
    ),
    Fault(
        "operands of delayed weight gradients freed too early",
        "analyzer/passes/delayed_weight_gradients.py",
        "changed, pending = _with_pending(child, pending, fused=fused)",
        "changed, _ = _with_pending(child, pending, fused=fused)",
        "tests/passes/test_delayed_weight_gradients.py::test_both_operands_stay_allocated_until_the_backward_of_the_experts_ends",
    ),
    Fault(
        "received input counted if its storage is freed",
        "analyzer/passes/deferred_output_gradients.py",
        'graph_bytes=0 if detached else (1 if freed else 2) * shapes.hidden("received input").bytes,',
        'graph_bytes=0 if detached else (2 if freed else 1) * shapes.hidden("received input").bytes,',
        "tests/passes/test_deferred_output_gradients.py::"
        "test_the_graph_of_a_deferred_call_keeps_the_received_input_and_its_gradient",
    ),
    Fault(
        "received rows kept in overlapped layers",
        "analyzer/passes/overlapped_layers.py",
        "if RECEIVED_ROWS not in named or LOCAL_ROWS in named or frees_unsaved:",
        "if RECEIVED_ROWS not in named or LOCAL_ROWS not in named or frees_unsaved:",
        "tests/passes/test_activation_offload.py::test_overlapped_microbatches_need_more_than_sequential_ones",
    ),
    Fault(
        "no communication in the first forward of a checkpoint",
        "analyzer/program/lowering.py",
        "if not (discards and module.kind is ModuleKind.ROUTER):",
        "if not discards:",
        "tests/program/test_iteration.py::test_a_checkpoint_communicates_in_both_of_its_forwards",
    ),
    Fault(
        "backward in the order of the forward",
        "analyzer/program/chunks.py",
        "for block in self.blocks if forward else reversed(self.blocks):",
        "for block in self.blocks:",
        "tests/program/test_iteration.py::test_a_backward_computes_modules_in_the_reverse_order",
    ),
    Fault(
        "sequential experts keep the output of one expert",
        "analyzer/program/local_variables.py",
        "before = (replace(each, shape=(each.shape[0] * (count - 1) // count, *each.shape[1:])) for each in outputs)",
        "before = (replace(each, shape=(each.shape[0] // count, *each.shape[1:])) for each in outputs)",
        "tests/program/test_iteration.py::test_sequential_experts_keep_the_outputs_of_earlier_experts",
    ),
    Fault(
        "no additional forward before overlapped microbatches",
        "analyzer/schedule/pipeline.py",
        "warmup = min(forwards_first + combined, len(forwards))",
        "warmup = min(forwards_first, len(forwards))",
        "tests/passes/test_activation_offload.py::test_a_pipeline_has_one_more_warmup_forward",
    ),
    Fault(
        "messages exchanged after the pair only if they overlap",
        "analyzer/schedule/messages.py",
        'paired = not ring.overlaps and order[place].kind == "forward" and place + 1 < len(order) and order[place + '
        '1].kind == "backward"',
        'paired = ring.overlaps and order[place].kind == "forward" and place + 1 < len(order) and order[place + '
        '1].kind == "backward"',
        "tests/schedule/test_messages.py::test_without_overlaps_an_input_is_received_after_the_backward_of_its_pair",
    ),
    Fault(
        "column-parallel backward without its input gradient",
        "analyzer/modules/linear.py",
        '*(() if in_buffers else (shapes.hidden("input gradient", gathered=True),)),',
        "",
        "tests/modules/test_fp8.py::test_peaks_of_backward_match_the_recording",
    ),
    Fault(
        "statistics of RMSNorm and LayerNorm swapped",
        "analyzer/modules/norm.py",
        'if shapes.model.normalization == "LayerNorm":',
        'if shapes.model.normalization != "LayerNorm":',
        "tests/modules/test_dense_modules.py::test_a_fused_kernel_saves_its_output_and_no_scores",
    ),
    Fault(
        "logits of the z-loss not saved",
        "analyzer/modules/moe/router.py",
        "*((logits,) if moe.z_loss_coeff else ()),  # saved by logsumexp",
        "",
        "tests/modules/moe/test_router.py::test_the_z_loss_saves_the_logits_of_all_experts",
    ),
    Fault(
        "groups of the global and the other auxiliary losses swapped",
        "analyzer/modules/moe/router.py",
        'group = "tp_dp_cp" if kind == "global_aux_loss" else "tp_cp"',
        'group = "tp_dp_cp" if kind != "global_aux_loss" else "tp_cp"',
        "tests/modules/moe/test_router.py::test_tokens_per_expert_are_summed_over_the_ranks_of_the_loss",
    ),
    Fault(
        "square of Muon's iterate on the other side",
        "analyzer/states/muon.py",
        "squared = n if partition == 0 else m",
        "squared = m if partition == 0 else n",
        "tests/states/test_muon.py::test_the_distributed_mode_squares_the_unsplit_side",
    ),
    Fault(
        "parameters of layer-wise optimizers assigned in one direction",
        "analyzer/states/layer_wise.py",
        "loop = [*range(ranks), *reversed(range(ranks))]",
        "loop = [*range(ranks)]",
        "tests/states/test_muon.py::test_parameters_are_assigned_forward_and_backward",
    ),
    Fault(
        "FSDP prefetches a full communication unit",
        "analyzer/buffers/fsdp_gathering.py",
        "while extra < self.unit_size // 2:",
        "while extra < self.unit_size:",
        "tests/states/test_fsdp.py::test_a_small_communication_unit_prefetches_one_layer",
    ),
    Fault(
        "shard of the next rank",
        "analyzer/buffers/gradient_buffers.py",
        "first = bucket.numel // group_size * member",
        "first = bucket.numel // group_size * (member + 1)",
        "tests/states/test_precision_aware_adam.py::test_earlier_kernels_read_fp32_copies_of_bf16_moments",
    ),
    Fault(
        "gradient shard not divided by the ranks",
        "analyzer/communication/data_parallel.py",
        "shard = (bucket.numel // ranks,)",
        "shard = (bucket.numel,)",
        "tests/communication/test_communication.py::test_gradients_are_reduced_within_and_then_between_optimizer_instances",
    ),
    Fault(
        "interleaved messages never batched",
        "analyzer/communication/pipeline.py",
        "batched=parallel.chunks == 1 or not parallel.overlap_p2p,",
        "batched=parallel.chunks == 1,",
        "tests/communication/test_pipeline.py::test_messages_are_batched_unless_they_overlap",
    ),
    Fault(
        "one backward without a forward missing",
        "analyzer/communication/amax.py",
        "return min(forwards + 1, job.batch.microbatches * parallel.chunks)",
        "return min(forwards, job.batch.microbatches * parallel.chunks)",
        "tests/communication/test_amax.py::test_backwards_without_a_forward_reduce_once_more",
    ),
    Fault(
        "most ranks of a group in a domain instead of fewest",
        "analyzer/time/links.py",
        "near = min(Counter(rank // domain for rank in first[:_LISTED]).values(), default=1)",
        "near = max(Counter(rank // domain for rank in first[:_LISTED]).values(), default=1)",
        "tests/time/test_messages.py::test_a_ring_has_the_links_of_the_node_with_the_fewest_ranks",
    ),
    Fault(
        "messages of large schedules in one direction",
        "analyzer/time/pipeline.py",
        "transfers = 2 * (schedule.pipeline - 1) * message",
        "transfers = (schedule.pipeline - 1) * message",
        "tests/time/test_pipeline.py::test_messages_of_very_large_schedules",
    ),
    Fault(
        "last bucket hidden",
        "analyzer/time/data_parallel.py",
        "shown = max(traffic.seconds - rates.window * window, traffic.one)",
        "shown = min(traffic.seconds - rates.window * window, traffic.one)",
        "tests/time/test_iteration.py::test_overlapped_messages_hide_behind_the_passes",
    ),
    Fault(
        "bubble of large pipelines not divided by the chunks",
        "analyzer/layout_search/bounds.py",
        "return microbatches * max(each) + (sum(each) - max(each)) / schedule.chunks",
        "return microbatches * max(each) + (sum(each) - max(each))",
        "tests/layout_search/test_bounds.py::test_the_bubble_of_large_pipelines_is_divided_by_the_chunks",
    ),
    Fault(
        "userbuffers need fewer ranks than the domain has",
        "analyzer/layout_search/overlaps.py",
        'if changes.get("tp_comm_overlap") and not (1 < split.tensor <= domain and split.sequence):',
        'if changes.get("tp_comm_overlap") and not (1 < split.tensor < domain and split.sequence):',
        "tests/layout_search/test_overlaps.py::test_userbuffers_need_sequence_parallelism_in_an_nvlink_domain",
    ),
    Fault(
        "offset of the linear half from core 0.14 on",
        "analyzer/specs/release_changes.py",
        'glu_offset: bool = _during(since="0.15")',
        'glu_offset: bool = _during(since="0.14")',
        "tests/launch/derive/test_earlier_releases.py::test_the_linear_half_has_an_offset_since_core_0_15",
    ),
    Fault(
        "communication of the outer instead of the inner context-parallel groups",
        "analyzer/launch/derive/parallel.py",
        'kind, inner = ("p2p" if inner == 1 else "a2a"), 1',
        'kind, inner = ("p2p" if outer == 1 else "a2a"), 1',
        "tests/modules/test_context_parallel.py::test_a_hierarchy_with_one_level_becomes_that_level",
    ),
    Fault(
        "processes of the largest node instead of all nodes",
        "analyzer/script/uneven_nodes.py",
        "kept.append(replace(launch, processes=sum(count or 0 for count in counts)))",
        "kept.append(replace(launch, processes=max(count or 0 for count in counts)))",
        "tests/script/test_uneven_nodes.py::test_the_processes_of_all_nodes_are_added",
    ),
    Fault(
        "commands of taskset not started",
        "analyzer/script/stand_ins/prefixes.py",
        'if name in ("taskset", "chrt", "ionice") and last(options, "p", "pid") is not None:',
        'if name in ("taskset", "chrt", "ionice") and last(options, "p", "pid") is None:',
        "tests/script/test_prefixes.py::test_with_a_process_id_there_is_no_command",
    ),
    Fault(
        "part of the memory that changed least first",
        "analyzer/report/against.py",
        "return (True, TOTALS.index(name)) if name in TOTALS else (False, -abs(change.difference or 0))",
        "return (True, TOTALS.index(name)) if name in TOTALS else (False, abs(change.difference or 0))",
        "tests/report/test_against.py::test_the_part_of_the_memory_that_changed_most_is_first_and_totals_are_last",
    ),
    Fault(
        "tensors below a checkpoint counted as saved",
        "analyzer/report/tree_sums.py",
        "below = 0 if module.recomputed else sum(map(saved_bytes, module.children))",
        "below = sum(map(saved_bytes, module.children))",
        "tests/report/test_tree_sums.py::test_a_checkpoint_saves_its_own_tensors_only",
    ),
    Fault(
        "window without the token itself",
        "analyzer/inference/kv_cache.py",
        "return min(tokens, model.window[0] + 1)",
        "return min(tokens, model.window[0])",
        "tests/inference/test_kv_cache.py::test_parameters_and_cache_are_those_of_hugging_face",
    ),
    Fault(
        "CUDA graphs of prefill instead of decode",
        "analyzer/inference/steps.py",
        "graphs = self.job.inference.decode_graphs and self.cached > 0",
        "graphs = self.job.inference.decode_graphs and self.cached == 0",
        "tests/inference/test_steps.py::test_without_graphs_the_host_issues_every_operation",
    ),
    Fault(
        "frozen layers keep the inputs of their weight gradients",
        "analyzer/modules/freezing.py",
        "saved=_not_for_weight(module.saved),",
        "saved=module.saved,",
        "tests/modules/test_freezing.py::test_linear_layers_save_only_what_the_norm_before_them_needs",
    ),
    Fault(
        "gradient buffers of frozen weights",
        "analyzer/buffers/gradient_buffers.py",
        "for parameter in (each for each in run.parameters if not each.frozen):",
        "for parameter in run.parameters:",
        "tests/modules/test_freezing.py::test_frozen_weights_are_in_no_buffer",
    ),
    Fault(
        "no fp32 copies of frozen weights for their norm",
        "analyzer/states/adam.py",
        "numel = sum(numel_of(tree) - trained_numel(tree) for tree in stage.trees)",
        "numel = 0",
        "tests/memory/test_measured_vision.py::test_the_norm_of_frozen_weights_is_the_peak_of_the_measured_mimo_models",
    ),
    Fault(
        "a Mamba mixer whose output layer is split by columns",
        "analyzer/modules/kinds.py",
        "MIXER_OUT = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.ROW)",
        "MIXER_OUT = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)",
        "tests/modules/test_kinds.py::test_split_layers_exchange_what_their_split_requires",
    ),
    Fault(
        "projections of latent experts without a workspace",
        "analyzer/modules/kinds.py",
        "MOE_LATENT_UP = KindFacts(Kernels.LINEAR, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)",
        "MOE_LATENT_UP = KindFacts(Kernels.LINEAR, Gemms.NONE, Parallel.NONE)",
        "tests/modules/test_kinds.py::test_every_gemm_has_the_workspace_of_its_library",
    ),
    Fault(
        "weights of a kind without kernels",
        "analyzer/time/work/of_module.py",
        "if kernels is Kernels.NONE and module.parameters and not module.children:",
        "if False:",
        "tests/modules/test_kinds.py::test_a_module_with_parameters_and_without_kernels_is_an_error_that_names_it",
    ),
    Fault(
        "cached dummies of Transformer Engine 2.2",
        "analyzer/specs/release_changes.py",
        'caches_dummies: bool = _during(since="2.3")',
        'caches_dummies: bool = _during(since="2.2")',
        "tests/specs/test_release_changes.py::test_a_field_has_the_value_that_the_sources_of_each_release_show",
    ),
    Fault(
        "weight gradients of frozen layers take time",
        "analyzer/time/work/of_module.py",
        "return work._replace(backward=tuple(each for each in work.backward if each.name not in _OF_WEIGHTS))",
        "return work",
        "tests/modules/test_freezing.py::test_a_frozen_linear_layer_computes_no_weight_gradient",
    ),
    Fault(
        "the sequence without the tokens of the image",
        "analyzer/launch/derive/model/vision.py",
        "tokens = _text_length(arguments, shape) + _image_tokens(arguments)",
        "tokens = _text_length(arguments, shape)",
        "tests/launch/test_vision_models.py::test_the_sequence_has_text_images_and_padding",
    ),
)
