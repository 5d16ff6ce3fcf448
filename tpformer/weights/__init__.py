"""Models of other libraries: which field and which tensor of theirs is which of ours, and safetensors files.

A family is a file with two tables (llama.py is the one to read first); family.py and tensors.py work on any of them.
"""
