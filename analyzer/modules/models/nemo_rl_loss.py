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
    """The probabilities of the whole vocabulary are saved, and copied for the gradient."""
    whole = logits(shapes, "probabilities", "fp32")

    def of_tokens(name: str, dtype: str) -> Tensor:
        return Tensor(name=name, shape=(shapes.b, shapes.s), dtype=dtype, formula="s·b")

    return Module(
        name="log_probabilities",
        kind=ModuleKind.LOSS,
        function=True,
        saved=(whole, of_tokens("tokens of other ranks", "bool"), of_tokens("tokens", "int64")),
        forward_workspace=(replace(whole, name="logits in fp32"), replace(whole, name="log-probabilities of the vocabulary")),
        backward_workspace=(
            replace(whole, name="gradient of the logits"),
            *(of_tokens(name, "int64") for name in ("rows", "columns", "places", "places of the tokens")),
        ),
        collectives=tuple(_collectives(shapes)),
        source="DistributedLogprob of NeMo-RL",
    )


def _collectives(shapes: EndShapes) -> Iterator[Collective]:
    """Maxima, sums and log-probabilities over tensor-parallel ranks, and the log-probabilities of context-parallel ranks."""
    tokens = (shapes.b, shapes.s)
    if shapes.t > 1:
        yield Collective(kind="all_reduce", group="tp", shape=(*tokens, 1), dtype="fp32", phase="forward", count=2)
        yield Collective(kind="all_reduce", group="tp", shape=tokens, dtype="fp32", phase="forward")
    if shapes.split.context > 1:
        whole = (shapes.b, shapes.s * shapes.split.context)
        yield Collective(kind="all_gather", group="cp", shape=whole, dtype="fp32", phase="forward")
        yield Collective(kind="all_reduce", group="cp", shape=whole, dtype="fp32", phase="backward")
