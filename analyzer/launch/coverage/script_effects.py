"""How the options of `analyzer.launch.options.script_options` are handled."""

from __future__ import annotations

from typing import Final

MODELLED: Final = frozenset(
    "freeze_LM freeze_ViT disable_vision_class_token dataloader_seq_length decoder_tp_comm_overlap use_packed_sequence".split()
)
OF_SCRIPTS: Final = MODELLED
