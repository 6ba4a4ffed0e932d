unset LOCAL_RANK ${TORCHELASTIC_RUN_ID+OMP_NUM_THREADS} "${!TORCHELASTIC_@}" # of a rank that has submitted this job
read -r PET_RDZV_ID </proc/sys/kernel/random/uuid && export PET_RDZV_ID # the secret of the job's hosts
