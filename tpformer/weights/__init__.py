"""Models of other libraries: which field and which tensor of theirs is which of ours, and safetensors files."""
