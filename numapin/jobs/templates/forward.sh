mapfile -t forward < <(compgen -e | grep -Ex -e 'PATH|HOME|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*' \
    -e '($gpus|NCCL|GLOO|UCX|NVSHMEM|OMP|MASTER|PET|NUMAPIN|HF|WANDB)_.*|(PY)?TORCH.*|PBS_ARRAY_INDEX' |
    sed 's/^/-x\n/')
