"""Options of model families, compared with public training scripts and with the fields of configurations."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.families import FAMILIES, megatron_model
from analyzer.launch.model_config.published import CATALOGUE
from analyzer.launch.model_config.refused import REFUSED
from tests.launch.model_config.configurations import notes, options, published, words, write_config

SCRIPTS = {
    "Qwen/Qwen3-30B-A3B": """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32
        --num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
        --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-06 --swiglu
        --untie-embeddings-and-output-weights --rotary-base 1000000 --moe-ffn-hidden-size 768 --moe-router-topk 8
        --num-experts 128""",
    "zai-org/GLM-4.5": """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 96
        --num-query-groups 8 --kv-channels 128 --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 --add-qkv-bias
        --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --swiglu
        --untie-embeddings-and-output-weights --rotary-base 1000000 --moe-ffn-hidden-size 1536
        --moe-shared-expert-intermediate-size 1536 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-topk 8 --moe-router-topk-scaling-factor 2.5 --moe-layer-freq ([0]*3+[1]*89) --num-experts 160
        --moe-router-dtype fp32""",
    "moonshotai/Moonlight-16B-A3B": """--disable-bias-linear --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264
        --num-attention-heads 16 --normalization RMSNorm --position-embedding-type rope --swiglu
        --untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128
        --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --rotary-base 50000 --no-rope-fusion --num-experts 64
        --moe-layer-freq ([0]*1+[1]*26) --moe-ffn-hidden-size 1408 --moe-router-topk 6
        --moe-shared-expert-intermediate-size 2816 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-topk-scaling-factor 2.446 --moe-router-dtype fp32""",
}
"""Model options of zyzshishui/slime, scripts/models, without those about the kernels and the loss. Layer patterns are written
with [0] and [1]."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_public_scripts_have_the_same_options(name: str) -> None:
    found = options(words(name, script=True))
    assert {flag: found.get(flag, "missing") for flag in options(SCRIPTS[name])} == options(SCRIPTS[name])


def test_deepseek_v3_options_are_those_of_its_paper() -> None:
    """Section 4.2 of arXiv 2412.19437: 8 experts of at most 4 of 8 nodes, and three dense layers."""
    found = options(words("deepseek-ai/DeepSeek-V3", script=True))
    assert found["--moe-layer-freq"] == "([0]*3+[1]*58)"
    assert (found["--moe-router-topk"], found["--moe-router-num-groups"], found["--moe-router-group-topk"]) == ("8", "8", "4")
    assert found["--rope-type"] == "yarn"


@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [
        ("mistralai/Mistral-7B-v0.1", "4095,0", None),
        ("mistralai/Mistral-7B-v0.3", None, None),
        ("microsoft/Phi-3-mini-4k-instruct", "2046,0", None),
        ("openai/gpt-oss-20b", "127,0", "2"),
        ("Qwen/Qwen2.5-7B", None, None),
    ],
)
def test_windows_include_the_current_token(name: str, size: str | None, layers: str | None) -> None:
    found = options(words(name, script=True))
    assert (found.get("--window-size"), found.get("--window-attn-skip-freq")) == (size, layers)


def test_qwen_windows_start_at_max_window_layers(tmp_path: Path) -> None:
    file = write_config(tmp_path, "Qwen/Qwen2.5-7B", use_sliding_window=True, sliding_window=4096, max_window_layers=20)
    found = options(words(file, script=True))
    assert (found["--window-size"], found["--window-attn-skip-freq"]) == ("4095,0", "([0]*20+[1]*8)")


def test_a_window_as_long_as_the_longest_sequence_is_none(tmp_path: Path) -> None:
    file = write_config(tmp_path, "microsoft/Phi-3-mini-4k-instruct", sliding_window=262144)
    assert "--window-size" not in words(file, script=True)


def test_layer_types_of_gpt_oss(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    file = write_config(tmp_path, "openai/gpt-oss-20b", num_hidden_layers=4, layer_types=kinds)
    assert options(words(file))["--window-attn-skip-freq"] == "([0]*1+[1]*2+[0]*1)"


def test_qwen_moe_layers(tmp_path: Path) -> None:
    file = write_config(tmp_path, "Qwen/Qwen1.5-MoE-A2.7B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert options(words(file))["--moe-layer-freq"] == "([0]*1+[1]*1+[0]*3+[1]*1)"


def test_rotary_scaling_of_llama_3() -> None:
    config = {**published()["meta-llama/Llama-3.1-8B"]["config"], "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    model = megatron_model(Configuration(config, "x"))
    assert ("--use-rope-scaling",) in model.options
    assert ("--rope-scaling-factor", "8") in model.options
    assert model.notes == ()


def test_fields_of_transformers_5() -> None:
    """rope_theta and partial_rotary_factor are in rope_parameters."""
    config = published()["zai-org/GLM-4.5"]["config"]
    moved = {key: config[key] for key in ("rope_theta", "partial_rotary_factor")}
    rest = {key: value for key, value in config.items() if key not in moved}
    model = megatron_model(Configuration({**rest, "rope_parameters": {"rope_type": "default", **moved}}, "x"))
    assert ("--rotary-percent", "0.5") in model.options
    assert model == megatron_model(Configuration(config, "x"))


def test_differences_are_stated(tmp_path: Path) -> None:
    assert "290,816 parameters too many are counted" in notes("tiiuae/falcon-7b")
    assert "GELU stands for its activation relu" in notes("facebook/opt-125m")
    assert "--quick-geglu stands for its gate with GELU" in notes("google/gemma-2b")
    assert "its yarn scaling of rotary positions is left out" in notes("openai/gpt-oss-20b")
    bias = 32 * 4096
    assert f"{bias:,} parameters are not counted" in notes(write_config(tmp_path, "meta-llama/Llama-2-7b-hf", attention_bias=True))


@pytest.mark.parametrize(
    ("name", "changed", "part"),
    [
        ("facebook/opt-125m", {"do_layer_norm_before": False}, "norms after attention and FFN"),
        ("facebook/opt-125m", {"word_embed_proj_dim": 512}, "embedding of another width"),
        ("tiiuae/falcon-7b", {"alibi": True}, "ALiBi"),
        ("meta-llama/Llama-2-7b-hf", {"mlp_bias": True}, "biases in its FFN"),
        ("deepseek-ai/DeepSeek-V3", {"attention_bias": True}, "biases in its multi-latent attention"),
        ("meta-llama/Llama-2-7b-hf", {"model_type": "idefics3", "vision_config": {}}, "inputs other than text"),
        ("meta-llama/Llama-2-7b-hf", {"model_type": "bloom"}, "ALiBi positions (model_type bloom)"),
    ],
)
def test_models_that_are_not_modelled(name: str, changed: dict[str, object], part: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="which is not modelled") as error:
        words(write_config(tmp_path, name, **changed))
    assert part in error.value.fault


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'gpt9', which is not known"):
        words(write_config(tmp_path, "meta-llama/Llama-2-7b-hf", model_type="gpt9"))


def test_no_type_is_both_read_and_refused() -> None:
    refused = [kind for kinds in REFUSED.values() for kind in kinds]
    assert len(set(refused)) == len(refused)
    assert not set(refused) & set(FAMILIES)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": None}, "has no model_type"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers of"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of"),
        ({"vocab_size": -5}, "vocab_size of .*config.json is -5; give an integer of 1 or more"),
        ({"vocab_size": 0}, "vocab_size of .*config.json is 0; give an integer of 1 or more"),
        ({"vocab_size": True}, "vocab_size of .*config.json is True; give an integer of 1 or more"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps of"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps of"),
        ({"rope_theta": float("nan")}, "rope_theta of"),
        ({"hidden_size": 10**400}, "hidden_size of"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings of .* give true or false"),
        ({"rope_scaling": [1, 2]}, "rope_scaling of .* give an object"),
    ],
)
def test_missing_and_wrong_fields_are_named(changed: dict[str, object], part: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=part):
        words(write_config(tmp_path, "meta-llama/Llama-2-7b-hf", **changed))


LIKE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "glm4v_text": "glm4",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_moe_text": "glm4_moe",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "ministral": "mistral",
    "ministral3": "mistral",
    "granitemoeshared": "granitemoe",
    "deepseek_v32": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
}
"""Types of which the catalogue has no model, and types with the same fields."""


def of_type(kind: str) -> dict[str, object]:
    """The fields of a published model of this type."""
    models = json.loads(CATALOGUE.read_text(encoding="utf-8"))["models"]
    like = "qwen3_next" if kind.startswith("qwen3_5") else LIKE.get(kind, kind)
    configurations = [each for model in models.values() for each in (model["config"], model["config"].get("text_config", {}))]
    return next({**each, "model_type": kind} for each in configurations if each.get("model_type") == like)


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "gpt2"]
)
def test_more_layers_than_are_modelled_are_refused_at_once(kind: str) -> None:
    values = {**of_type(kind), ("n_layer" if kind == "gpt2" else "num_hidden_layers"): 10**12}
    with pytest.raises(InputError, match=r"is 1000000000000, which is above 10000, the largest number that is modelled; give less"):
        megatron_model(Configuration(values, "config.json"))


@pytest.mark.parametrize("layers", [[[1]], [None], [True], "1", {"1": 1}, 3])
def test_dense_layers_are_a_list_of_integers(layers: object) -> None:
    values = {**of_type("qwen3_moe"), "mlp_only_layers": layers}
    with pytest.raises(InputError, match=r"^--info-model: mlp_only_layers of config.json is .*; give a list of integers$"):
        megatron_model(Configuration(values, "config.json"))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama", "hidden_act"),
        ("mixtral", "hidden_act"),
        ("qwen3_moe", "hidden_act"),
        ("gpt_oss", "hidden_act"),
        ("deepseek_v3", "hidden_act"),
        ("nemotron", "hidden_act"),
        ("gemma", "hidden_activation"),
        ("gemma", "hidden_act"),
        ("gpt2", "activation_function"),
        ("opt", "activation_function"),
        ("falcon", "activation"),
    ],
)
def test_an_unknown_activation_is_refused(kind: str, field: str) -> None:
    values = {**of_type(kind), field: "foo"}
    with pytest.raises(InputError, match=rf"^--info-model: {field} of config.json is 'foo'; give one of .*relu2.*silu.*$"):
        megatron_model(Configuration(values, "config.json"))


@pytest.mark.parametrize(
    ("kind", "activation", "option", "noted"),
    [
        ("llama", "silu", "--swiglu", False),
        ("llama", "swish", "--swiglu", False),
        ("llama", "quick_gelu", "--quick-geglu", False),
        ("llama", "gelu_pytorch_tanh", "--quick-geglu", True),
        ("llama", "relu", "--swiglu", True),
        ("nemotron", "relu2", "--squared-relu", False),
        ("starcoder2", "relu2", "--squared-relu", False),
        ("starcoder2", "gelu_pytorch_tanh", None, False),
        ("starcoder2", "silu", None, True),
        ("gpt_neox", "gelu_fast", None, False),
    ],
)
def test_known_activations_become_options(kind: str, activation: str, option: str | None, noted: bool) -> None:
    """Megatron-LM: `--swiglu` is a gate with SiLU, `--quick-geglu` one with quick GELU, and `--squared-relu` is relu(x)**2."""
    model = megatron_model(Configuration({**of_type(kind), "hidden_act": activation}, "config.json"))
    found = {flag for flag, *_ in model.options} & {"--swiglu", "--quick-geglu", "--squared-relu"}
    assert found == ({option} if option else set())
    assert any(f" {activation}" in note for note in model.notes) == noted


@pytest.mark.parametrize(
    ("scaling", "part"),
    [
        ({"rope_type": "llama3", "factor": float("nan")}, "factor of rope_scaling of config.json is nan; give a number"),
        ({"rope_type": "llama3", "factor": "8"}, "factor of rope_scaling of config.json is '8'; give a number"),
        ({"rope_type": ["yarn"]}, "rope_type of rope_scaling of config.json is .*; give a text"),
    ],
)
def test_wrong_fields_of_rotary_positions_are_named(scaling: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        megatron_model(Configuration({**of_type("llama"), "rope_scaling": scaling}, "config.json"))


WRONG: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 3, 10**12, 10**30, -(10**30), 1.5, 1e308, float("nan"), float("inf"), "", "x", "\x1b[31m\n",
    "9" * 5000,
    [], [1], [[1]], [None], [{}], {}, {"a": 1}, {"type": "yarn"}, {"type": ["x"]}, {"rope_type": "llama3", "factor": 10**400},
)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"granite"}))
def test_wrong_values_of_any_field_are_read_or_refused(kind: str) -> None:
    """No value of a field ends in another error than one for the user, and none takes long."""
    base = of_type(kind)
    fields = [
        *base,
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "mlp_only_layers",
        "hidden_act",
        "head_dim",
    ]
    for field in fields:
        for value in WRONG:
            with suppress(InputError):
                megatron_model(Configuration({**base, field: value}, "config.json"))


@pytest.mark.parametrize("value", [0, -0.5, 1e-9, 2, float("nan"), "x", True])
def test_a_share_is_a_part_of_the_whole(value: object) -> None:
    """`downsample_ratio` of InternVL divides the tokens of an image: 0 was an internal error."""
    with pytest.raises(InputError, match=r"downsample_ratio of config\.json is .*; give a number"):
        Configuration({"downsample_ratio": value}, "config.json").share("downsample_ratio", 0.5)
    assert Configuration({"downsample_ratio": None}, "config.json").share("downsample_ratio", 0.5) == 0.5


def test_qwen3_5_is_the_text_model_of_its_configuration(tmp_path: Path) -> None:
    """The published configurations have the fields of the language model in text_config."""
    text = {**of_type("qwen3_5_text"), "full_attention_interval": 3, "num_hidden_layers": 6}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {}}))
    found = options(words(file))
    assert found["--linear-attention-freq"] == "3"
    assert found["--rotary-percent"] == "0.25"
    assert {"--attention-output-gate", "--qk-layernorm", "--apply-layernorm-1p"} <= found.keys()
    assert "--num-experts" not in found
    assert "vision encoder is left out" in notes(file)


@pytest.mark.parametrize(
    ("kinds", "written"),
    [("lllf" * 2, "4"), ("lf" * 3, "2"), ("llfl", "3"), ("flll", "([0]*1+[1]*3)"), ("fff", "1"), ("llll", "([1]*4)")],
)
def test_the_layers_with_linear_attention(kinds: str, written: str, tmp_path: Path) -> None:
    names = ["linear_attention" if each == "l" else "full_attention" for each in kinds]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**of_type("qwen3_next"), "num_hidden_layers": len(kinds), "layer_types": names}))
    assert options(words(file))["--linear-attention-freq"] == written


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("gemma3n_text", "norms after attention and FFN"),
        ("kimi_linear", "Kimi delta attention, which no release of Megatron-LM has"),
        ("minimax", "lightning attention"),
        ("longcat_flash", "two attention layers"),
        ("phimoe", "biases in its norms"),
        ("bert", "give the launch of pretrain_bert.py"),
    ],
)
def test_families_without_layers_in_megatron_are_refused(kind: str, part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        megatron_model(Configuration({"model_type": kind}, "config.json"))


def test_the_language_model_of_a_vision_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": of_type("qwen3_vl_text"), "vision_config": {"depth": 27}}))
    assert "--qk-layernorm" in options(words(file))
    assert "--no-rope-fusion" in options(words(file))


def test_nemotron_3_has_the_pattern_of_its_configuration(tmp_path: Path) -> None:
    names = ["linear_attention", "moe", "full_attention", "mlp"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**of_type("nemotron_h"), "layers_block_type": names, "moe_latent_size": 512, "n_group": 1}))
    found = options(words(file))
    assert found["--hybrid-override-pattern"] == "ME*-"
    assert found["--moe-latent-size"] == "512"
    assert found["--position-embedding-type"] == "none"


def test_layers_with_experts_are_those_of_mlp_layer_types(tmp_path: Path) -> None:
    kinds = ["dense", "sparse"] * 23 + ["dense"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**of_type("glm4_moe_lite"), "mlp_layer_types": kinds}))
    assert options(words(file))["--moe-layer-freq"].startswith("([0]*1+[1]*1+[0]*1")
