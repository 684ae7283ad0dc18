"""Layouts of vision-language models that are compared with runs of the real models."""

from __future__ import annotations

from typing import Final

VISION_BASE: Final = (
    "--nproc-per-node 8 pretrain_vlm.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-4 --ckpt-format torch "
    "--tokenizer-type NullTokenizer --vocab-size 9999 --img-h 112 --img-w 112 --patch-dim 14 --info-gpu H100-80GB "
)
"""The beginning of a launch of a layout whose name begins with vision."""
_SPLIT: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_OVERLAPPED: Final = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_LLAMA: Final = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 4 --attention-dropout 0 --hidden-dropout 0"
)
VISION: Final = {
    "vision": "--bf16",
    "vision, unfused": "--bf16 --attention-backend unfused",
    "vision, deterministic, heads of 52": "--bf16 --hidden-size 416 --deterministic-mode --hidden-dropout 0 --attention-dropout 0 "
    "--no-gradient-accumulation-fusion",
    "vision, tp2, distributed optimizer": f"--bf16 --tensor-model-parallel-size 2 {_OVERLAPPED}",
    "vision, tp2 sp": f"--bf16 {_SPLIT} --disable-vision-class-token",
    "vision, pp2": "--bf16 --pipeline-model-parallel-size 2",
    "vision, tp2 pp2": "--bf16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "vision, rope": f"--bf16 {_LLAMA}",
    "vision, rope, tp2 sp": f"--bf16 {_LLAMA} {_SPLIT} --disable-vision-class-token",
    "vision, fp16, flash": "--fp16 --attention-backend flash",
    "vision, fp32": "--attention-backend unfused",
    "vision, local": "--bf16 --transformer-impl local --no-gradient-accumulation-fusion",
    "vision, full recompute": "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "vision, block recompute": "--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "vision, selective recompute": "--bf16 --attention-backend unfused --recompute-activations",
    "vision, frozen encoder": "--bf16 --freeze-ViT",
    "vision, frozen language model": "--bf16 --freeze-LM",
    "vision, both frozen": "--bf16 --freeze-LM --freeze-ViT",
    "vision, both frozen, rope": f"--bf16 --freeze-LM --freeze-ViT {_LLAMA} --use-distributed-optimizer",
    "vision, both frozen, tp2 sp": f"--bf16 --freeze-LM --freeze-ViT {_SPLIT} --disable-vision-class-token",
    "vision, frozen encoder, full recompute": "--bf16 --freeze-ViT --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2",
    "vision, frozen encoder, pp2": "--bf16 --freeze-ViT --pipeline-model-parallel-size 2",
    "vision, frozen language model, unfused": "--bf16 --freeze-LM --attention-backend unfused --no-gradient-accumulation-fusion",
}
MULTIMODAL_BASE: Final = (
    "--nproc-per-node 8 examples/multimodal/train.py --num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 64 "
    "--decoder-seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 "
    "--lr 1e-4 --ckpt-format torch --tokenizer-type NullTokenizer --vocab-size 9999 --img-h 112 --img-w 112 --patch-dim 14 --bf16 "
    "--use-te --tokenizer-prompt-format llama3 --ffn-hidden-size 14336 --info-gpu H100-80GB "
    "--attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope "
)
"""The beginning of a launch of a layout whose name begins with multimodal."""
_INTERNVIT: Final = "--language-model-type qwen2.0_72B --kv-channels 128"
_UNTIED: Final = {
    "multimodal, mistral, clip": "--language-model-type mistral_7b",
    "multimodal, both frozen": "--language-model-type mistral_7b --freeze-LM --freeze-ViT --disable-vision-class-token",
    "multimodal, siglip, tp2": "--language-model-type llama3.1_8b --vision-model-type siglip --tensor-model-parallel-size 2",
    "multimodal, frozen encoder, full recompute": "--language-model-type llama3.2_1b --freeze-ViT --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "multimodal, full recompute of both": "--language-model-type qwen2.5_7B --recompute-vision --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "multimodal, radio": "--language-model-type llama3.2_1b --vision-model-type radio --patch-dim 16",
    "multimodal, radio, tp2": "--language-model-type llama3.2_1b --vision-model-type radio --patch-dim 16 "
    "--tensor-model-parallel-size 2",
    "multimodal, frozen radio": "--language-model-type llama3.2_1b --vision-model-type cradio-g --patch-dim 16 --freeze-ViT "
    "--disable-vision-class-token",
    "multimodal, radio, dropout": "--language-model-type llama3.2_1b --vision-model-type radio --patch-dim 16 --hidden-dropout 0.1 "
    "--attention-dropout 0.1",
    "multimodal, radio-g": "--language-model-type llama3.2_1b --vision-model-type radio-g --patch-dim 16",
    "multimodal, radio-g, dropout, tp2": "--language-model-type llama3.2_1b --vision-model-type radio-g --patch-dim 16 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --tensor-model-parallel-size 2 --disable-vision-class-token",
    "multimodal, internvit300M": "--language-model-type qwen2.5_7B --vision-model-type internvit300M",
    "multimodal, internvit300M, shuffled, tp2": "--language-model-type qwen2.5_7B --vision-model-type internvit300M "
    "--disable-vision-class-token --pixel-shuffle --tensor-model-parallel-size 2",
    "multimodal, internvit": f"{_INTERNVIT} --vision-model-type internvit",
    "multimodal, internvit, tp8": f"{_INTERNVIT} --vision-model-type internvit --tensor-model-parallel-size 8",
    "multimodal, internvit, tp2, full recompute": f"{_INTERNVIT} --vision-model-type internvit --tensor-model-parallel-size 2 "
    "--recompute-vision --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "multimodal, frozen internvit, tp8": f"{_INTERNVIT} --vision-model-type internvit --tensor-model-parallel-size 8 --freeze-ViT "
    "--use-distributed-optimizer",
    "multimodal, internvit, tiles with tags, tp8": f"{_INTERNVIT} --vision-model-type internvit --tensor-model-parallel-size 8 "
    "--freeze-ViT --pixel-shuffle --disable-vision-class-token --use-tiling --max-num-tiles 6 --use-thumbnail --use-tile-tags "
    "--tokenizer-prompt-format qwen2p0 --micro-batch-size 1 --use-distributed-optimizer --decoder-seq-length 256",
    "multimodal, clip, tiles with tags": "--language-model-type llama3.1_8b --pixel-shuffle --disable-vision-class-token "
    "--use-tiling --max-num-tiles 6 --use-tile-tags --tokenizer-prompt-format llama3p1 --micro-batch-size 1",
    "multimodal, radio, pp2": "--language-model-type llama3.2_1b --vision-model-type radio --patch-dim 16 "
    "--pipeline-model-parallel-size 2 --disable-vision-class-token",
}
_TIED: Final = {
    "multimodal, tied": "--language-model-type llama3.2_1b --vocab-size 128000",
    "multimodal, tied, tp2 pp2": "--language-model-type llama3.2_1b --vocab-size 128000 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2",
    "multimodal, tied, frozen language model": "--language-model-type llama3.2_1b --freeze-LM",
    "multimodal, tied, tiles with tags": "--language-model-type llama3.1_8b --pixel-shuffle --disable-vision-class-token "
    "--use-tiling --max-num-tiles 6 --use-tile-tags --tokenizer-prompt-format llama3p1 --micro-batch-size 1 --vocab-size 128000",
}
MULTIMODAL: Final = {
    **{name: f"--untie-embeddings-and-output-weights {options}" for name, options in _UNTIED.items()},
    **_TIED,
}
