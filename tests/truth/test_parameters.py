"""End-to-end comparison with the parameters of public models as Megatron-LM core 0.16.1 creates them. All numbers are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.command import report, torchrun
from tests.data_files import truth_records

FILE = "parameters.json"
RELEASE = ("--info-megatron", "0.16.1")
"""The release that the numbers are of, so that no other one is compared."""
KINDS = {
    "word_embeddings": "word_embedding",
    "position_embeddings": "position_embedding",
    "output_layer": "output_layer",
    "self_attention": "attention",
    "mlp": "mlp",
    "router": "router",
    "experts": "routed_experts",
    "shared_experts": "shared_experts",
}
"""Module name → kind in the records of all parameters below it, except those of norms."""


def name(record: dict[str, Any]) -> str:
    sizes = "-".join(f"{key}{record['layout'][key]}" for key in ("tp", "pp", "cp", "vpp", "dp"))
    return f"{record['model']}-{sizes}-v{record['tokenizer_vocab']}"


RECORDS = truth_records(FILE)
MOST_CHUNKS = 4
"""Chunks of a launch in the quick tests. The report of each chunk has its tree."""


def parameters(records: Iterable[dict[str, Any]]) -> list[ParameterSet]:
    """The records as parameters of a test. Those of many chunks are slow."""
    found = []
    for record in records:
        slow = record["layout"]["pp"] * (record["layout"]["vpp"] or 1) > MOST_CHUNKS
        found.append(pytest.param(record, marks=[pytest.mark.slow] if slow else [], id=name(record)))
    return found


def test_all_records_are_present() -> None:
    assert len(RECORDS) == 53


def by_kind(tree: dict[str, Any], kind: str = "", *, times: int = 1) -> Counter[str]:
    """Number of parameters of a JSON tree by the kinds of the records."""
    kind = KINDS.get(tree["name"], kind)
    times *= tree.get("repeat", 1)
    found: Counter[str] = Counter()
    for weight in tree.get("weights", ()):
        norm = "layer_norm" in weight["name"] or "norm" in tree["name"]
        numel = 1
        for size in weight["shape"]:
            numel *= size
        found["norm" if norm else kind] += times * numel
    for child in tree.get("children", ()):
        found += by_kind(child, kind, times=times)
    return found


@pytest.mark.parametrize("record", parameters(RECORDS))
def test_parameters_match_megatron(record: dict[str, Any]) -> None:
    output = report(*torchrun(record["world_size"]), *record["argv"], *RELEASE)
    model = output["model"]
    assert model["padded_vocab_size"] == record["padded_vocab_size"]
    assert model["parameters"] == record["full_total"]
    assert model["parameters_unpadded"] == record["full_total_unpadded_vocab"] + extra_tokens(record)
    assert model["parameters_active"] == record["full_total"] - idle(record)
    assert model["parameters_routed_experts"] == record["full_routed_experts"]
    assert by_kind(model["tree"]) == record["full_by_kind"]
    assert feed_forward(model["tree"]) == record["ffn_hidden_size"]
    parallel = output["parallel"]
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor", "dp": "data"}
    assert {key: parallel[long] for key, long in names.items()} == {key: record["layout"][key] for key in names}
    assert parallel["virtual_pipeline"] == record["layout"]["vpp"]
    assert {rank["pipeline_rank"] for rank in output["ranks"]} == set(range(record["layout"]["pp"]))
    for truth in record["per_pp_rank"]:
        of_rank(output, truth)


def idle(record: dict[str, Any]) -> int:
    """Parameters of the experts that are not active for a token."""
    words = record["argv"]
    if "--num-experts" not in words:
        return 0
    experts, chosen = (int(words[words.index(option) + 1]) for option in ("--num-experts", "--moe-router-topk"))
    return int(record["full_routed_experts"]) * (experts - chosen) // experts


def extra_tokens(record: dict[str, Any]) -> int:
    """Parameters of the token that a NullTokenizer adds to the public vocabulary size.

    Unpadded totals of the records use the public vocabulary of the model, those of the report the tokenizer's.
    """
    public = min(other["tokenizer_vocab"] for other in RECORDS if other["model"] == record["model"])
    hidden_size = int(record["argv"][record["argv"].index("--hidden-size") + 1])
    embeddings = 2 if "output_layer" in record["full_by_kind"] else 1
    return int(record["tokenizer_vocab"] - public) * hidden_size * embeddings


def of_rank(output: dict[str, Any], truth: dict[str, Any]) -> None:
    """Compare one pipeline rank of the report with the parameters that Megatron creates there."""
    rank = next(each for each in output["ranks"] if each["pipeline_rank"] == truth["pp_rank"])
    assert any(first <= truth["global_rank"] <= last for first, last in rank["ranks"])
    assert rank["parameters"] == truth["total"]
    assert rank["parameters_routed_experts"] == truth["by_kind"].get("routed_experts", 0)
    kinds: Counter[str] = Counter()
    for chunk, expected in zip(rank["chunks"], truth["chunks"], strict=True):
        assert chunk["virtual_stage"] == expected["vp_stage"]
        assert chunk["layers"] == expected["layers"]
        assert (chunk["pre_process"], chunk["post_process"]) == (expected["pre_process"], expected["post_process"])
        found = by_kind(chunk["tree"])
        assert found.total() == expected["total"]
        kinds += found
    assert kinds == truth["by_kind"]


def feed_forward(tree: dict[str, Any]) -> int:
    """FFN width: columns of the weight of linear_fc2."""
    below: list[dict[str, Any]] = [tree]
    for node in below:
        below += node.get("children", ())
    weights = next(node["weights"] for node in below if node["name"] == "linear_fc2")
    width: int = next(weight["full_shape"][-1] for weight in weights if weight["name"] == "weight")
    return width


@pytest.mark.parametrize("record", parameters(record for record in RECORDS if isinstance(record["full_total_local_spec"], int)))
def test_parameters_of_the_local_implementation_match_megatron(record: dict[str, Any]) -> None:
    argv = [*record["argv"], "--transformer-impl", "local"]
    if "--disable-bias-linear" not in argv and "--moe-grouped-gemm" in argv:
        argv.remove("--moe-grouped-gemm")  # without Transformer Engine only sequential experts support biases
    if "RMSNorm" in argv:
        argv.append("--no-persist-layer-norm")
    model = report(*torchrun(record["world_size"]), *argv, *RELEASE)["model"]
    assert model["parameters"] == record["full_total_local_spec"]
