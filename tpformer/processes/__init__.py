"""The processes of a job: starting ranks on this machine, watching them, ending them together.

Belongs here: what is about processes, not about tensors. Importing `launch` does not import torch.
"""
