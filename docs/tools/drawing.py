"""Diagrams as SVG: boxes, lines and texts, readable on a light and on a dark page."""

from collections.abc import Sequence
from html import escape

LINE_HEIGHT = 18
PADDING = 10

_STYLE = """\
<style>
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.note { fill: #57606a; }
.page { fill: #ffffff; }
rect, path { stroke: #57606a; stroke-width: 1.2; }
path { fill: none; }
.head, .page { stroke: none; }
.head { fill: #57606a; }
.plain { fill: #f6f8fa; }
.blue { fill: #ddf4ff; }
.green { fill: #dafbe1; }
.amber { fill: #fff8c5; }
.rose { fill: #ffebe9; }
.dashed { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9ea7b3; }
.page { fill: #0d1117; }
rect, path { stroke: #8b949e; }
.head { fill: #8b949e; }
.plain { fill: #1c2129; }
.blue { fill: #12355c; }
.green { fill: #12402a; }
.amber { fill: #4d3a0b; }
.rose { fill: #5a1e24; }
}
</style>"""


class Drawing:
    """Picture of a fixed size. Places are in pixels from the upper left corner.

    The page is filled, so that a viewer whose colours differ from the system's shows the texts too.
    """

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            _STYLE,
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]
        self._size = width, height

    def box(
        self,
        place: tuple[int, int],
        size: tuple[int, int],
        lines: Sequence[str] = (),
        *,
        kind: str = "plain",
    ) -> None:
        """Draw a box with its lines from the top, the first of them as a title."""
        (x, y), (width, height) = place, size
        if len(lines) * LINE_HEIGHT > height or any(_width(text) > width - 8 for text in lines):
            raise ValueError(f"the box of {width} x {height} is too small for {lines}")
        self._check((x, y), (x + width, y + height))
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        first = y + (height - len(lines) * LINE_HEIGHT) // 2 + 13
        for number, text in enumerate(lines):
            kind_of_text = "title" if number == 0 and len(lines) > 1 else ""
            self._text(x + width // 2, first + number * LINE_HEIGHT, text, kind_of_text, "middle")

    def text(
        self, place: tuple[int, int], text: str, *, kind: str = "note", anchor: str = "start"
    ) -> None:
        x, y = place
        width = {"start": (0, 1), "middle": (0.5, 0.5), "end": (1, 0)}[anchor]
        self._check((x - int(width[0] * _width(text)), y), (x + int(width[1] * _width(text)), y))
        self._text(x, y, text, kind, anchor)

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Draw a line through the points with a head at its end, or at both ends."""
        self._check(*points)
        way = " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="{"dashed" if dashed else "line"}" d="M{way}"/>')
        for before, end in [points[-2:], *([points[1::-1]] if both else [])]:
            self._head(before, end)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])

    def _text(self, x: int, y: int, text: str, kind: str, anchor: str) -> None:
        style = f' class="{kind}"' if kind else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x}" y="{y}"{style}{place}>{escape(text)}</text>')

    def _head(self, before: tuple[int, int], end: tuple[int, int]) -> None:
        (x0, y0), (x, y) = before, end
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        corners = (x, y), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
        other = x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx
        way = " L".join(f"{a} {b}" for a, b in (*corners, other))
        self._parts.append(f'<path class="head" d="M{way} Z"/>')

    def _check(self, *points: tuple[int, int]) -> None:
        width, height = self._size
        for x, y in points:
            if not (0 <= x <= width and 0 <= y <= height):
                raise ValueError(f"the point {x}, {y} lies outside of {width} x {height}")


def _width(text: str) -> int:
    """Return about the width of a text in pixels, rather too much."""
    return int(7.2 * len(text))
