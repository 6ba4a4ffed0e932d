#!/bin/bash

# Submitted from below a launcher: what that gave its own rank is not for the ranks of this job.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
set -euo pipefail

MASTER_ADDR=$(mpirun -np 1 --hostfile hosts hostname)
MASTER_PORT=$((10000 + RANDOM % 20000)) # below the ports that Linux gives away by itself
export MASTER_ADDR MASTER_PORT
# Launchers trust only what is signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export PET_RDZV_ID

forward=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | PYTHONHOME | VIRTUAL_ENV | CONDA_PREFIX | HOME | TMPDIR) ;;
        MASTER_* | PET_* | CUDA_* | NCCL_* | GLOO_* | UCX_* | OMP_* | TORCH* | PYTORCH_*) ;;
        NUMAPIN_* | HF_* | WANDB_*) ;;
        *) continue ;;
    esac
    forward+=(-x "$name")
done

# mpirun binds nothing: numapin places each rank within the CPUs that it was given.
# shellcheck disable=SC2016 # the shell of each task puts these in
exec mpirun --hostfile hosts -np 2 --map-by ppr:1:node --bind-to none "${forward[@]}" \
    bash -c '
    ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"
    export PET_RDZV_CONF="is_host=$((OMPI_COMM_WORLD_RANK == 0))" PET_LOCAL_ADDR="$(hostname)"
    exec "$@"' bash \
    numapin run --nnodes=2 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    examples/train_ddp.py
