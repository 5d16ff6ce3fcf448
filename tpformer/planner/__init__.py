"""Models of a run: what its ranks hold and send, what its pipeline costs, and pictures. Re-exports the pipeline's."""

from .bubbles import RATIOS, Step, bubble_ratio, bubble_time, schedule_order, simulate
from .timeline import bubble_lines, bubble_share, draw_timeline, write_svg, write_trace

__all__ = [
    "RATIOS",
    "Step",
    "bubble_ratio",
    "bubble_share",
    "bubble_time",
    "draw_timeline",
    "schedule_order",
    "simulate",
    "write_svg",
    "write_trace",
    "bubble_lines",
]
