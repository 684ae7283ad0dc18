"""Continuous batching, against steps that are counted by hand."""

from __future__ import annotations

import pytest

from analyzer.inference.serving.batching import Load, Served, serve
from analyzer.inference.serving.step import StepWork
from analyzer.specs.serving import ServingSpec

DECODE, PROMPT = 0.01, 0.001
"""Seconds of a step, and of each token of a prompt in it."""


def seconds(work: StepWork) -> float:
    return (DECODE if work.requests else 0.0) + PROMPT * work.prompt_tokens


def load(**changes: object) -> Load:
    values: dict[str, object] = {
        "clients": 1, "requests": 1, "prompt": 64, "generate": 11, "spread": 0.0, "prefix": 0.0, "chunk": 4096, "chunked": True,
        "mixed": True, "groups": 1, "slots": 1000, "cache_tokens": 10**9,
    }  # fmt: skip
    return Load(**(values | changes))  # type: ignore[arg-type]


def served(**changes: object) -> Served:
    return serve(load(**changes), seconds)


def test_one_request() -> None:
    found = served()
    assert found.first == pytest.approx(0.064)
    assert found.token == pytest.approx(DECODE)
    assert found.tokens_per_second == pytest.approx(11 / (0.064 + 10 * DECODE))
    assert not found.waits


def test_prompts_of_several_clients_are_one_step() -> None:
    found = served(clients=3)
    assert found.first == pytest.approx(3 * 0.064)
    assert found.token == pytest.approx(DECODE)
    assert found.running == pytest.approx(3 * 10 * DECODE / (3 * 0.064 + 10 * DECODE))


def test_steps_with_prompts_are_graphs_up_to_a_number_of_tokens() -> None:
    """A prompt of 64 tokens in chunks of 48: the second one, with 16, is a graph if those of 16 tokens are."""
    found: list[tuple[int, bool]] = []

    def noted(work: StepWork) -> float:
        found.append((work.prompt_tokens, work.captured))
        return seconds(work)

    serve(load(chunk=48, captured=16), noted)
    assert found[:2] == [(48, False), (16, True)]
    found.clear()
    serve(load(chunk=48), noted)
    assert not any(captured for _, captured in found)


def test_full_steps_are_graphs_if_those_of_so_many_tokens_are() -> None:
    """Prompts and generated tokens together are never more than `chunk`, in any group."""
    captured: list[bool] = []

    def noted(work: StepWork) -> float:
        if work.prompt_tokens:
            captured.append(work.captured)
        return seconds(work)

    for groups in (1, 2):
        serve(load(clients=250, requests=2, prompt=100, spread=0.2, chunk=300, captured=300, groups=groups), noted)
    assert len(captured) > 50
    assert all(captured)


def test_chunks_are_steps_of_their_own() -> None:
    steps: list[int] = []

    def counted(work: StepWork) -> float:
        steps.append(work.prompt_tokens)
        return seconds(work)

    serve(load(chunk=32), counted)
    assert [each for each in steps if each] == [32, 32]


def test_a_prompt_that_is_not_split_takes_a_step_of_its_own() -> None:
    sizes: list[int] = []

    def counted(work: StepWork) -> float:
        sizes.append(work.prompt_tokens)
        return seconds(work)

    serve(load(clients=2, prompt=60, chunk=64, chunked=False, generate=3), counted)
    assert max(sizes) == 60


def test_mixed_steps_generate_and_separate_ones_do_not() -> None:
    """Chunks of 32 tokens: the second client's prompt is computed while the first one generates."""
    mixed = served(clients=2, prompt=32, chunk=32, generate=3)
    # a token that is generated is one of the 32: 31 tokens of the second prompt, then its last one
    assert mixed.first == pytest.approx((0.032 + 0.032 + 0.031 + DECODE + 0.001 + DECODE) / 2)
    separate = served(clients=2, prompt=32, chunk=32, generate=3, mixed=False)
    assert separate.first == pytest.approx((0.032 + 0.064) / 2)
    assert separate.token == pytest.approx((0.032 + 2 * DECODE + 2 * DECODE) / 4)


def test_requests_wait_for_room_in_the_cache() -> None:
    found = served(clients=2, cache_tokens=80)
    assert found.waits
    alone = 0.064 + 10 * DECODE
    assert found.first == pytest.approx((0.064 + alone + 0.064) / 2)


def test_requests_wait_for_one_that_runs() -> None:
    assert served(clients=2, slots=1).first == pytest.approx((0.064 + 0.064 + 10 * DECODE + 0.064) / 2)


def test_tokens_of_a_prompt_that_are_in_the_cache_are_not_computed() -> None:
    assert served(prefix=0.5).first == pytest.approx(0.032)


def test_accepted_tokens_need_fewer_steps() -> None:
    spec = ServingSpec(clients=1, draft_tokens=2, acceptance=0.5)
    assert spec.tokens_per_step == 1 + 0.5 + 0.25
    found = served(generate=701, tokens_per_step=spec.tokens_per_step, drafts=2)
    assert found.token == pytest.approx(DECODE / 1.75)


def test_a_client_sends_its_requests_one_after_the_other() -> None:
    found = served(requests=3)
    assert found.tokens_per_second == pytest.approx(11 / (0.064 + 10 * DECODE), rel=0.01)
    assert found.first_later == pytest.approx(0.064, rel=0.2)


def test_prompts_on_replicas_of_their_own() -> None:
    found = served(clients=2, prefill_replicas=2, transfer=0.005)
    assert found.first == pytest.approx(0.064)
    assert found.token == pytest.approx((10 * DECODE + 0.005) / 10, rel=0.02)


def test_groups_compute_prompts_at_the_same_time() -> None:
    assert served(clients=2, groups=2).first == pytest.approx(0.064)


def test_steps_that_are_taken_together_cost_what_single_ones_do() -> None:
    """A step that gets slower with the length: the sum over all steps, counted one by one."""

    def slower(work: StepWork) -> float:
        return (1e-3 + 1e-6 * work.length * work.requests if work.requests else 0.0) + 1e-5 * work.prompt_tokens

    found = serve(load(generate=1001, prompt=1000), slower)
    exact = sum(1e-3 + 1e-6 * (1000 + place) for place in range(1000)) / 1000
    assert found.token == pytest.approx(exact, rel=0.03)


def test_a_prompt_waits_for_others_while_requests_are_generated() -> None:
    """Both prompts do not fit one step. The second one waits three steps of decode, unless a step of 65 tokens is full enough."""
    alone = {"clients": 2, "chunk": 100, "chunked": False}
    assert served(**alone).first == pytest.approx((0.064 + 0.064 + DECODE + 0.064) / 2)
    assert served(**alone, wait_steps=3).first == pytest.approx((0.064 + 0.064 + 3 * DECODE + DECODE + 0.064) / 2)
    assert served(**alone, wait_steps=3, wait_share=0.6).first == served(**alone).first


def test_an_engine_that_looks_for_requests_now_and_then() -> None:
    """A request waits for half of the steps in the mean. An engine without requests looks at once."""
    assert served(requests=3, receive_steps=30).first == pytest.approx(0.064)
    often = served(clients=8, requests=20, generate=400, spread=0.2)
    seldom = served(clients=8, requests=20, generate=400, spread=0.2, receive_steps=21)
    assert 6 * DECODE < seldom.first_later - often.first_later < 14 * DECODE
