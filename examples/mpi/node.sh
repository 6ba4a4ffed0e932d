#!/bin/bash
# Written by numapin 0.1.0: numapin job mpi --nodes 2 --gpus-per-node 8 --hostfile hosts examples/train_ddp.py
read -r PET_RDZV_ID </proc/sys/kernel/random/uuid && export PET_RDZV_ID NUMAPIN_HOSTS=new || exit # a new job's secret
MASTER_ADDR=$(mpirun -np 1 --hostfile hosts hostname) || exit
mapfile -t forward < <(compgen -e | grep -Ex -e 'PATH|HOME|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*' \
    -e '(CUDA|HIP|ROCR|ZE|NCCL|GLOO|UCX|NVSHMEM|OMP|MASTER|PET|NUMAPIN|HF|WANDB)_.*|(PY)?TORCH.*|PBS_ARRAY_INDEX' |
    sed 's/^/-x\n/')
exec mpirun --hostfile hosts -np 2 --map-by ppr:1:node --bind-to none "${forward[@]}" \
    numapin run --nproc-per-node=8 --master-addr="$MASTER_ADDR" examples/train_ddp.py
