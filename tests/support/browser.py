"""Drives a page in Chromium by the DevTools protocol, without a driver: points, types and evaluates scripts.

Keys and pointer moves are input events of the browser, like those of a person.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
AXE = Path(__file__).resolve().parents[2] / ".clients/axe-core/node_modules/axe-core/axe.min.js"
PHONE, DESKTOP = 375, 1280
HEIGHT = 1000
#: Runs before a page's own scripts, so that the page starts as on its first visit.
FORGET = "localStorage.clear(); sessionStorage.clear()"
HANG_S = 60.0

#: The codes that Chromium needs beside the names of keys that are not letters.
KEYS = {
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Home": 36,
    "End": 35,
    "Enter": 13,
    "Escape": 27,
}
TEXTS = {"Enter": "\r"}  # the texts that keys write

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--proxy-server=127.0.0.1:9",  # nothing listens there; loopback addresses do not go through it
)


class Tab:
    """One page.

    Attributes:
        errors: exceptions of the page's scripts, and errors that the browser has logged.
        requested: addresses that the page has requested.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._number = 0
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(
            connect(self._address(), compression=None, max_size=None, ping_interval=None, proxy=None)
        )
        target = self.command("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in target if each["type"] == "page")
        attached = self.command("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.command(f"{domain}.enable")

    def _address(self) -> str:
        """Return the address that Chromium prints when it listens."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "DevTools listening on " in line:
                return line.split("DevTools listening on ")[1].strip()
        raise AssertionError("chromium did not start")

    # ------------------------------------------------------------------ the protocol

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps(message | self._session))
        while True:
            received = json.loads(self._socket.recv(HANG_S))
            if received.get("id") == self._number:
                assert "error" not in received, f"{method}: {received['error']}"
                result: dict[str, Any] = received["result"]
                return result
            self._note(received)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    # ------------------------------------------------------------------ what a test does

    def open(
        self, url: str, *, width: int = DESKTOP, height: int = HEIGHT, dark: bool = False, still: bool = False
    ) -> None:
        """Load a page with empty storage. `still`: the reader prefers less motion."""
        self.command("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        wanted = [{"name": name, "value": value} for name, value in features.items()]
        self.command("Emulation.setEmulatedMedia", features=wanted)
        self.errors.clear()
        self.requested.clear()
        forgetting = self.command("Page.addScriptToEvaluateOnNewDocument", source=FORGET)
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.command("Page.removeScriptToEvaluateOnNewDocument", **forgetting)

    def reload(self) -> None:
        """Load the page again. It keeps its storage."""
        self.ask("globalThis.isOld = true")
        self.command("Page.reload")
        self.until("document.readyState === 'complete' && !globalThis.isOld")

    def ask(self, script: str) -> Any:
        """Return the value of an expression. A promise is awaited."""
        answer = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Evaluate an expression until it is true, and return its value."""
        deadline = time.monotonic() + HANG_S
        while not (value := self.ask(script)):
            assert time.monotonic() < deadline, f"it did not happen: {script}"
            time.sleep(0.03)
        return value

    def type(self, text: str) -> None:
        """Write into the field that has the focus."""
        self.command("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = {"text": TEXTS[key]} if key in TEXTS else {}
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEYS[key],
                **(text if kind == "keyDown" else {}),
            )

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer to the middle of an element."""
        place = self.ask(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        self.command("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def violations(self, selector: str) -> list[str]:
        """Return the violations that axe-core finds below an element: contrast, names, roles."""
        if not AXE.is_file():
            pytest.skip("no axe-core here: npm install --prefix .clients/axe-core axe-core@4")
        self.ask(AXE.read_text(encoding="utf-8") + ";0")
        found: list[str] = self.ask(
            f"axe.run({selector!r}).then(found => found.violations.flatMap(rule => rule.nodes.map("
            "node => `${rule.id}: ${node.html} ${node.any.map(each => each.message).join()}`)))"
        )
        return found

    def assert_well(self, home: str) -> None:
        """Assert that the page had no error and has sent requests to `home` only."""
        self.ask("new Promise(resolve => requestAnimationFrame(resolve))")
        assert self.errors == []
        assert [each for each in self.requested if not each.startswith((home, "data:"))] == []

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(HANG_S)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """One Chromium for all tests of a module."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    tab = Tab(tmp_path_factory.mktemp("profile"))
    try:
        yield tab
    finally:
        tab.close()
