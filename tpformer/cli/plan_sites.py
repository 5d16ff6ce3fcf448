"""`tpformer plan --sites`: a step of sites that a slow link joins, synchronous and in rounds."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpformer.planner.candidates import Question


def check_sites(options: Any, files: Any) -> None:
    """ValueError for options of `tpformer plan` that go with another question. files: those that are to be written."""
    others = {"--memory-budget": options.memory_budget, "--sweep": options.sweep, "--explain": options.explain}
    given = [name for name, value in others.items() if value] + [f"--{name}" for name in files]
    if given or options.kinds[1:]:
        raise ValueError(f"--sites only prints its own table: leave out {given[0] if given else 'several kinds'}")


def sites(number: int, between: str, latency_ms: float, question: "Question", show: Callable[..., Any]) -> None:
    """Show the fastest layout of a site, and a row for each link.

    Errors: ValueError for what cannot be shared, no layout that works, and a text that is no rate.
    """
    from tpformer.planner.layouts import layout_text
    from tpformer.planner.sites import Sites, link_of, site_choice, site_question, sites_table

    links = [link_of(text, latency_ms / 1e3) for text in between.split(",")]
    choice = site_choice(site_question(question, number))
    ranks = choice.config.parallel.world_size
    show(
        f"{number} sites, each {ranks} x {question.device.name} in {layout_text(choice.config)}",
        sites_table(choice.config, choice.step.seconds, [Sites(number, link) for link in links]),
        "each site is one replica (data_parallel_replicate); what rounds cost in loss: docs/diloco.md",
    )
