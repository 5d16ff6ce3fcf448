"""The bench `families`: models of transformers, parallelized in place, beside one process and transformers' own way."""
