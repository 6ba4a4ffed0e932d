job=$(SLURM_TIME_FORMAT=standard scontrol show job "$SLURM_JOB_ID") && [[ $job =~ PreemptTime=([0-9][0-9T:-]*) ]] &&
    preempted=${BASH_REMATCH[1]} && [[ ! $job =~ SuspendTime=([0-9][0-9T:-]*) || $preempted > ${BASH_REMATCH[1]} ]]
