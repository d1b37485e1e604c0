"""The building blocks of report pages: page, sections, tiles, tables, pictures.

All values from devices and files are escaped in the one function that turns text into HTML (`text`). A page is
self-contained; its content security policy forbids loading anything.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence

from edge_client.config.quantities import format_bytes

__all__ = [
    "Html",
    "details",
    "image",
    "images",
    "note",
    "page",
    "pairs",
    "section",
    "size",
    "table",
    "table_of_known",
    "text",
    "tiles",
    "words",
]

_SHARPNESS = 1.8  # pixels of a plot per pixel of the page
_STYLE = """
:root { color-scheme: light; --ink: #0f172a; --soft: #475569; --line: #e2e8f0; --card: #fff; --page: #f1f5f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 12px; }
header p, .note { color: var(--soft); margin: 4px 0 0; }
.state { display: inline-block; font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 99px;
  vertical-align: 5px; margin-left: 8px; background: #e2e8f0; }
.finished { background: #dcfce7; color: #166534; } .failed { background: #fee2e2; color: #991b1b; }
.running, .queued, .unfinished { background: #dbeafe; color: #1e40af; }
.stopped { background: #fef3c7; color: #92400e; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 22px; line-height: 1.25; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: 13px; }
section { padding: 16px; margin: 0 0 16px; min-width: 0; }
.pair { display: flex; flex-wrap: wrap; gap: 0 16px; align-items: flex-start; } .pair section { flex: 1 1 440px; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
@media (max-width: 520px) { .pair section { flex-basis: 100%; } }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.lines td { white-space: nowrap; } td p { margin: 0; min-width: 220px; white-space: normal; overflow-wrap: anywhere; }
.lines td p { min-width: 140px; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.over { color: #b91c1c; font-weight: 600; }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; } td pre { white-space: pre-wrap; }
h3 { font-size: 14px; margin: 14px 0 4px; }
.lane { display: flex; gap: 10px; align-items: center; font-size: 13px; }
.lane b { flex: 0 0 120px; font-weight: 400; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.lane span { position: relative; flex: 1; height: 14px; margin: 2px 0; background: var(--page); }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 1px; }
.legend { margin: 0; font-size: 13px; color: var(--soft); }
.legend span { display: inline-block; margin-right: 12px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
"""


class Html(str):
    """Text that is HTML already."""


def text(value: object) -> str:
    """Any value as HTML text."""
    return html.escape(str(value), quote=True)


def page(title: str, pieces: Iterable[str]) -> str:
    """A complete HTML page."""
    body = "\n".join(piece for piece in pieces if piece)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """The most important facts by name and value."""
    shown = "".join(f'<div class="tile"><b>{text(v)}</b><span>{text(n)}</span></div>' for n, v in facts)
    return f'<div class="tiles">{shown}</div>'


def section(title: str, *pieces: str) -> str:
    """A card."""
    return f"<section><h2>{text(title)}</h2>{''.join(pieces)}</section>"


def pairs(sections: Sequence[str]) -> str:
    """Sections in pairs where the screen is wide enough; empty ones are left out."""
    filled = [one for one in sections if one]
    return "\n".join(f'<div class="pair">{"".join(filled[i : i + 2])}</div>' for i in range(0, len(filled), 2))


def image(png: bytes, alt: str) -> str:
    """An embedded picture; the letters of all plots have one size, unless the screen is narrow."""
    width = round(int.from_bytes(png[16:20], "big") / _SHARPNESS)
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{text(alt)}" width="{width}" src="data:image/png;base64,{data}">'


def images(content: str) -> dict[str, bytes]:
    """The pictures of a page by file name, which is made of the text that describes the picture."""
    matches = re.findall(r'<img alt="([^"]*)" width="\d+" src="data:image/png;base64,([^"]*)">', content)
    return {_file_name(alt): base64.b64decode(data) for alt, data in matches}


def _file_name(alt: str) -> str:
    words = re.findall(r"[a-z0-9]+", html.unescape(alt).lower().replace("'", ""))
    return f"{'-'.join(words)}.png"


def note(*lines: str) -> str:
    """Small print."""
    return "".join(f'<p class="note">{text(line)}</p>' for line in lines)


def words(value: object) -> Html:
    """A cell of a table whose text may wrap."""
    return Html(f"<p>{text(value)}</p>")


def details(summary: str, content: str) -> str:
    """Content that opens with a click on its summary."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = (), kind: str = "lines"
) -> str:
    """A table of texts; `Html` cells are used unchanged. With `lines` no cell wraps; a narrow screen scrolls."""

    def line(cells: Sequence[object], tag: str) -> str:
        shown = (f"<{tag}{' class=right' if i in right else ''}>{_cell(c)}</{tag}>" for i, c in enumerate(cells))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = f"<thead>{line(heads, 'th')}</thead>"
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def table_of_known(heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int]) -> str:
    """A table without the columns that have no known value."""
    known = [i for i in range(len(heads)) if any(row[i] not in (None, "", "-") for row in rows)]
    return table(
        [heads[i] for i in known],
        [[row[i] for i in known] for row in rows],
        right=[place for place, i in enumerate(known) if i in right],
    )


def _cell(value: object) -> str:
    return value if isinstance(value, Html) else text("-" if value is None else value)


def size(value: object) -> str:
    """Bytes for people."""
    return format_bytes(value) if isinstance(value, int) and value else "-"
