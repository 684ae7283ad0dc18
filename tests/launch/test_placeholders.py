"""Placeholders in the examples of MindSpeed-LLM, which the shell splits into words."""

from __future__ import annotations

from analyzer.launch.placeholders import with_whole_placeholders


def test_placeholder() -> None:
    """`CKPT_SAVE_DIR="your model save ckpt path"` is used without quotes."""
    words, sentences = with_whole_placeholders("--num-layers 2 --save your model save ckpt path --bf16".split())
    assert words == ("--num-layers", "2", "--save", "your model save ckpt path", "--bf16")
    assert len(sentences) == 1
    assert "--save" in sentences[0]


def test_other_words() -> None:
    """Several values and words that do not begin a placeholder are not changed."""
    line = "pretrain_gpt.py --data-path 0.5 a 0.5 b --save path --load=your path --rampup-batch-size 8 8 100"
    assert with_whole_placeholders(line.split()) == (tuple(line.split()), ())
