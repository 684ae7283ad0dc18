"""Vision-language models: lengths, sizes and frozen parts as their training scripts derive them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.coverage import script_effects
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.script_options import SCRIPTS, options_of
from analyzer.launch.parse import parse
from analyzer.modules.inputs import module_inputs
from analyzer.modules.layer import LayerKind
from analyzer.modules.models.gpt import chunk_tree
from analyzer.modules.models.parts import ChunkKind
from analyzer.predict import predict
from analyzer.specs import TrainingJob

VLM = (
    "--nproc-per-node 8 pretrain_vlm.py --num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 576 "
    "--dataloader-seq-length 1232 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 "
    "--lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 8192 --ckpt-format torch --img-h 336 --img-w 336 --patch-dim 14 --bf16 "
)
MULTIMODAL = (
    "--nproc-per-node 8 examples/multimodal/train.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 576 "
    "--decoder-seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 32767 --ckpt-format torch --img-h 336 --img-w 336 --patch-dim 14 --bf16 "
    "--use-te --untie-embeddings-and-output-weights --tokenizer-prompt-format mistral --normalization RMSNorm "
    "--disable-bias-linear --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --tensor-model-parallel-size 4 "
)
MIMO = (
    "--nproc-per-node 8 examples/mimo/train.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 8 --global-batch-size 64 --train-iters 10 --lr 1e-4 --bf16 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model llava-hf/llava-1.5-7b-hf --total-seq-length 2048 "
    "--model-provider llava_vlm "
)
CLIP_L_336 = 303_507_456
"""Parameters of CLIPVisionModel of transformers for openai/clip-vit-large-patch14-336."""
VICUNA_7B = 6_738_415_616 + 2 * 256 * 4096
"""Parameters of LlamaForCausalLM for lmsys/vicuna-7b-v1.5, whose embeddings have 32000 rows instead of 32256."""
MISTRAL_7B_V03 = 7_248_023_552
"""Parameters of MistralForCausalLM for mistralai/Mistral-7B-v0.3, with 32768 rows."""


def job(line: str) -> TrainingJob:
    arguments, world, options = parse(line.split(), environ={}, folder=Path("/nowhere"))
    gpu, _ = hardware(options.gpu or "H100-80GB", None)
    return build(arguments, world, environ={}, gpu=gpu, folder=Path("/nowhere"))


@pytest.mark.parametrize(
    ("options", "length", "text"),
    [
        ("", 1232 + 577, 1233),  # 24 · 24 patches and a class token
        ("--disable-vision-class-token", 1232 + 576, 1233),
        ("--tensor-model-parallel-size 4 --sequence-parallel", 1812, 1236),  # a multiple of 4
        ("--context-parallel-size 2", 1812, 1236),  # of 2 · 2
        ("--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --disable-vision-class-token", 1808, 1233),
    ],
)
def test_the_sequence_has_text_images_and_padding(options: str, length: int, text: int) -> None:
    """`model_provider` and `get_batch` of pretrain_vlm.py: the padding is added to the text."""
    found = job(f"{VLM} {options}")
    assert found.batch.seq_length == length
    assert found.model.vision is not None
    assert found.model.vision.text_length == text


def test_a_packed_microbatch_has_positions_of_all_samples() -> None:
    plain, packed = (
        job(f"{VLM} --context-parallel-size 2 {more}") for more in ("--disable-vision-class-token", "--use-packed-sequence")
    )
    assert plain.batch.seq_length == 1808
    assert plain.model.max_position_embeddings == 1808
    assert packed.model.max_position_embeddings == 2 * 1812


def test_encoder_and_projector_have_the_sizes_of_the_language_model() -> None:
    """Worked out by hand: 12 layers of 12·h² + 13·h each in encoder and decoder, the ends of both, and the projector."""
    report = predict(job(VLM))
    h, rows = 1024, 8320  # 8193 tokens, rounded up to a multiple of 128
    layers = 12 * (12 * h * h + 13 * h)
    encoder = layers + 3 * 14 * 14 * h + 577 * h + h + 2 * h
    projector = 2 * h + (4 * h * h + 4 * h) + (4 * h * h + h)
    language = layers + 2 * h + 2 * rows * h + 1809 * h
    assert report.parameters == encoder + projector + language


@pytest.mark.parametrize(
    ("options", "frozen"),
    [("", ()), ("--freeze-ViT", ("vision_model",)), ("--freeze-LM --freeze-ViT", ("vision_model", "language_model"))],
)
def test_options_freeze_parts(options: str, frozen: tuple[str, ...]) -> None:
    assert job(f"{VLM} {options}").model.frozen == frozen


def test_frozen_parts_have_parameters_only() -> None:
    """Without the distributed optimizer a trained parameter has 18 bytes, a frozen one 2 (each tensor is rounded up to 512)."""
    trained, half = (predict(job(VLM + more)).ranks[0].memory for more in ("", "--freeze-ViT"))
    encoder = 12 * (12 * 1024**2 + 13 * 1024) + (3 * 14 * 14 + 577 + 3) * 1024
    assert abs((trained.allocated_bytes - half.allocated_bytes) / (16 * encoder) - 1) < 0.02


def test_multimodal_models_have_published_sizes() -> None:
    found = job(f"{MULTIMODAL} --language-model-type mistral_7b --disable-vision-class-token")
    vision = found.model.vision
    assert vision is not None
    assert (vision.encoder.num_layers, vision.encoder.hidden_size, vision.projector.ffn_hidden_size) == (24, 1024, 14336)
    projector = 1024 * 14336 + 14336 * 4096
    unused = 2 * 1024  # the norm after the last layer of transformers
    assert predict(found).parameters == MISTRAL_7B_V03 + CLIP_L_336 - unused + projector
    assert (found.batch.seq_length, vision.text_length) == (4096, 4096 - 576 + 1)


@pytest.mark.parametrize(
    ("kind", "options", "parameters"),
    [
        # qkv, projection and FFN with their biases, 2 norms, 2 scales, norms of queries and keys; patches, positions, class token
        (
            "internvit",
            "--tensor-model-parallel-size 1",
            45 * (3 * 3200**2 + 3200**2 + 3200 + 2 * 3200 * 12800 + 16000 + 6 * 3200) + 3200 * (3 * 14 * 14 + 1 + 577 + 1),
        ),
        # 32 heads of 128 elements in place of 25
        (
            "internvit",
            "--tensor-model-parallel-size 8",
            45 * (4 * 3200 * 4096 + 3200 + 2 * 3200 * 12800 + 16000 + 4 * 3200 + 2 * 4096) + 3200 * (3 * 14 * 14 + 1 + 577 + 1),
        ),
        ("internvit300M", "", 24 * (12 * 1024**2 + 13 * 1024 + 2 * 1024) + 1024 * (3 * 14 * 14 + 1 + 577 + 1)),
        # a gated FFN; pixels of a patch with bias, 128² positions, 5 class tokens, a mask token and a last norm
        (
            "radio-g",
            "",
            40 * (4 * 1536**2 + 3 * 1536 * 4096 + 3 * 1536 + 1536 + 2 * 4096 + 1536 + 6 * 1536)
            + 1536 * (3 * 14 * 14 + 1 + 128**2 + 5 + 1 + 2),
        ),
    ],
)
def test_encoders_with_scaled_layers_have_their_published_sizes(kind: str, options: str, parameters: int) -> None:
    """Worked out by hand from the sizes of `get_vision_model_config`; InternViT-6B has 5.54 billion parameters with 25 heads."""
    found = job(f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type {kind} {options}")
    vision = found.model.vision
    assert vision is not None
    projector = vision.projector_input * 14336 + 14336 * 4096
    assert predict(found).parameters == MISTRAL_7B_V03 + parameters + projector


def test_the_statistics_of_queries_and_keys_are_gathered_over_tensor_parallel_ranks() -> None:
    """Two fp32 sums of a token and rank in each of 45 layers, of 577 tokens in each microbatch (`InternViTRMSNorm._gather_var`)."""
    found = job(f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type internvit --freeze-ViT")
    tree = chunk_tree(module_inputs(found), ChunkKind(layers=((LayerKind(), 1),)))
    calls = [call for _, module in tree.walk() for call in module.collectives if call.dtype == "fp32" and call.kind == "all_gather"]
    assert [call.shape for call in calls] == [(577, 1, 4)] * 90


@pytest.mark.parametrize(
    ("kind", "dropout"), [("clip", (0.0, 0.0)), ("internvit300M", (0.0, 0.2)), ("radio", (0.1, 0.2)), ("radio-g", (0.1, 0.2))]
)
def test_encoders_have_the_dropout_of_the_launch_unless_their_sizes_name_it(kind: str, dropout: tuple[float, float]) -> None:
    line = f"{MULTIMODAL} --language-model-type mistral_7b --hidden-dropout 0.1 --attention-dropout 0.2 --vision-model-type {kind}"
    vision = job(line).model.vision
    assert vision is not None
    assert (vision.encoder.hidden_dropout, vision.encoder.attention_dropout) == dropout


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ("--tokenizer-prompt-format qwen2p0 --max-num-tiles 6", 5),
        ("--tokenizer-prompt-format qwen2p5 --max-num-tiles 12", 6),
        ("--tokenizer-prompt-format llama3p1 --max-num-tiles 12", 5),
        ("--tokenizer-prompt-format nemotron5 --max-num-tiles 4", 6),
    ],
)
def test_tags_of_tiles_depend_on_the_tokenizer(options: str, tokens: int) -> None:
    """`get_num_image_embeddings` of core/models/vision/clip_vit_model.py."""
    vision = job(f"{MULTIMODAL} --language-model-type qwen2.5_7B --use-tile-tags {options}").model.vision
    assert vision is not None
    assert vision.tag_tokens == tokens


@pytest.mark.parametrize(
    ("options", "tiles", "tokens"),
    [
        ("--pixel-shuffle --use-tiling --max-num-tiles 6 --use-thumbnail --disable-vision-class-token", 7, 144),
        ("--use-tiling --max-num-tiles 4", 4, 577),
        ("--max-num-tiles 6", 1, 577),
    ],
)
def test_tiles_are_counted_up_to_their_maximum(options: str, tiles: int, tokens: int) -> None:
    vision = job(f"{MULTIMODAL} --language-model-type qwen2.5_7B {options}").model.vision
    assert vision is not None
    assert (vision.tiles, vision.projected_tokens) == (tiles, tokens)
    assert vision.text_length == 4096 - tiles * tokens + 1


def test_mimo_models_have_the_sizes_of_their_provider() -> None:
    found = job(MIMO)
    assert found.model.frozen == ("vision_model", "language_model")
    assert predict(found).parameters == VICUNA_7B + CLIP_L_336 + (1024 * 4096 + 4096) + (4096 * 4096 + 4096)
    assert found.batch.seq_length == 2048
    assert found.model.vision is not None
    assert found.model.vision.text_length == 2048 - 576


@pytest.mark.parametrize(
    ("line", "option", "message"),
    [
        (f"{VLM} --img-h 333", "--img-h", "patches of 14"),
        (VLM.replace("--ckpt-format torch", ""), "--ckpt-format", "torch"),
        (f"{VLM} --context-parallel-size 2 --pipeline-model-parallel-size 2", "--context-parallel-size", "pipeline"),
        (
            f"{VLM} --transformer-impl local --tensor-model-parallel-size 2 --sequence-parallel",
            "--context-parallel-size",
            "attention",
        ),
        (f"{MULTIMODAL}", "--language-model-type", "required"),
        (f"{MULTIMODAL} --language-model-type llama3.1_70B", "--language-model-type", "projector"),
        (f"{MULTIMODAL} --language-model-type mistral_7b --use-tiling --max-num-tiles 8", "--decoder-seq-length", "8 tiles"),
        (
            f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type siglip --disable-vision-class-token",
            "--disable-vision-class-token",
            "class token",
        ),
        (
            f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type radio --pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size",
            "class token",
        ),
        (f"{MULTIMODAL} --language-model-type mistral_7b --use-tile-tags", "--use-tile-tags", "mistral has no tile tags"),
        (
            f"{MULTIMODAL} --language-model-type qwen2.5_7B --use-tile-tags --tokenizer-prompt-format qwen2p5 --max-num-tiles 13",
            "--max-num-tiles",
            "12 tiles",
        ),
        (
            f"{MULTIMODAL} --language-model-type qwen2.5_7B --use-tile-tags --tokenizer-prompt-format qwen2p5 --micro-batch-size 2",
            "--micro-batch-size",
            "one image",
        ),
        (
            f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type radio-g --overlap-grad-reduce",
            "--overlap-grad-reduce",
            "mask token",
        ),
        (f"{MULTIMODAL} --language-model-type mistral_7b --pixel-shuffle", "--pixel-shuffle", "square of tokens"),
        (f"{MIMO} --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size", "MIMO"),
        (f"{MIMO} --model-provider mock", "--model-provider", "llava_vlm"),
        (f"{MIMO} --total-seq-length 512", "--total-seq-length", "576"),
    ],
)
def test_what_the_scripts_refuse_is_an_error(line: str, option: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        job(line)
    assert not isinstance(error.value, UnsupportedError)
    assert error.value.option.startswith(option)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{VLM} --num-experts 4", "--num-experts"),
        (f"{VLM} --num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2", "virtual"),
        (f"{VLM} --decoder-tp-comm-overlap", "--decoder-tp-comm-overlap"),
        (f"{VLM} --optimizer muon", "--optimizer muon"),
        (f"{MULTIMODAL} --language-model-type hf://a/b", "language model"),
        (f"{MULTIMODAL} --language-model-type mistral_7b --vision-model-type hf://a/b", "hf://a/b"),
        (f"{MULTIMODAL} --language-model-type mistral_7b --packing-buffer-size 3", "--packing-buffer-size"),
        (f"{MULTIMODAL} --language-model-type mistral_7b --sound-model-type nemo://a", "--sound-model-type"),
        (f"{MIMO} --model-provider llava_avlm", "llava_avlm"),
        (f"{MIMO} --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        job(line)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_a_script_is_in_exactly_one_table(script: str) -> None:
    tables = (script_effects.MODELLED, script_effects.NO_EFFECT, script_effects.REFUSED.keys())
    for option in options_of(script):
        assert sum(option.dest in table for table in tables) == 1, option.dest
        assert not any(flag in load_catalogue().masks for flag in option.flags)
