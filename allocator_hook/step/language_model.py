"""The arguments that the text models of megatron-core share."""

from __future__ import annotations

from typing import Any

from allocator_hook.step.versions import accepted_by
from analyzer.specs import TrainingJob


def language_model(
    model_class: Any, job: TrainingJob, config: Any, *, pre_process: bool, post_process: bool, virtual_stage: int | None, **own: Any
) -> Any:
    """Return one chunk of a model of this class, not yet in 16 bit. `own`: the arguments that only this class has."""
    model = job.model
    return model_class(
        config=config,
        **own,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=model.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type=model.position_embedding if model.yarn_positions is None else "yarn",
        rotary_percent=model.rotary_percent,
        **accepted_by(model_class.__init__, vp_stage=virtual_stage),
    )
