#!/bin/bash

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

docker pull nvcr.io/nvidia/pytorch:25.01-py3
docker run --gpus all -it --rm --ipc=host --ulimit memlock=-1 -v "$PWD":/workspace -w /workspace -e CUDA_DEVICE_MAX_CONNECTIONS=1 \
    nvcr.io/nvidia/pytorch:25.01-py3 bash -c "torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[*]}"
docker exec -it -e WORLD_SIZE=4 trainer python pretrain_gpt.py "${MODEL_ARGS[@]}"
sudo docker run --runtime=nvidia --net host image torchrun --nproc_per_node 2 pretrain_gpt.py "${MODEL_ARGS[@]}"
podman run --rm --device nvidia.com/gpu=all image torchrun --nproc_per_node=1 pretrain_gpt.py "${MODEL_ARGS[@]}"
