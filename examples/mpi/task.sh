#!/bin/bash
# Written by numapin 0.1.0: numapin job mpi --form task --nodes 2 --gpus-per-node 8 --hostfile hosts examples/train_ddp.py
# Nothing of a rank that has submitted this job.
[ -z "${TORCHELASTIC_RUN_ID-}" ] || unset {GROUP,ROLE}_{RANK,WORLD_SIZE} ROLE_NAME OMP_NUM_THREADS \
    TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV ${NUMAPIN_BINDING+OMP_NUM_THREADS}
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
MASTER_ADDR=$(mpirun -np 1 --hostfile hosts hostname) || exit
MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports
export MASTER_ADDR MASTER_PORT
mapfile -t forward < <(compgen -e | grep -Ex -e 'PATH|HOME|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*' \
    -e '(CUDA|HIP|ROCR|ZE|NCCL|GLOO|UCX|NVSHMEM|OMP|MASTER|PET|NUMAPIN|HF|WANDB)_.*|(PY)?TORCH.*|PBS_ARRAY_INDEX' |
    sed 's/^/-x\n/')
# shellcheck disable=SC2016 # expanded by the shell of each task
exec mpirun --hostfile hosts -np 16 --map-by ppr:8:node --bind-to none "${forward[@]}" \
    bash -c 'export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE; exec "$@"' bash \
    numapin exec -- python -u examples/train_ddp.py
