"""What changes from step to step by a formula: the learning rate and the batch.

Every value follows from step and settings alone, so a resumed run repeats none and misses none.
"""

import math

from tpformer.config import OptimizerSection, TrainSection, batch_sizes


def warmup_steps(steps: int, config: OptimizerSection) -> int:
    """Steps of the warm-up: the configured ones, or else a tenth of the run, at most 100."""
    return min(100, steps // 10) if config.warmup_steps is None else config.warmup_steps


def decay_steps(steps: int, config: OptimizerSection) -> int:
    """The last steps, in which wsd decays: decay_fraction of all, at least one unless that is 0."""
    return max(1, round(config.decay_fraction * steps)) if config.decay_fraction else 0


def learning_rate(step: int, steps: int, config: OptimizerSection) -> float:
    """The learning rate of step 1 ... steps.

    It rises linearly from 0 to lr over the warm-up. Then `constant` stays there, `cosine` and `linear` fall to
    min_lr_ratio * lr over all other steps, and `wsd` (warm-up, stable, decay) falls linearly over the last
    decay_steps alone.
    """
    first = warmup_steps(steps, config)
    if step <= first:
        return config.lr * step / first
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        first = max(first, steps - decay_steps(steps, config))
    progress = min(1.0, max(0, step - first) / max(1, steps - first))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def warmup_notice(steps: int, config: OptimizerSection) -> str | None:
    """A sentence if the run ends within its warm-up, so that the learning rate never reaches its peak; else None."""
    if warmup_steps(steps, config) <= steps:
        return None
    last = learning_rate(steps, steps, config)
    return (
        f"optimizer.warmup_steps={config.warmup_steps} is more than train.steps={steps}: the learning rate ends at "
        f"{last:.3g} and never reaches optimizer.lr={config.lr:g}; leave warmup_steps unset for a tenth of the run"
    )


def samples_before(step: int, train: TrainSection) -> int:
    """Samples of all steps before step 1, 2, ...: the global index of its first one.

    In a ramp of R steps to the n-th multiple of batch_size_start, step k has min(n, 1 + (k - 1) * (n - 1) // R) times
    batch_size_start samples.
    """
    past, sizes = step - 1, batch_sizes(train)
    total, growths = past * sizes[0], len(sizes) - 1
    for growth in range(1, growths + 1):  # each adds batch_size_start to all steps from its own on
        total += max(0, past - -(-growth * train.batch_size_ramp_steps // growths)) * sizes[0]
    return total


def batch_size(step: int, train: TrainSection) -> int:
    """Samples of step 1, 2, ..."""
    return samples_before(step + 1, train) - samples_before(step, train)


def falls_due(step: int, interval: int, every: int = 1) -> bool:
    """Whether something that is due after each `interval` steps (0: never) is to be done after a step: when the round
    of `every` steps ends in which it fell due."""
    return interval > 0 and step % every == 0 and step // interval > (step - every) // interval
