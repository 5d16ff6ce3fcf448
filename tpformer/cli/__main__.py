"""`python -m tpformer.cli`, as torchrun starts it."""

from . import main

main()
