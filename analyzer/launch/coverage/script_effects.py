"""How the options of `analyzer.launch.options.script_options` are handled."""

from __future__ import annotations

from typing import Final

MODELLED: Final = frozenset(
    """
    freeze_LM freeze_ViT disable_vision_class_token dataloader_seq_length decoder_tp_comm_overlap use_packed_sequence
    model_provider total_seq_length packing_buffer_size
    """.split()
)
NO_EFFECT: Final = frozenset(
    """
    dataset_provider image_size pad_token_id image_token_id image_seq_length audio_encoder_model hf_assign_unused_tokens
    language_model_checkpoint
    """.split()
)
"""Contents of the data, and options that the modelled providers do not read."""
OF_SCRIPTS: Final = MODELLED | NO_EFFECT
