"""How the options of `analyzer.launch.options.script_options` are handled."""

from __future__ import annotations

from typing import Final

MODELLED: Final = frozenset(
    """
    freeze_LM freeze_ViT disable_vision_class_token dataloader_seq_length decoder_tp_comm_overlap use_packed_sequence
    model_provider total_seq_length packing_buffer_size
    language_model_type vision_model_type use_te use_tiling max_num_tiles use_thumbnail num_frames pixel_shuffle use_tile_tags
    recompute_vision
    """.split()
)
NO_EFFECT: Final = frozenset(
    """
    dataset_provider image_size pad_token_id image_token_id image_seq_length audio_encoder_model hf_assign_unused_tokens
    language_model_checkpoint
    allow_checkpoint_without_temporal_compression allow_large_videos allow_missing_conv_merge_checkpoint
    allow_missing_sound_model_checkpoint allow_missing_sound_projection_checkpoint allow_missing_vision_projection_checkpoint
    apply_data_augment dataloader_save dataloader_seed dataset_config dynamic_resolution_max_patches dynamic_resolution_min_patches
    dynamic_resolution_min_side dynamic_resolution_no_truncate enable_fusions eos_id force_system_message freeze_sound_model
    freeze_sound_projection freeze_vision_projection image_break_token image_tag_type log_model_act_norms log_model_grad_norms
    lr_data_range_end lr_data_range_start masked_tiling_dynamic_resolution match_tiling_dynamic_resolution
    no_calculate_per_token_loss only_keep_samples_with_img optimize_broadcast packing_knapsack_algorithm packing_seq_length
    prompt_path radio_cpe_aspect_ratio_select radio_disable_cpe radio_force_cpe_eval_mode radio_force_eval_mode
    radio_interpolate_only_cpe recompute_granularity_vision recompute_method_vision recompute_sound recompute_sound_projection
    recompute_vision_num_layers recompute_vision_projection relax_sender_check relax_thinking_trace_check separate_video_embedder
    sound_batch_split sound_clip_duration sound_embedding_size sound_min_duration sound_pad_to_clip_duration sound_target_rate
    special_tokens thumbnail_area_threshold tokenizer_keep_history_thinking tokenizer_prompt_format unfreeze_router
    use_area_weighted_aspect_ratio use_loss_scaling use_mcore_inference use_new_dataloader_path video_aug_scale_frames_up
    video_aug_scale_resolution_only video_aug_scale_resolution_up video_default_fps video_frame_temporal_jitter
    video_maintain_aspect_ratio video_max_num_frames video_min_num_frames video_prompt_version video_target_img_size
    video_target_num_patches online_evaluation_config
    """.split()
)
"""Contents of the data and of checkpoints, options that the model provider does not read, and those of refused features.

`--freeze-vision-projection` and the options `--recompute-*-vision` are not read by `model_provider`.
"""
_WITHOUT: Final = "leave it out to analyze the launch without it"
REFUSED: Final[dict[str, tuple[str, str]]] = {
    "sound_model_type": ("models of sound are not modelled", _WITHOUT),
    "dynamic_resolution": ("images of different sizes are not modelled", _WITHOUT),
    "conv_merging": ("the convolution that merges tokens is not modelled", _WITHOUT),
    "use_vision_backbone_fp8_arch": ("an encoder in FP8 is not modelled", _WITHOUT),
    "class_token_len": ("another number of class tokens than that of the encoder is not modelled", _WITHOUT),
    "video_temporal_patch_size": ("patches of several frames are not modelled", "use 1, or leave it out"),
    "efficient_video_sampling_variant": ("it drops tokens of videos, and their number is not known", _WITHOUT),
    "allow_cross_sample_attention": ("packed samples are not modelled", _WITHOUT),
}
"""By dest: the reason and the remedy if it is set to another value than the default."""
OF_SCRIPTS: Final = MODELLED | NO_EFFECT | REFUSED.keys()
