#!/bin/bash

JOB=$(sbatch --parsable --export=ALL,LR=1e-5 "$(dirname "$0")/srun_python.slurm")
echo "job $JOB"
