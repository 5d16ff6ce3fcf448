"""The processes of a job: they are started on this machine, watched, and ended together.

Belongs here: what concerns processes, not tensors. Importing `launch` or `files` does not import torch.
"""
