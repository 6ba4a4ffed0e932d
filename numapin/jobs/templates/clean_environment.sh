# If this job was submitted by a rank of another job, remove that rank's variables.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
[ -z "${NUMAPIN_NIC_ENV-}" ] || unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV
