"""Pictures of pages as docs/pages.md shows them: wide and narrow, in light and dark, by a real browser.

python -m ops.docs.pictures docs/pictures report=runs/demo/report.html comparison=comparison.html

It needs chromium and Pillow; neither is part of the environment that the project pins for running.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

WIDTHS, SCHEMES = (1440, 420), {"dark": 0, "light": 1}
TALLEST = 2400
"""Pixels of a page that are kept: pictures are to show a page, not to replace it."""
COLORS = 128
"""Of a picture; the rare ones, such as a run's mark, are kept."""
DEADLINE_S = 120


def take(browser: str, page: str, picture: Path, width: int, scheme: str) -> None:
    """One picture of a page (a file or an address), cut below its last content, in few colors."""
    address = page if "://" in page else Path(page).resolve().as_uri()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        command += [f"--window-size={width},{TALLEST}", f"--screenshot={raw}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        image = Image.open(raw).convert("RGB")
    pixels = np.asarray(image)
    rows = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))  # that hold more than the background
    bottom = min(image.height, int(rows[-1]) + 24) if len(rows) else image.height
    in_few_colors(image.crop((0, 0, width, bottom))).save(picture, optimize=True)


def in_few_colors(image: Image.Image) -> Image.Image:
    """The commonest, such as the page's background, stay as they are."""
    few = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE)
    palette = few.getpalette() or []
    pixels = np.asarray(image).reshape(-1, 3)
    colors, counts = np.unique(pixels, axis=0, return_counts=True)
    for color in (tuple(map(int, colors[place])) for place in np.argsort(counts)[-6:]):
        place = Image.new("RGB", (1, 1), color).quantize(palette=few).tobytes()[0]
        palette[3 * place : 3 * place + 3] = color
    few.putpalette(palette)
    return few


def main(folder: Path, pages: list[str]) -> None:
    """Four pictures of each NAME=PAGE: NAME-1440-dark.png and so on."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no chromium here; install it, or name a machine that has it")
    for given in pages:
        name, _, page = given.partition("=")
        for width in WIDTHS:
            for scheme in SCHEMES:
                take(browser, page, folder / f"{name}-{width}-{scheme}.png", width, scheme)
                print(folder / f"{name}-{width}-{scheme}.png", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
