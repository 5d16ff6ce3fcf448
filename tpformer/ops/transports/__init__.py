"""The transports that carry a tensor-parallel linear, one file each, over the contract in interface.py."""
