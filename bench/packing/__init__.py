"""The bench `packing`: which of a run's saved activations escape from a packed form, and what forms cost."""
