"""A headless Chromium for tests of pages, driven over its own protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 1000.0  # An answer that takes longer hangs.


def found() -> str | None:
    """Return the browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page in a browser that can reach only ``allowed`` hosts."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        from websockets.sync.client import connect

        self.problems: list[str] = []  # errors on the console, and exceptions
        self.requests: list[str] = []  # addresses outside the page
        self._folder = tempfile.TemporaryDirectory(prefix="colograd-browser-", ignore_cleanup_errors=True)
        rules = ", ".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in allowed)])
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-proxy-server",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-port=0",
            "--hide-scrollbars",
            f"--user-data-dir={self._folder.name}",
            f"--host-resolver-rules={rules}",
            "--force-color-profile=srgb",
        ]
        path = found()
        assert path is not None
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([path, *options, "about:blank"], **quiet)  # type: ignore[call-overload]
        try:
            port, way = self._port()
            self._socket = connect(f"ws://127.0.0.1:{port}{way}", max_size=None)
        except BaseException:
            self._process.kill()
            raise
        self._ids = itertools.count(1)
        targets = self._call("Target.getTargets", session=None)["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        if not allowed:
            self._call(
                "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
            )

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._call("Browser.close", session=None)
        except Exception:
            self._process.kill()
        self._process.wait(30)
        self._folder.cleanup()

    def _port(self) -> tuple[str, str]:
        path, deadline = Path(self._folder.name) / "DevToolsActivePort", time.monotonic() + SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if path.is_file() and len(lines := path.read_text().split("\n")) >= 2:
                return lines[0], lines[1]
            time.sleep(0.05)
        raise RuntimeError(f"the browser didn't start (status {self._process.poll()})")

    def _call(self, method: str, session: str | None = "", **parameters: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session == "" and getattr(self, "_session", None):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=SECONDS))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(part.get("value", part.get("description"))) for part in told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                address = told["request"]["url"]
                if not address.startswith(("data:", "blob:", "about:")) and told["type"] != "Document":
                    self.requests.append(address)

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to a page and wait until its script has run."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && document.querySelector('#main')?.children.length > 0")

    def resize(self, width: int, height: int) -> None:
        phone = width < 700
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def run(self, script: str) -> Any:
        """Return the value of an expression. Promises are awaited, and exceptions of the script are raised."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.run(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {condition}; on the console: {self.problems}")

    def click(self, selector: str, place: int = 0) -> None:
        """Click the middle of an element with the mouse."""
        x, y = self._middle(selector, place)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def tap(self, selector: str, place: int = 0) -> None:
        """Touch an element of a phone's screen."""
        x, y = self._middle(selector, place)
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _middle(self, selector: str, place: int) -> list[float]:
        found = f"document.querySelectorAll({json.dumps(selector)})[{place}]"
        self.run(f"{found}.scrollIntoView({{block: 'center', inline: 'center'}})")
        return self.run(f"((b) => [b.x + b.width / 2, b.y + b.height / 2])({found}.getBoundingClientRect())")

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def fill(self, selector: str, text: str) -> None:
        told = "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}));"
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"((e) => {{ e.focus(); e.value = {json.dumps(text)}; {told} }})({found})")

    def picture(self, path: Path, whole: bool = False) -> Path:
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path
