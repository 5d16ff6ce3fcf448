"""`python -m checks.compile`: compiles every kernel without a GPU, and asserts on the code that comes out."""
