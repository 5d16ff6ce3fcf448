"""`tpformer plan --memory-budget`: what layers keep under several budgets."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpformer.planner.candidates import Question


def budgets(texts: str, explain: str | None, from_file: bool, question: "Question", show: Callable[..., Any]) -> None:
    """Show the choice for each budget, in the layout of --explain, or else of the file.

    Errors: ValueError without either, for a layout that cannot work, and for a text that is no budget.
    """
    from tpformer.planner.layouts import layout_text, parse_layout, with_layout
    from tpformer.planner.memory_budget import budget_table
    from tpformer.planner.search import check

    config = question.config
    if explain is None and not from_file:
        raise ValueError("--memory-budget is of one layout: give it by --explain, or in a run's file")
    if explain is not None:
        config = with_layout(config, parse_layout(explain))
    check(config)
    show(f"{layout_text(config)}: {config.parallel.world_size} x {question.device.name}")
    show(*budget_table(config, question.device, [text.strip() for text in texts.split(",")]))
