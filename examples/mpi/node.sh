#!/bin/bash

# If this job was submitted by a rank of another job, remove that rank's variables.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
[ -z "${NUMAPIN_NIC_ENV-}" ] || unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV
set -euo pipefail

MASTER_ADDR=$(mpirun -np 1 --hostfile hosts hostname)
MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports
export MASTER_ADDR MASTER_PORT
# Launchers trust only messages that are signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') || PET_RDZV_ID=
if [ "${#PET_RDZV_ID}" != 32 ]; then
    echo "numapin job: no random rendezvous id: od -N16 /dev/urandom failed on $HOSTNAME" >&2
    exit 1
fi
export PET_RDZV_ID

forward=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | PYTHONHOME | VIRTUAL_ENV | CONDA_PREFIX | HOME | TMPDIR) ;;
        MASTER_* | PET_* | CUDA_* | NCCL_* | GLOO_* | UCX_* | NVSHMEM_* | OMP_* | TORCH* | PYTORCH_*) ;;
        NUMAPIN_* | HF_* | WANDB_*) ;;
        *) continue ;;
    esac
    forward+=(-x "$name")
done

# mpirun binds nothing: numapin binds each rank within its allowed CPUs.
# shellcheck disable=SC2016 # expanded by the shell of each task
exec mpirun --hostfile hosts -np 2 --map-by ppr:1:node --bind-to none "${forward[@]}" \
    bash -c '
    ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"
    export PET_RDZV_CONF="is_host=$((OMPI_COMM_WORLD_RANK == 0))" PET_LOCAL_ADDR="$(hostname)"
    exec "$@"' bash \
    numapin run --nnodes=2 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    examples/train_ddp.py
