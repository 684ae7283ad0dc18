"""Which training scripts are assumed to train a GPT."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.entry_script import check_entry, family_of


@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "/path/to/vit/pretrain_gpt.py", "./pretrain_gpt.py"])
def test_megatrons_own_script_needs_no_statement(entry: str) -> None:
    assert check_entry(entry, module=False, options={}) is None
    assert check_entry("megatron.pretrain_gpt", module=True, options={}) is None


@pytest.mark.parametrize(
    ("entry", "family"),
    [
        ("examples/bert/pretrain_bert.py", "bert"), ("pretrain_t5.py", "t5"), ("megatron.pretrain_t5", "t5"),
        ("pretrain_gpt.py", "gpt"), ("train.py", "gpt"), (None, "gpt"),
        ("pretrain_vlm.py", "llava"), ("megatron.pretrain_vlm", "llava"),
        ("/a/examples/multimodal/train.py", "llava"), ("./examples/mimo/train.py", "mimo"), ("my/train.py", "gpt"),
    ],
)  # fmt: skip
def test_the_script_says_which_model_is_trained(entry: str | None, family: str) -> None:
    assert family_of(entry) == family
    if entry is not None and family != "gpt":
        assert check_entry(entry, module=entry.startswith("megatron."), options={"--mask-prob": ["0.15"]}) is None


@pytest.mark.parametrize(
    "entry",
    [
        "pretrain_llama.py", "./pretrain_deepseekv2.py", "pretrain_deepseek_250624.py", "pretrain_mcore_mistral.py", "train.py",
        "../qwen3/pretrain_qwen.py", "pretrain_megatron_bloom.py", "finetune_gpt.py", "posttrain_gpt.py", "/home/bert/run_llama.py",
    ],
)  # fmt: skip
def test_any_other_script_is_assumed_to_train_a_gpt(entry: str) -> None:
    stated = check_entry(entry, module=False, options={"--num-layers": ["2"]})
    assert stated is not None
    assert entry in stated
    assert "assumed to train a GPT" in stated


@pytest.mark.parametrize(
    ("entry", "model"),
    [
        ("my_bert/train.py", "BERT"),
        ("finetune_t5.py", "T5"),
        ("my_vlm/pretrain_llava.py", "vision-language"),
        ("pretrain_llava.py", "vision-language"),
        ("qwen2_vl/pretrain_qwen2_vl.py", "vision-language"),
        ("pretrain_vision_classify.py", "vision transformer"),
        ("tools/retro/pretrain_retro.py", "RETRO"),
        ("pretrain_ict.py", "ICT"),
        ("my_multimodal/train.py", "multimodal"),
        ("train_rl.py", "reinforcement learning"),
    ],
)
def test_scripts_of_other_models_are_refused(entry: str, model: str) -> None:
    with pytest.raises(UnsupportedError, match=model) as refused:
        check_entry(entry, module=False, options={})
    assert refused.value.option == entry


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"--freeze-ViT": []}, "vision-language"),
        ({"--language-model-type": ["mistral_7b"]}, "vision-language"),
        ({"--model-provider": ["llava_vlm"]}, "llava_vlm"),
        ({"--bert-no-binary-head": []}, "BERT"),
        ({"--tokenizer-type": ["BertWordPieceLowerCase"]}, "BERT"),
        ({"--encoder-seq-length": ["512"], "--decoder-seq-length": ["128"]}, "T5"),
        ({"--retro-add-retriever": []}, "RETRO"),
        ({"--num-classes": ["1000"]}, "vision transformer"),
    ],
)
def test_options_of_other_models_are_refused_with_any_name(options: dict[str, list[str]], model: str) -> None:
    with pytest.raises(UnsupportedError, match=model):
        check_entry("train.py", module=False, options=options)


HYBRID_SPEC = {"--spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]}


@pytest.mark.parametrize("entry", ["../../pretrain_hybrid.py", "pretrain_mamba.py"])
def test_scripts_of_hybrid_models_need_an_option_that_describes_the_layers(entry: str) -> None:
    assert check_entry(entry, module=False, options=HYBRID_SPEC) is None
    with pytest.raises(InputError, match="no option describes its layers"):
        check_entry(entry, module=False, options={})


def test_a_hybrid_model_is_known_by_its_options() -> None:
    """A launch of Qwen3-Next in Pai-Megatron-Patch gives the letters other layers: M is a gated delta net, and - has experts."""
    assert check_entry("pretrain_mamba.py", module=False, options={"--hybrid-override-pattern": ["M-"]}) is None
    with pytest.raises(UnsupportedError, match="Mamba hybrid"):
        check_entry("pretrain_qwen3_next.py", module=False, options={"--hybrid-override-pattern": ["M-"]})
    with pytest.raises(InputError, match="builds a GPT"):
        check_entry("pretrain_gpt.py", module=False, options={"--is-hybrid-model": []})
