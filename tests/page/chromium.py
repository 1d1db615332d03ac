"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver, no port, no package.

Chromium reads commands from file descriptor 3, and writes answers and events to 4: JSON objects that end with NUL.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
WAIT_S = 60.0


class Browser:
    """One tab. `problems` has console errors and uncaught exceptions, `requests` every address that was asked for."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        self.downloads = profile / "downloads"
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._sent = 0
        self._rest = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        program = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        moved = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # a shell puts the pipes where Chromium looks for them
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", moved, "-", *program],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        behavior = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self._session, session = "", self._session
        self.send("Browser.setDownloadBehavior", **behavior)
        self._session = session

    def close(self) -> None:
        self._session = ""
        self.send("Browser.close")
        self._process.wait(WAIT_S)
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; events on the way are noted."""
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._sent:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read, 1 << 16)
            assert read, "the browser ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        details = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(details["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(details["args"]))
            case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                self.problems.append(details["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
        return message

    def open(self, page: Path) -> None:
        self._go("about:blank")
        self.problems.clear()
        self.requests.clear()
        self._go(page.resolve().as_uri())

    def reload(self) -> None:
        self.value("window.before = true")
        self.send("Page.reload")
        while self.value("document.readyState + window.before") != "completeundefined":
            time.sleep(0.02)

    def _go(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        while self.value("document.readyState + location.href") != f"complete{address}":
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press and release keys by name: Tab, ArrowDown, Enter."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "ArrowLeft": 37}
        for key in keys:
            text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
            named = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
            self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def look(self, width: int = 1200, dark: bool = False, media: str = "screen", javascript: bool = True) -> None:
        """How the next pages, and this one, are shown."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not javascript)

    def picture(self, path: Path, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", landscape=True)["data"]))

    def saved(self, name: str) -> str:
        """The text of a file that the page saved, as soon as it is there."""
        path, end = self.downloads / name, time.monotonic() + WAIT_S
        while not path.exists() and time.monotonic() < end:
            self.value("new Promise((done) => setTimeout(done, 50))")
        text = path.read_text()
        path.unlink()
        return text
