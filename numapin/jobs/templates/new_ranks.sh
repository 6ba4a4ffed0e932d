# Nothing of a rank that has submitted this job.
unset "${!TORCHELASTIC_@}" {GROUP,ROLE}_{RANK,WORLD_SIZE} ROLE_NAME ${TORCHELASTIC_RUN_ID+OMP_NUM_THREADS}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV ${NUMAPIN_BINDING+OMP_NUM_THREADS}
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
