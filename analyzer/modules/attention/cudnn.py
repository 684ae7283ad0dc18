"""The workspace of the backward of cuDNN's attention if it is deterministic: the gradients of the scores.

Sources: `SDPABackwardNode` of cudnn-frontend (node/scaled_dot_product_flash_attention.h), which accumulates the gradient of the
queries in fp32, or asks for a workspace for the gradients of the scores ("dP workspace") if the user requests a deterministic
algorithm on Hopper; `fused_attn_arbitrary_seqlen_bwd_impl`, `get_max_batch_size` and `get_max_tokens` of Transformer Engine
(common/fused_attn, 2.11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.modules.tree import Tensor
from analyzer.units import ceil_div, power_of_two, round_up

if TYPE_CHECKING:
    from analyzer.modules.shapes import Shapes

_BLOCK: Final = 64
_FEWEST_SEQUENCES: Final = 32
_FEWEST_TOKENS: Final = 1024
_MOST_SEQUENCES: Final = 512
_MOST_TOKENS: Final = 32768
"""Up to these numbers the graph of packed sequences is made for the next power of two, above them for the next multiple."""


def stores_score_gradients(compute_capability: tuple[int, int] | None, *, deterministic: bool) -> bool:
    """Whether the backward has a workspace for the gradients of all scores. Without a GPU that of an H100 is assumed."""
    return deterministic and (compute_capability or (9, 0))[0] == 9


def score_gradients_bytes(*, batch: int, heads: int, queries: int, keys: int, packed: bool = False) -> int:
    """Bytes of that workspace, 2 for each score. `queries` and `keys`: of a sequence, or of all of them if they are `packed`.

    For packed sequences Transformer Engine makes a graph for rounded numbers of sequences and tokens, as if each sequence had
    all of the tokens (from cuDNN 9.6 on).
    """
    if packed:
        batch = _rounded(batch, fewest=_FEWEST_SEQUENCES, most=_MOST_SEQUENCES)
        queries, keys = (_rounded(each, fewest=_FEWEST_TOKENS, most=_MOST_TOKENS) for each in (queries, keys))
    return 2 * batch * heads * round_up(queries, _BLOCK) * round_up(keys, _BLOCK)


def _rounded(value: int, *, fewest: int, most: int) -> int:
    if value > most:
        return most * ceil_div(value, most)
    return max(fewest, power_of_two(value))


def score_gradients(shapes: Shapes, heads: int, *, lengths: tuple[int, int]) -> Tensor:
    """The workspace of a deterministic backward of cuDNN. `lengths`: queries and keys of a sequence in one call."""
    packed = shapes.model.vision is not None and shapes.model.vision.packed
    queries, keys = (each * (shapes.b if packed else 1) for each in lengths)
    size = score_gradients_bytes(batch=shapes.b, heads=heads, queries=queries, keys=keys, packed=packed)
    return Tensor(name="gradients of the scores", shape=(size,), dtype="uint8", formula="2·b·a·s²/t, rounded")
