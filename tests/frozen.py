"""What a fork server imports last. What it has imported is never garbage: in its forks collections, and tests that list
objects, skip it, and leave its memory shared."""

import gc

gc.freeze()
