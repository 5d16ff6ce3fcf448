#!/bin/bash
# A run on the nodes that SLURM gives, one torchrun on each:
#   sbatch --nodes 8 examples/slurm.sh examples/llama3_70b.toml [--section.key value ...]
# It continues a run that is already there: torchrun starts the ranks again after a failure, at most three times, and a
# job that reached its time limit goes on when you submit it again.
#SBATCH --job-name=tpformer
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# --signal: 5 minutes before the time limit every rank is told to write a checkpoint and leave.

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch --nodes N examples/slurm.sh FILE.toml [--section.key value ...]" >&2
    exit 2
fi

mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${HOSTS[0]}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on one node do not meet
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270     # seconds that torchrun leaves its ranks for that checkpoint

srun --kill-on-bad-exit=1 --cpu-bind=none torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
    --max-restarts 3 \
    -m tpformer.cli pretrain "$@" --run.resume True
