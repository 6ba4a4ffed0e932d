"""What a training script's steps were spent on, from torch.profiler's trace of them.

Comes in: a Chrome trace as Kineto writes it, from `hook.py` in a rank or from the user's own profiler. Goes out: where
each step's time went, how batches were copied, what to change (`analysis`, `findings`), and a picture (`timeline`).
"""
