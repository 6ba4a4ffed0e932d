#!/bin/bash
#SBATCH --job-name=train-checkpoint
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --hint=multithread
#SBATCH --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue

# If this job was submitted by a rank of another job, remove that rank's variables.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
[ -z "${NUMAPIN_NIC_ENV-}" ] || unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts[0]}
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below Linux's range of ephemeral ports
export MASTER_ADDR MASTER_PORT
# Launchers trust only messages that are signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') || PET_RDZV_ID=
if [ "${#PET_RDZV_ID}" != 32 ]; then
    echo "numapin job: no random rendezvous id: od -N16 /dev/urandom failed on $HOSTNAME" >&2
    exit 1
fi
export PET_RDZV_ID

# Slurm binds nothing: numapin binds each rank within the job's CPUs on its host.
# shellcheck disable=SC2016 # expanded by the shell of each task
srun --nodes=2 --ntasks-per-node=1 \
    --cpu-bind=none --mem-bind=none --kill-on-bad-exit=1 \
    bash -c '
    ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"
    export PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))" PET_LOCAL_ADDR="$SLURMD_NODENAME"
    exec "$@"' bash \
    numapin run --nnodes=2 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    examples/train_checkpoint.py &
run=$!
signals=0 ending=0
trap 'signals=$((signals + 1)); ending=1; kill -USR1 "$run" || true' USR1
trap 'signals=$((signals + 1)); kill -TERM "$run" || true' TERM
status=0
wait "$run" || status=$?
while [ "$signals" -gt 0 ]; do # a signal interrupts wait, not the run
    signals=$((signals - 1)) status=0
    wait "$run" || status=$?
done
trap : USR1 TERM # the run has ended, and its pid may be reused
if job=$(SLURM_TIME_FORMAT=standard scontrol show job "$SLURM_JOB_ID") && [[ $job =~ PreemptTime=([0-9][0-9T:-]*) ]] &&
    preempted=${BASH_REMATCH[1]} && [[ ! $job =~ SuspendTime=([0-9][0-9T:-]*) || $preempted > ${BASH_REMATCH[1]} ]]; then
    ending=1 status=0 # the manager ended the ranks
fi
if [ "$ending" = 1 ] && [ "$status" = 0 ]; then # it saved, and is not done
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
