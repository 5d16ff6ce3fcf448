"""A process imports this last: a fork server, and the process that has found the tests. What is there by then is never
garbage: no collection looks at it, nor do tests that list objects, and forks share its memory. Behind that tests keep
little, so there are few collections."""

import gc

gc.freeze()
gc.set_threshold(50_000)
