"""Make the screenshots of the HTML report and of the explorer in docs/images: `python tools/screenshots.py`.

Needs Chromium and the extra `test`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.cli.explorer.server import ExplorerServer  # noqa: E402

IMAGES = ROOT / "docs" / "images"
EXAMPLE = "examples/pretrain_llama3_70b.sh"
SECTIONS = {"summary": ("summary", "launch", "memory"), "schedule": ("schedule", "time"), "cluster": ("cluster",)}
"""The sections that each image shows."""
WIDTH = 1100


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots need Chromium: apt install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "report.html")
        command = [sys.executable, "get_training_info.py", EXAMPLE, "--info-gpu", "H100-80GB", "--info-html", str(file)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_function("() => typeof charts !== 'undefined'")
        page.evaluate("showAll()")
        for name, sections in SECTIONS.items():
            boxes = [box for section in sections if (box := page.locator(f"#{section}").bounding_box()) is not None]
            top = min(box["y"] for box in boxes)
            height = max(box["y"] + box["height"] for box in boxes) - top
            clip = {"x": 0.0, "y": top, "width": float(WIDTH), "height": height}
            page.screenshot(path=IMAGES / f"report-{name}.png", full_page=True, clip=clip)  # type: ignore[arg-type]
            print(f"docs/images/report-{name}.png")
        explorer(browser)
        browser.close()


def explorer(browser: Browser) -> None:
    """The explorer after a change of a launch."""
    server = ExplorerServer(0, None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(server.url)
    page.wait_for_selector("html[data-shown]")
    page.locator("[data-control=tensor] [data-value='4']").click()
    page.wait_for_selector("html[data-shown='2']")
    page.screenshot(path=IMAGES / "explorer.png")
    print("docs/images/explorer.png")
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
