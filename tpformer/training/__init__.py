"""Pretraining: configuration, data, optimizer, checkpoints, metrics and the loop. Import from its modules."""
