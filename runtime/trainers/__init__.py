"""Trainers: tiercache in one line of a training script.

`trl` has GRPO and DPO trainers, `transformers` and `lightning` turn activation offload on. Each is imported by
its full name, because each needs a library of its own.
"""
