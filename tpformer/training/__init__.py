"""Pretraining: data, model, optimizer, checkpoints, metrics and the loop. Import from its modules."""
