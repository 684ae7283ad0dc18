"""Layers with per-layer configuration, in the format of Llama-3.1-Nemotron-51B, with widths of Nemotron and Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.modules.inputs import module_inputs
from analyzer.modules.models.gpt import full_model
from analyzer.modules.tree import parameters
from analyzer.specs import BlockSpec, TrainingJob
from tests.data_files import data_file
from tests.job_of import job_of

DATA = data_file("different_layers.json")
LAUNCH = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --vocab-size 9999 "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --use-rotary-position-embeddings --use-rope-scaling --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
)


def launched(options: str = "", *, config: Path | str = DATA) -> TrainingJob:
    return job_of(f"{LAUNCH} --heterogeneous-layers-config-path {config} {options}")


def test_branches_follow_the_configuration_file() -> None:
    blocks = launched().model.blocks
    assert [block.attention for block in blocks] == ["full", "none", "linear", "full", "none", "none", "full", "full"]
    assert [block.feed_forward for block in blocks] == ["full", "full", "full", "none", "none", "full", "linear", "full"]
    # int(2 · 5.25 · 512 / 3) = 1792 is a multiple of 256; 896 and 448 are rounded up
    assert [block.ffn_hidden_size for block in blocks] == [1792, 1024, 512, None, None, 1792, None, 1024]


def test_the_ffn_multiplier_of_llama_gives_its_ffn_width(tmp_path: Path) -> None:
    """Llama 3.1 70B, the base of Nemotron: hidden size 8,192 and FFN width 28,672, which is multiplier 5.25 in this format."""
    branch = {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}
    content = {
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
        "block_configs": [{"attention": branch, "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False}}],
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps(content))
    sizes = "--num-layers 1 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8"
    assert launched(sizes, config=config).model.blocks == (BlockSpec(ffn_hidden_size=28672),)


def test_parameters_of_every_kind_of_layer() -> None:
    """h = 512, 8 heads in 4 groups of 64: attention h·(512 + 2·256) + 512·h, an FFN of width f 3·h·f, one norm each."""
    h = 512
    attention, linear = h * 1024 + 512 * h + h, h * h + h
    widths = 2 * 1792 + 2 * 1024 + 512
    layers = 4 * attention + 2 * linear + 3 * h * widths + 5 * h
    job = launched()
    outside = 2 * job.model.padded_vocab_size * h + h
    assert sum(parameter.numel for parameter in parameters(full_model(module_inputs(job)))) == layers + outside


@pytest.mark.parametrize(
    ("options", "option", "word"),
    [
        ("--num-experts 8", "--num-experts", "MoE layers instead"),
        ("--mtp-num-layers 1", "--mtp-num-layers", "MTP layers"),
        ("--num-layers 4", "--num-layers", "has 8"),
        ("--num-query-groups 2", "--num-query-groups", "has 4"),
        ("--normalization LayerNorm", "--normalization", "RMSNorm"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-parallel", "layer 3"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "config-path", "virtual"),
        ("--transformer-impl local --no-persist-layer-norm", "--transformer-impl", "local"),
        ("--cuda-graph-impl local", "--cuda-graph-impl", "graphs"),
    ],
)
def test_incompatible_options_are_rejected(options: str, option: str, word: str) -> None:
    with pytest.raises(InputError) as caught:
        launched(options)
    assert option in caught.value.option
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("not json", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "block_configs"),
        ('{"block_configs": [{"attention": {}}]}', "layer 1"),
        ('{"block_configs": [{"attention": {}, "ffn": {"ffn_mult": -1}}]}', "width -1"),
        ('{"block_configs": [{"attention": {}, "ffn": {"ffn_mult": 4}}]}', "n_heads_in_group"),
    ],
)
def test_an_invalid_file_is_rejected(content: str, word: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(content)
    with pytest.raises(InputError, match=word):
        launched(config=config)


def test_a_missing_file_is_rejected() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        launched(config="nowhere.json")
