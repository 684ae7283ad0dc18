"""The head of a policy of NeMo-RL: logits of the vocabulary in fp32, and the log-probability of each token.

Sources: `DistributedLogprob` and `from_parallel_logits_to_logprobs` (nemo_rl/distributed/model_utils.py) and `NLLLossFn`
(nemo_rl/algorithms/loss/loss_functions.py) of NeMo-RL, August 2026. What follows the log-probabilities has the size of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analyzer.modules.head import decoder_output_layer, logits
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import EndShapes
from analyzer.modules.tree import Collective, Module, Tensor


def log_probability_head(shapes: EndShapes, *, pre_process: bool) -> tuple[Module, ...]:
    """Output layer and loss, after the final norm of the decoder. `pre_process`: the embedding is on the same stage."""
    layer = decoder_output_layer(shapes, pre_process=pre_process)
    # `Float16Module` converts the output, or its transposed copy; then nothing references the logits of the output layer
    converted = (logits(shapes, "logits", shapes.dtype), logits(shapes, "logits in fp32", "fp32"))
    return replace(layer, forward_held=(), forward_workspace=converted), _log_probabilities(shapes)


def _log_probabilities(shapes: EndShapes) -> Module:
    """The probabilities of the whole vocabulary are saved, and copied for the gradient.

    The gradient of each of several sequences is copied into one of all of them, and these are added. The peak is at the second one,
    when the probabilities of two sequences are free.
    """
    sequences = shapes.model.loss_sequences or 1
    length = shapes.s // sequences
    whole = logits(shapes, "probabilities", "fp32")

    def of_tokens(name: str, dtype: str, *, number: int = shapes.s) -> Tensor:
        return Tensor(name=name, shape=(shapes.b, number), dtype=dtype, formula="s·b")

    def rows(name: str, number: int) -> tuple[Tensor, ...]:
        return (replace(whole, name=name, shape=(number, *whole.shape[1:])),) if number else ()

    return Module(
        name="log_probabilities",
        kind=ModuleKind.LOSS,
        function=True,
        saved=(whole, of_tokens("tokens of other ranks", "bool"), of_tokens("tokens", "int64")),
        forward_workspace=(replace(whole, name="logits in fp32"), *rows("log-probabilities of the vocabulary", length)),
        backward_workspace=(
            replace(whole, name="gradient of the logits"),
            *rows("gradient of the logits of another sequence, less free probabilities", shapes.s - length),
            *(of_tokens(name, "int64", number=length) for name in ("rows", "columns", "places", "places of the tokens")),
        ),
        collectives=tuple(_collectives(shapes, length, sequences)),
        source="DistributedLogprob of NeMo-RL",
    )


def _collectives(shapes: EndShapes, length: int, sequences: int) -> Iterator[Collective]:
    """Maxima, sums and log-probabilities over tensor-parallel ranks, and the log-probabilities of context-parallel ranks."""
    tokens = (shapes.b, length)
    if shapes.t > 1:
        yield Collective(kind="all_reduce", group="tp", shape=(*tokens, 1), dtype="fp32", phase="forward", count=2 * sequences)
        yield Collective(kind="all_reduce", group="tp", shape=tokens, dtype="fp32", phase="forward", count=sequences)
    if shapes.split.context > 1:
        whole = (shapes.b, length * shapes.split.context)
        yield Collective(kind="all_gather", group="cp", shape=whole, dtype="fp32", phase="forward", count=sequences)
        yield Collective(kind="all_reduce", group="cp", shape=whole, dtype="fp32", phase="backward", count=sequences)
