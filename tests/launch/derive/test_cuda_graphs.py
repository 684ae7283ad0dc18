"""Parts of a layer in CUDA graphs, as Megatron-LM 0.16 to 0.19 reads them.

Source: `TransformerConfig.__post_init__`, and from 0.18 on core/transformer/cuda_graph_config.py.
"""

from __future__ import annotations

import pytest

from analyzer.errors import InputError, UnsupportedError
from tests.job_of import job_of

TE = "--cuda-graph-impl transformer_engine"
LOCAL = "--cuda-graph-impl local"
MOE = "--num-experts 8 --disable-bias-linear"


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0"])
@pytest.mark.parametrize("graphs", ["", LOCAL, TE])
def test_an_unknown_part_is_refused_without_graphs_too(graphs: str, release: str) -> None:
    with pytest.raises(InputError, match=r"^--cuda-graph-scope: 'attention' is not part of a layer"):
        job_of(f"{graphs} --cuda-graph-scope attention", release=release)


@pytest.mark.parametrize("graphs", ["", TE])
def test_full_excludes_other_parts(graphs: str) -> None:
    assert job_of(f"{graphs} --cuda-graph-scope full") is not None
    with pytest.raises(InputError, match="full covers all parts"):
        job_of(f"{graphs} --cuda-graph-scope attn full")


@pytest.mark.parametrize("release", ["0.17.1", "0.18.2", "0.19.0"])
def test_graphs_of_inference_have_no_effect_on_training_without_graphs(release: str) -> None:
    assert job_of("--cuda-graph-scope full_iteration_inference", release=release).graphs is None
    with pytest.raises(UnsupportedError, match="graphs of inference"):
        job_of(f"{LOCAL} --cuda-graph-scope full_iteration_inference", release=release)


def test_graphs_of_inference_do_not_exist_in_0_16() -> None:
    with pytest.raises(InputError, match="'full_iteration_inference' is not part of a layer"):
        job_of("--cuda-graph-scope full_iteration_inference", release="0.16.1")


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0"])
def test_local_graphs_capture_the_router_and_the_preprocessing_together(release: str) -> None:
    for part in ("moe_router", "moe_preprocess"):
        graphs = job_of(f"{MOE} {LOCAL} --cuda-graph-scope {part}", release=release).graphs
        assert graphs is not None
        assert graphs.scope == ("moe_router", "moe_preprocess")
    with pytest.raises(InputError, match="moe_preprocess needs moe_router"):
        job_of(f"{MOE} {TE} --cuda-graph-scope moe_preprocess", release=release)


@pytest.mark.parametrize("part", ["moe_preprocess moe_router", "moe_router", "attn"])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_a_wait_for_other_ranks_cannot_be_captured(part: str, implementation: str) -> None:
    """The preprocessing of HybridEP copies the largest number of tokens to the host (`_HybridEPManager.setup_metadata`, 0.19)."""
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32"
    experts = f"{MOE} --moe-router-topk 2 --expert-model-parallel-size 2 {flex}"
    line = f"{experts} --cuda-graph-impl {implementation} --cuda-graph-modules {part}"
    assert job_of(line, release="0.19.0").graphs is not None
    captured = "moe_preprocess" in part or (implementation == "local" and "moe_router" in part)
    waiting = f"{line} --moe-hybridep-pad-uneven-dispatch-inputs"
    if not captured:
        assert job_of(waiting, release="0.19.0").graphs is not None
        return
    with pytest.raises(InputError, match="the host waits for the largest number of tokens"):
        job_of(waiting, release="0.19.0")


@pytest.mark.parametrize("release", ["0.18.2", "0.19.0"])
@pytest.mark.parametrize("line", ["", LOCAL, "--cuda-graph-impl full_iteration"])
def test_a_part_selects_the_implementation_of_full_iterations(line: str, release: str) -> None:
    """Since 0.18, `full_iteration` among the parts changes --cuda-graph-impl, unless it is transformer_engine."""
    line += " --no-check-for-nan-in-loss-and-grad"
    graphs = job_of(f"{line} --cuda-graph-modules full_iteration", release=release).graphs
    assert graphs is not None
    assert graphs.scope == ("full_iteration",)
    with pytest.raises(InputError, match="full_iteration covers all parts of a layer; leave attn out"):
        job_of(f"{line} --cuda-graph-modules attn full_iteration", release=release)


def test_before_0_18_a_part_does_not_select_the_implementation() -> None:
    assert job_of("--cuda-graph-scope full_iteration", release="0.17.1").graphs is None
