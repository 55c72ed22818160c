"""A real browser without a screen, as the tests of the viewer use it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

PROGRAM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "needs a browser: apt-get install chromium chromium-driver"
SCREENSHOTS = os.environ.get("EMBODICHAIN_SCREENSHOTS")
"""Folder for the screenshots of the docs; docs/images makes those that are shown there."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=960,680",
)
_FIND_BOX = """
return Array.from(document.querySelectorAll("input:not([type=hidden])"))
    .find(box => box.value === arguments[0] && box.offsetParent !== null)
"""
_READ_PLOTS = """
return Object.values(window.__viserTestpoints.uplots).map(({chart}) => {
    const [left, top, width, height] = ["left", "top", "width", "height"].map(name => Math.floor(chart.bbox[name]))
    const steps = chart.data[0]
    if (width < 1) return null
    const pixels = chart.ctx.getImageData(left, top, width, height).data, columns = []
    for (let x = 0; x < width; x++)
        for (let y = 0; y < height; y++) {
            const at = 4 * (y * width + x)  // blue, the colour of the first line
            if (pixels[at + 2] > 200 && pixels[at] < 90 && pixels[at + 3] > 200) { columns.push(x / width); break }
        }
    return {"shown": [chart.scales.x.min, chart.scales.x.max], "steps": [steps[0], steps[steps.length - 1]],
            "drawn": columns.length ? [columns[0], columns[columns.length - 1]] : null}
})
"""
_READ_IMAGE = """
const image = Array.from(document.querySelectorAll("img")).find(one => one.naturalWidth > 100 && one.offsetParent)
if (!image) return null
const canvas = document.createElement("canvas")
canvas.width = image.naturalWidth, canvas.height = image.naturalHeight
const context = canvas.getContext("2d")
context.drawImage(image, 0, 0)
return [canvas.width, canvas.height, Array.from(context.getImageData(0, 0, canvas.width, canvas.height).data)]
"""
_READ_SIZE = """
const box = Array.from(document.querySelectorAll("canvas")).map(one => one.getBoundingClientRect())
    .reduce((a, b) => a.width * a.height >= b.width * b.height ? a : b)
return [box.width, box.height]
"""
_SECONDS = 90.0


class Page:
    """A page of the viewer, as a person sees it."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self._folder = driver, folder

    def open(self, address: str, viewer: Any = None) -> None:
        """Open an address and wait until the panel is there, and the viewer knows that somebody watches."""
        self.driver.get(address)
        self.wait(lambda: self.all("//*[@role='tab']"), "the panel")
        if viewer is not None:
            self.wait(lambda: viewer.server.get_clients(), "the connection")
        for button in self.all("//*[contains(@class, 'mantine-Notification-root')]//button"):
            self.driver.execute_script("arguments[0].click()", button)  # that the graphics card is missing

    def all(self, path: str) -> list[Any]:
        """Return the elements at an XPath."""
        return list(self.driver.find_elements("xpath", path))

    def click(self, text: str) -> None:
        """Click the button that shows this text."""
        path = f"//button[normalize-space(.)='{text}']"
        self.wait(lambda: self.all(path), text)
        self.driver.execute_script("arguments[0].click()", self.all(path)[-1])

    def tab(self, title: str) -> None:
        """Go to another tab."""
        path = f"//*[@role='tab'][@title='{title}']"
        self.wait(lambda: self.all(path), title)
        self.all(path)[-1].click()

    def box(self, value: str) -> Any:
        """Return the box that shows a value, and wait for it."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = filter(None, [self.driver.execute_script(_FIND_BOX, value)])
            return bool(found)

        self.wait(look, f"a box with {value}")
        return found[0]

    def choose(self, value: str, option: str) -> None:
        """Choose an option of the list that shows a value."""
        self.driver.execute_script("arguments[0].click()", self.box(value))
        path = f"//*[@role='option'][normalize-space(.)='{option}']"
        self.wait(lambda: self.all(path), option)
        self.driver.execute_script("arguments[0].click()", self.all(path)[-1])

    def plots(self) -> list[dict[str, Any]]:
        """Return of each plot the steps at both ends of its x-axis and of its data, and where its first line is drawn,
        as parts of its width."""
        return [plot for plot in self.driver.execute_script(_READ_PLOTS) if plot is not None]

    def image(self) -> NDArray[np.uint8] | None:
        """Return the image that the page shows beside the scene, ``[height, width, 3]``, if there is one."""
        found = self.driver.execute_script(_READ_IMAGE)
        return None if found is None else np.array(found[2], np.uint8).reshape(found[1], found[0], 4)[..., :3]

    def keys(self, keys: str) -> None:
        """Press keys one after the other."""
        from selenium.webdriver import ActionChains

        self.driver.execute_script("document.activeElement.blur()")
        ActionChains(self.driver).send_keys(keys).perform()

    def drag(
        self, begin: tuple[int, int], by: tuple[int, int], hold: Callable[[], object], control: bool = True
    ) -> None:
        """Drag with the left button, and with the control key, from a place of the page, and look meanwhile."""
        from selenium.webdriver import ActionChains, Keys

        steps = 6
        moves = ActionChains(self.driver, duration=60)
        if control:
            moves.key_down(Keys.CONTROL)
        moves.w3c_actions.pointer_action.move_to_location(*begin)
        moves.w3c_actions.pointer_action.pointer_down()
        for step in range(1, steps + 1):
            moves.w3c_actions.pointer_action.move_to_location(
                begin[0] + by[0] * step // steps, begin[1] + by[1] * step // steps
            )
        moves.perform()
        try:
            hold()
        finally:
            end = ActionChains(self.driver)
            end.w3c_actions.pointer_action.pointer_up()
            if control:
                end.key_up(Keys.CONTROL)
            end.perform()

    def screenshot(self, name: str) -> Image.Image:
        """Return what is to be seen, and keep it for the docs if that is wanted."""
        file = self._folder / f"{name}.png"
        self.driver.save_screenshot(str(file))
        image = Image.open(file).convert("RGB")
        if SCREENSHOTS is not None:
            small = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            small.save(Path(SCREENSHOTS) / f"viewer_{name}.png", optimize=True)
        return image

    def scene_size(self) -> tuple[int, int]:
        """Return width and height of the scene, in pixels of the page."""
        width, height = self.driver.execute_script(_READ_SIZE)
        return int(width), int(height)

    def pixels(self) -> NDArray[np.float64]:
        """Return what is to be seen as numbers, ``[height, width, 3]``."""
        return np.asarray(Image.open(BytesIO(self.driver.get_screenshot_as_png())).convert("RGB"), np.float64)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = _SECONDS) -> None:
        """Wait until something is so; fail if it takes too long."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + seconds:
                self.driver.save_screenshot(str(self._folder / "missing.png"))
                pytest.fail(f"waited {seconds:.0f} s for {what}; see {self._folder / 'missing.png'}")
            time.sleep(0.1)
        print(f"{time.monotonic() - began:6.1f} s for {what}")


@contextmanager
def opened_browser(folder: Path) -> Iterator[Page]:
    """Start a browser of its own, with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(PROGRAM)
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.set_page_load_timeout(_SECONDS)
        yield Page(driver, folder)
    finally:
        driver.quit()


def colours(image: Image.Image, box: tuple[float, float, float, float] = (0.0, 0.0, 0.65, 1.0)) -> int:
    """Return how many different colours a part of an image has, which is given by shares of its width and height."""
    width, height = image.size
    part = image.crop((int(box[0] * width), int(box[1] * height), int(box[2] * width), int(box[3] * height)))
    return len(part.getcolors(1 << 24) or ())
