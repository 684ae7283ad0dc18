#!/bin/bash

set -ex
rm -rf /checkpoints/old
pkill -9 -f pretrain_gpt
ray stop
pip install -q -r requirements.txt
python -m pip install transformers
git clone https://github.com/NVIDIA/Megatron-LM
wget -q https://example.com/vocab.json
scp vocab.json node2:/data
sudo sysctl -w vm.max_map_count=262144
scancel --name old
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --tokenizer-type NullTokenizer
    --vocab-size 32000
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 1000
    --lr 3e-4
    --bf16
    --use-distributed-optimizer
)

torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}"
