# Launchers trust only messages that are signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') || PET_RDZV_ID=
if [ "${#PET_RDZV_ID}" != 32 ]; then
    echo "numapin job: no random rendezvous id: od -N16 /dev/urandom failed on $HOSTNAME" >&2
    exit 1
fi
export PET_RDZV_ID
