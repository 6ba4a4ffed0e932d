forward=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | PYTHONHOME | VIRTUAL_ENV | CONDA_PREFIX | HOME | TMPDIR) ;;
        MASTER_* | PET_* | CUDA_* | NCCL_* | GLOO_* | UCX_* | NVSHMEM_* | OMP_* | TORCH* | PYTORCH_*) ;;
        NUMAPIN_* | HF_* | WANDB_*) ;;
        *) continue ;;
    esac
    forward+=(-x "$name")
done
