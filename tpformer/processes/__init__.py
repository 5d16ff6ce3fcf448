"""The processes of a job: they are started on this machine, watched, and ended together.

Belongs here: what concerns processes, not tensors. Importing `launch` does not import torch.
"""
