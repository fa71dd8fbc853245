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

from PIL import Image, ImageChops

WIDTHS, SCHEMES = (1440, 420), {"dark": 0, "light": 1}
TALLEST = 2400
"""Pixels of a page that are kept: pictures are to show a page, not to replace it."""
COLORS = 48
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
    background = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, background).getbbox()
    bottom = image.height if box is None else min(image.height, box[3] + 24)
    image.crop((0, 0, width, bottom)).quantize(COLORS).save(picture, optimize=True)


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
