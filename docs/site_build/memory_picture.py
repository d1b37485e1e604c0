"""The picture docs/explanation/memory-counts.svg: what a budget counts of a worker, measured in processes of its own.

`python -m docs.site_build.memory_picture` writes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["PICTURE", "main", "picture"]

PICTURE = Path(__file__).parents[1] / "explanation/memory-counts.svg"
# a worker after its first step, the same with 30 MiB of a file's pages and with 30 MiB of its own; a fork after a step
_MEASURE = """
import json, mmap, os, sys, tempfile
from edge_client.device import guard
guard.pin_malloc()
os.environ["OMP_NUM_THREADS"] = "1"
import edge_client.worker.assignment
import torch
from edge_client.device.private_memory import process_memory, written_since_fork
bars, template = [], os.getpid()
def step():
    layer = torch.nn.Conv2d(3, 16, 3)
    layer(torch.rand(4, 3, 32, 32)).sum().backward()
def bar(name, shared=0):
    memory = process_memory()
    bars.append([name, memory.private_bytes - shared, memory.file_bytes, shared])
def forked():
    step()
    memory = process_memory()
    bar("a worker that was forked", memory.private_bytes - written_since_fork(template))
if sys.argv[1] == "fork":
    ours, theirs = os.pipe()
    if os.fork() == 0:
        forked()
        os.write(theirs, json.dumps(bars).encode())
        os._exit(0)
    bars = json.loads(os.read(ours, 65536))
    os.wait()
else:
    step()
    bar("a worker before it trains")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(30 * 2**20))
        file.flush()
        pages = mmap.mmap(file.fileno(), 30 * 2**20, access=mmap.ACCESS_READ)
        sum(pages[::4096])
        bar("with 30 MiB of a file in use")
        pages.close()
    block = torch.ones(30 * 2**18)
    bar("with 30 MiB of tensors")
print(json.dumps(bars))
"""
_COLOURS = ("#2563eb", "#cbd5e1", "#93c5fd")
_WIDTH, _LEFT, _BAR, _TOP = 860, 220, 34, 40


def main() -> int:
    """Measure and draw; returns the exit code."""
    PICTURE.write_text(picture([*_measured("cold"), *_measured("fork")]), encoding="utf-8")
    return 0


def _measured(kind: str) -> list[tuple[str, int, int, int]]:
    out = subprocess.run([sys.executable, "-c", _MEASURE, kind], check=True, capture_output=True, text=True).stdout
    return [(name, int(private), int(file), int(shared)) for name, private, file, shared in json.loads(out)]


def picture(bars: Sequence[tuple[str, int, int, int]]) -> str:
    """Bars of private memory, of what is shared with a template, and of pages of files."""
    height = _TOP + len(bars) * (_BAR + 16) + 44
    scale = (_WIDTH - _LEFT - 90) / max(sum(sizes) for _, *sizes in bars)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'font-family="sans-serif" font-size="13" fill="#334155">',
            "<title>What a budget counts of a worker</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            *_legend(),
            *(line for number, bar in enumerate(bars) for line in _bar(number, bar, scale)),
            f'<text x="{_LEFT}" y="{height - 14}">MiB; a budget counts what is blue, and no pages of files</text>',
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    texts = ("private memory", "pages of files", "the template's, which a fork shares and answers for")
    for number, (text, colour) in enumerate(zip(texts, _COLOURS, strict=True)):
        x = _LEFT + (0, 140, 270)[number]
        yield f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="23">{text}</text>'


def _bar(number: int, bar: tuple[str, int, int, int], scale: float) -> Iterator[str]:
    name, private, file, shared = bar
    x, y = float(_LEFT), _TOP + number * (_BAR + 16)
    yield f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">{name}</text>'
    for size, colour in ((shared, _COLOURS[2]), (private, _COLOURS[0]), (file, _COLOURS[1])):
        if not size:
            continue
        width = size * scale
        ink = "#ffffff" if colour == _COLOURS[0] else "#334155"
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
        if width > 26:
            yield (
                f'<text x="{x + width / 2:.1f}" y="{y + 22}" text-anchor="middle" fill="{ink}">'
                f"{size / 2**20:.0f}</text>"
            )
        x += width


if __name__ == "__main__":
    sys.exit(main())
