"""`python -m bench`: one command that times what is correct. Nothing in tpformer imports it."""
