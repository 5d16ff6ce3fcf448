"""Drawings in SVG that can be read on a phone and on a wide screen, on light and on dark pages.

Belongs here: elements, colours and the frame. What is drawn is in the files that draw it. A picture is WIDTH units
wide, about 360 pixels on a phone, so that text of 13 units is over 11 pixels high there.
"""

from __future__ import annotations

from colorsys import hls_to_rgb
from html import escape

WIDTH, MARGIN = 400, 12
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 }
  .name { font-weight: 600 }
  .soft { fill: #57606a }
  .middle { text-anchor: middle }
  .right { text-anchor: end }
  .kernel { fill: #f1f4f8; stroke: #b6c0cc }
  .whole { fill: #ffffff; stroke: #8c959f }
  .held { stroke: none }
  .both { fill: #8c959f }
  .r0 { fill: #2f6fb3 } .r1 { fill: #d9822b } .r2 { fill: #2e9b6b } .r3 { fill: #b0529b }
  .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    text { fill: #e6edf3 }
    .soft { fill: #9da7b3 }
    .kernel { fill: #1b222c; stroke: #465160 }
    .whole { fill: #0d1117; stroke: #7d8590 }
    .both { fill: #8b949e }
    .r0 { fill: #4f93dd } .r1 { fill: #e99b4a } .r2 { fill: #3fb37f } .r3 { fill: #cb74b8 }
  }
  .on { fill: #1f2328 }
"""


def tint(index: int, count: int) -> str:
    """A light colour for one of `count` things, on which text of class "on" is legible. A single thing is grey."""
    red, green, blue = hls_to_rgb(index / count, 0.8, 0.65 if count > 1 else 0.08)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


class Drawing:
    """SVG elements, and the height down to which they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def rect(
        self, kind: str, x: float, y: float, width: float, height: float, radius: float = 0, *, fill: str = ""
    ) -> None:
        """A rectangle of a class of STYLE; fill: a colour in place of the class's."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        colour = f' fill="{fill}"' if fill else ""
        self.parts.append(f'<rect class="{kind}" {size} rx="{radius:g}"{colour}/>')

    def text(self, kind: str, x: float, y: float, words: str) -> None:
        """One line of text. y: of its baseline."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def lines(self, kind: str, lines: list[str]) -> None:
        """Lines of text below what has been drawn."""
        for line in lines:
            self.y += 18
            self.text(kind, MARGIN, self.y, line)

    def svg(self, title: str, width: int = 440) -> str:
        """The whole file, with a background of its own, so that it reads on a light and on a dark page.

        width: pixels where there is room for them.
        """
        height = self.y + 14
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{width}" role="img">'
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
        body = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", card, *self.parts]
        return "\n".join([head, *body, "</svg>", ""])
