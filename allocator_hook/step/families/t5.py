"""T5: `model_provider`, `get_batch` and `forward_step` of pretrain_t5.py (0.16.1)."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

from allocator_hook.step.families.broadcast import broadcast_fields
from allocator_hook.step.language_model import language_model
from allocator_hook.step.losses import loss_function
from analyzer.specs import TrainingJob


def t5_module(job: TrainingJob, config: Any, **stage: Any) -> Any:
    """Return the T5Model: encoder and decoder, without pipeline parallelism."""
    from megatron.core.models.T5 import T5Model, t5_spec

    model = job.model
    kind = "local" if model.implementation == "local" else "transformer_engine"
    encoder, decoder = (getattr(t5_spec, f"get_t5_{part}_with_{kind}_block_spec") for part in ("encoder", "decoder"))
    return language_model(
        T5Model,
        job,
        config,
        **stage,
        encoder_config=deepcopy(config),
        transformer_encoder_layer_spec=encoder(model.num_layers),
        transformer_decoder_layer_spec=decoder(model.num_layers),
        add_encoder=True,
        add_decoder=True,
    )


def t5_forward(job: TrainingJob, model: Any) -> tuple[Any, Any]:
    """Run the forward of one microbatch."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    samples, long, short = job.batch.micro_batch_size, job.batch.seq_length, job.model.decoder_seq_length
    assert short is not None, "a T5 has a decoder"
    lengths = {"text_enc": long, "text_dec": short, "labels": short, "loss_mask": short, "enc_mask": long, "dec_mask": short}
    batch = broadcast_fields({name: (samples, length) for name, length in lengths.items()})
    mask = batch["loss_mask"].float()
    masks = T5MaskedWordPieceDataset.config_attention_mask(
        batch["text_enc"],
        batch["text_dec"],
        batch["enc_mask"] < 0.5,
        batch["dec_mask"] < 0.5,
        job.model.implementation == "local",
    )
    output = model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"])
    return output, partial(loss_function, job, mask)
