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
# Written by numapin 0.1.0: numapin job slurm --nodes 2 --gpus-per-node 8 --partition gpu --time 24h --signal 300 --requeue examples/train_checkpoint.py
read -r PET_RDZV_ID </proc/sys/kernel/random/uuid && export PET_RDZV_ID NUMAPIN_HOSTS=new || exit # a new job's secret
signaled=0
trap 'signaled=1; kill -USR1 $! || :' USR1
trap 'kill $! || :' TERM
srun --ntasks-per-node=1 --cpu-bind=none --mem-bind=none --kill-on-bad-exit=1 \
    --output=%x-%j-%N.out --open-mode=append numapin run --nproc-per-node=8 examples/train_checkpoint.py &
while kill -0 $! 2>/dev/null; do wait $! || :; done # a signal ends wait, but not the run
trap '' USR1 TERM
status=0
wait $! || status=$?
if [ "$signaled$status" = 10 ] ||
    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q ' PreemptTime=[^NU].* SuspendTime=None '; then
    exec scontrol requeue "$SLURM_JOB_ID" # it has saved, or was preempted
fi
exit "$status"
