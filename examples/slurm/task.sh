#!/bin/bash
#SBATCH --job-name=train-checkpoint
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
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
# Written by numapin 0.1.0: numapin job slurm --form task --nodes 2 --gpus-per-node 8 --partition gpu --time 24h --signal 300 --requeue examples/train_checkpoint.py
# Nothing of a rank that has submitted this job.
[ -z "${TORCHELASTIC_RUN_ID-}" ] || unset {GROUP,ROLE}_{RANK,WORLD_SIZE} ROLE_NAME OMP_NUM_THREADS \
    TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV ${NUMAPIN_BINDING+OMP_NUM_THREADS}
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
read -r MASTER_ADDR < <(scontrol show hostnames) || exit
MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports
export MASTER_ADDR MASTER_PORT
signaled=0
trap 'signaled=1; kill -USR1 $! || :' USR1
trap 'kill $! || :' TERM
# shellcheck disable=SC2016 # expanded by the shell of each task
srun --ntasks-per-node=8 --cpu-bind=none --mem-bind=none --kill-on-bad-exit=1 \
    --output=%x-%j-%N.out --open-mode=append \
    bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=8; exec "$@"' bash \
    numapin exec -- python -u examples/train_checkpoint.py &
while kill -0 $! 2>/dev/null; do wait $! || :; done # a signal ends wait, but not the run
trap '' USR1 TERM
status=0
wait $! || status=$?
if [ "$signaled$status" = 10 ] ||
    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q ' PreemptTime=[^NU].* SuspendTime=None '; then
    exec scontrol requeue "$SLURM_JOB_ID" # it has saved, or was preempted
fi
exit "$status"
