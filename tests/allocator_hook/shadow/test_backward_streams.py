"""The backward of an operation runs on the stream of its forward."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.shadow


@pytest.mark.parametrize("attributes", [{}, {"name": "expert_fc1"}], ids=["plain", "with a name"])
def test_the_backward_of_a_function_runs_on_the_stream_of_its_forward(attributes: dict[str, str]) -> None:
    """Megatron's `FineGrainedOffloadingGroupCommitFunction` stores its own `name`, which hides the method of the node."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.backward_streams import StreamContext, patches
    from allocator_hook.shadow.gpu import Stream
    from allocator_hook.step.patching import Patches

    seen: list[int] = []

    class Identity(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(context: Any, values: Any) -> Any:
            vars(context).update(attributes)
            return values.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            seen.append(Stream.current_id())
            return gradient

    source, stream = torch.ones(2, requires_grad=True), Stream()
    with Patches(patches()):
        on_default = Identity.apply(source)
        with StreamContext(stream):
            on_stream = Identity.apply(on_default)
        on_stream.sum().backward()
    assert seen == [stream.stream_id, 0]
