"""Draws docs/peers.svg, the README's figure, from the tables of two log pages.

    python3 bench/figure.py

A dot is FlashAttention-3's or cuDNN's time over ours, for one row of a table. Colours and sizes are
as in the figures of `gqa bench`.
"""
import pathlib
from xml.sax.saxutils import escape

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PREFILL = "2026-11-25-h200-prefill"
DECODE = "2026-11-23-h200"

PAGE, INK, AXIS, MESH = "#FFFFFF", "#1F2328", "#6E7781", "#DEE3E8"
PEERS = [("FlashAttention-3", "#1F77D6"), ("cuDNN", "#DE6E10")]
FONT = 'font-family="sans-serif"'

WIDTH, TOP, ROW, HEAD = 860, 74, 13, 22


def table(page, first_columns):
    """The rows of the page's table that begins with these columns."""
    lines = (DOCS / "results" / page / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first_columns))
    rows = []
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def prefill():
    """Heads, call, and the ratios to both peers."""
    rows = table(PREFILL, "| heads | B x S | TFLOP/s | of FlashAttention-3")
    return grouped((row[0], row[1], [float(row[3]), float(row[4])]) for row in rows)


def decode():
    """The same for decode, whose table has times instead of ratios."""
    rows = table(DECODE, "| heads | B x S | ours | TB/s | settled | FA3 | cuDNN")
    ratio = lambda row, column: float(row[column]) / float(row[2])
    return grouped((row[0], row[1], [ratio(row, 5), ratio(row, 6)]) for row in rows)


def grouped(rows):
    """Rows sorted by heads, in the order of their first rows."""
    groups = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row)
    return [row for group in groups.values() for row in group]


def text(x, y, words, size=11, anchor="start", fill=INK):
    return (f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}">{escape(words)}</text>')


def line(x1, y1, x2, y2, color):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def panel(left, title, rows, low, high, ticks):
    """The panel's elements, one line of dots for each row, and its height."""
    plot_left, plot_right = left + 130, left + WIDTH / 2 - 24
    place = lambda ratio: plot_left + (ratio - low) / (high - low) * (plot_right - plot_left)
    out, y, group = [], TOP + 8, None
    for heads, call, ratios in rows:
        if heads != group:
            group, y = heads, y + HEAD
            out.append(text(left + 14, y, heads.replace(" x ", " heads of ")))
        y += ROW
        out.append(text(plot_left - 10, y + 3.5, call, 10, "end", AXIS))
        out.append(line(plot_left, y, plot_right, y, MESH))
        for ratio, (_, color) in zip(ratios, PEERS):
            assert low <= ratio <= high, (heads, call, ratio)
            out.append(f'<circle cx="{place(ratio):.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
    bottom = y + 14
    axes = [text((plot_left + plot_right) / 2, TOP - 22, title, 13, "middle")]
    for tick in ticks:
        axes.append(line(place(tick), TOP + 8, place(tick), bottom, INK if tick == 1 else MESH))
        axes.append(text(place(tick), bottom + 15, f"{tick:g}", 11, "middle"))
    return axes + out, bottom + 24


def figure():
    left, left_end = panel(0, "Prefill, causal unless it says no mask", prefill(), 0.9, 1.5,
                           [0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5])
    right, right_end = panel(WIDTH / 2, "Decode, sequences x cached tokens", decode(), 0.8, 2.8,
                             [1, 1.4, 1.8, 2.2, 2.6])
    height = max(left_end, right_end) + 8
    title = "Time of FlashAttention-3 and cuDNN over ours: right of 1, ours is faster"
    legend = []
    for n, (name, color) in enumerate(PEERS):
        x, y = 30 + 150 * n, height - 60
        legend.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{color}"/>')
        legend.append(text(x + 12, y, name, 12))
    source = ["One H200, bfloat16, attention alone; the times of a row are of one process.",
              f"docs/results/{PREFILL} and {DECODE}."]
    legend += [text(26, height - 38 + 16 * n, words, 11, fill=AXIS)
               for n, words in enumerate(source)]
    body = [text(WIDTH / 2, 26, title, 16, "middle")] + left + right + legend
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}">\n'
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAGE}"/>\n'
            + "\n".join(body) + "\n</svg>\n")


if __name__ == "__main__":
    (DOCS / "peers.svg").write_text(figure())
