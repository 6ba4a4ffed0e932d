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

# Submitted from below a launcher: what that gave its own rank is not for the ranks of this job.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts[0]}
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that Linux gives away by itself
export MASTER_ADDR MASTER_PORT
# Launchers trust only what is signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export PET_RDZV_ID

# Slurm binds nothing: numapin places each rank within the CPUs that the job has on its node.
# shellcheck disable=SC2016 # the shell of each task puts these in
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
heard=0 told=0
trap 'heard=$((heard + 1)); told=1; kill -USR1 "$run" || true' USR1
trap 'heard=$((heard + 1)); kill -TERM "$run" || true' TERM
status=0
wait "$run" || status=$?
while [ "$heard" -gt 0 ]; do # a signal ends the waiting, not the run
    heard=$((heard - 1)) status=0
    wait "$run" || status=$?
done
trap : USR1 TERM # the run is over, and its number may be another's
if job=$(SLURM_TIME_FORMAT=standard scontrol show job "$SLURM_JOB_ID") && [[ $job =~ PreemptTime=([0-9][0-9T:-]*) ]] &&
    preempted=${BASH_REMATCH[1]} && [[ ! $job =~ SuspendTime=([0-9][0-9T:-]*) || $preempted > ${BASH_REMATCH[1]} ]]; then
    told=1 status=0 # the ranks were told to end
fi
if [ "$told" = 1 ] && [ "$status" = 0 ]; then # it saved, and is not done
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
