"""`python -m tpformer.cli`, as torchrun starts it."""

from . import main

if __name__ == "__main__":
    main()
