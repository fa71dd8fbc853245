"""Pictures of pages as docs/pages.md shows them: runs are made, then their pages, then pictures by a real browser.

python -m ops.docs.pictures               all, from nothing; runs that are finished stay in runs/pictured
python -m ops.docs.pictures report site   of these pages alone

Each page is taken wide and narrow, in light and dark. It needs chromium, which no lock file installs.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

RECIPE = "ops/docs/pictured/recipe.yaml"
RUNS = Path("runs/pictured")
MODEL, BASE = RUNS / "model", RUNS / "base"
PICTURES = Path("docs/pictures")
PAGES = {
    "report": RUNS / "resumed/report.html",
    "one-step": RUNS / "one/report.html",
    "samples": RUNS / "resumed/samples.html",
    "comparison": RUNS / "comparison.html",
    "mismatch": RUNS / "mismatch/mismatch.html",
    "site": Path("build/docs/concepts.html"),
}
WIDTHS, SCHEMES = (1440, 420), {"dark": 0, "light": 1}
TALLEST = 2400
"""Pixels of a page that are kept: pictures are to show a page, not to replace it."""
COLORS, COMMON = 128, 8
"""Of a picture; the rare ones, such as a run's mark, are kept, and so many that cover most of it."""
DEADLINE_S = 120


def evenkeel(*arguments: str | Path) -> None:
    """Run the command line, which shows what it does. Ends with it when it fails."""
    if status := subprocess.run([sys.executable, "-m", "launch.cli", *map(str, arguments)]).returncode:
        sys.exit(status)


def settings(**values: object) -> list[str]:
    """Keys with a double underscore for each dot, as options of `train`."""
    pairs = ((key.replace("__", "."), value) for key, value in values.items())
    return [word for key, value in pairs for word in ("--set", f"{key}={value}")]


def write_prompts(path: Path, fewest: int, most: int) -> None:
    """Digits to sort, of so many places."""
    draw = random.Random(fewest)
    rows = []
    for _ in range(400):
        digits = "".join(draw.choices("0123456789", k=draw.randint(fewest, most)))
        rows.append(json.dumps(dict(prompt=f"{digits}=", answer="".join(sorted(digits)))))
    path.write_text("\n".join(dict.fromkeys(rows)) + "\n", encoding="utf-8")


def make_runs() -> None:
    """Three runs, of which the first was extended, their comparison and an attribution."""
    if not BASE.is_dir():
        evenkeel("model", "new", BASE)
    if not MODEL.is_dir():
        alone = settings(run__root=RUNS, model__path=BASE, learner__tensor_parallel=1)
        evenkeel("sft", "demo", "--out", MODEL, "--steps", "300", "--batch-size", "32", *alone)
    RUNS.mkdir(parents=True, exist_ok=True)
    write_prompts(RUNS / "short.jsonl", 3, 5)
    write_prompts(RUNS / "long.jsonl", 6, 8)
    if not (RUNS / "resumed/report.html").is_file():
        evenkeel("train", RECIPE)
    evenkeel("train", RECIPE, *settings(run__steps=22, learner__optimizer__decay_steps=22))
    evenkeel("train", RECIPE, *settings(run__name="one", run__steps=1, evaluation__every=1))
    other = settings(
        run__name="other",
        run__steps=16,
        objective__name="clipped",
        schedule="{kind: sync}",
        rollout__precision="fp32",
        learner__optimizer__lr=2e-4,
    )
    evenkeel("train", RECIPE, *other)
    named = [RUNS / name for name in ("resumed", "other", "one")]
    evenkeel("runs", "compare", *named, "--html", PAGES["comparison"])
    if not PAGES["mismatch"].is_file():
        evenkeel("mismatch", RUNS / "resumed", "--out", PAGES["mismatch"].parent)


def take(browser: str, page: Path, picture: Path, width: int, scheme: str) -> None:
    """One picture of a page, cut below its last content, in few colors."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        command += [f"--window-size={width},{TALLEST}", f"--screenshot={raw}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        image = Image.open(raw).convert("RGB")
    pixels = np.asarray(image)
    rows = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))  # that hold more than the background
    bottom = min(image.height, int(rows[-1]) + 24) if len(rows) else image.height
    in_few_colors(image.crop((0, 0, width, bottom))).save(picture, optimize=True)


def in_few_colors(image: Image.Image) -> Image.Image:
    """The commonest, such as the page's background, stay as they are."""
    colors, counts = np.unique(np.asarray(image).reshape(-1, 3), axis=0, return_counts=True)
    common = colors[np.argsort(counts)[-COMMON:]]
    few = image.quantize(COLORS - COMMON, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(few[: 3 * (COLORS - COMMON)] + common.flatten().tolist())
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def main(names: list[str]) -> None:
    """Four pictures of each page: NAME-1440-dark.png and so on."""
    if unknown := sorted(set(names) - PAGES.keys()):
        sys.exit(f"error: no such page: {', '.join(unknown)}; there are {', '.join(PAGES)}")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no chromium here, by that name or as google-chrome; install it")
    chosen = names or [*PAGES]
    if set(chosen) - {"site"}:
        make_runs()
    if "site" in chosen:
        subprocess.run(["make", "docs"], check=True)
    for name in chosen:
        for width in WIDTHS:
            for scheme in SCHEMES:
                take(browser, PAGES[name], PICTURES / f"{name}-{width}-{scheme}.png", width, scheme)
                print(PICTURES / f"{name}-{width}-{scheme}.png", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
