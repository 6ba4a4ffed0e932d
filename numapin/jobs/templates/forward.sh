mapfile -t forward < <(compgen -e | grep -Ex -e 'PATH|HOME|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*' \
    -e '(MASTER|PET|OMP|CUDA|NCCL|GLOO|UCX|NVSHMEM|NUMAPIN|HF|WANDB)_.*|(PY)?TORCH.*' | sed 's/^/-x\n/')
