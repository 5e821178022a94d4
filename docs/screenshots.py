"""Photograph the page of a plan for README and docs: docs/images/report_*.png and pipeline_*.png, in light and dark.

    python docs/screenshots.py         # needs Chromium; a minute

In: the command below. Out: what Chromium shows of its page, the head and the pipeline, 1400 pixels wide. What can go wrong:
other fonts give other pixels, so no test compares them; look at the pictures before you commit them.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image
import PIL.ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from docs.generate import DOCS, ROOT, run

COMMAND = (
    "autopar plan gpt --layers 48 --hidden 1024 --heads 16 --batch 64 --seq 512 --devices 16 --cluster p4d.24xlarge "
    "--stages 8 --microbatches 16 --mesh 2 --html plan.html"
)
SHOTS = {
    "report": "section ~ *, ul { display: none }",
    "pipeline": "main > p, section:not(:nth-of-type(3)) { display: none } h2 { margin-top: 0; border: 0 }",
}
"""What of the page is hidden, as CSS; the rest is the picture."""
DARK = "--blink-settings=preferredColorScheme=0"
WIDTH, HEIGHT, MARGIN = 1400, 1600, 24


def photograph(page: Path, *flags: str) -> PIL.Image.Image:
    """What Chromium shows of a page, cut to its content."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("install Chromium")
    picture = page.with_suffix(".png")
    size = f"--window-size={WIDTH},{HEIGHT}"
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000", size]
    subprocess.run(
        [browser, *common, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True
    )
    whole = PIL.Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")
    plain = PIL.Image.new("RGB", whole.size, whole.getpixel((0, 0)))
    box = PIL.ImageChops.difference(whole, plain).getbbox()
    assert box is not None, "the page is empty"
    return whole.crop((0, 0, WIDTH, min(HEIGHT, box[3] + MARGIN)))


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "autopar").symlink_to(ROOT / "autopar")
        run(COMMAND, folder)
        report = (folder / "plan.html").read_text(encoding="utf-8")
        for shot, style in SHOTS.items():
            page = folder / f"{shot}.html"
            page.write_text(report.replace("</head>", f"<style>{style}</style></head>"), encoding="utf-8")
            for theme, flags in {"light": (), "dark": (DARK,)}.items():
                image = photograph(page, *flags).quantize(96, dither=PIL.Image.Dither.NONE)
                image.save(DOCS / "images" / f"{shot}_{theme}.png", optimize=True)


if __name__ == "__main__":
    main()
