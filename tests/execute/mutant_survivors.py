"""The mutants that the executor lets pass, each with the reason why it computes the same.

Belongs here: the list, and what is said where it and an execution disagree.
"""

from mutant_trials import Verdict
from ptx_mutants import Mutant

REASONS: dict[str, str] = {}
# by case: the mutant's name -> a key of REASONS
SURVIVORS: dict[str, dict[str, str]] = {}


def reason_of(name: str, mutant: Mutant) -> str | None:
    """The key of the reason why a mutant is equivalent; None if it is not listed."""
    return SURVIVORS.get(name, {}).get(mutant.name)


def complaint(name: str, mutant: Mutant, verdict: Verdict) -> str | None:
    """A sentence if a mutant survives that is not listed, or one is caught that is."""
    listed = reason_of(name, mutant)
    if verdict.executor and listed:
        return f"{name}: {mutant.name} is listed as {listed}, and the executor finds: {verdict.message}"
    if not verdict.executor and not listed:
        return f"{name}: {mutant.name} ({mutant.where}) survives, and is not listed"
    return None
