"""A real Chromium for tests, spoken to over a pipe: no port, no package, nothing installed.

`--remote-debugging-pipe` has the browser read commands from descriptor 3 and write answers to 4,
each a JSON text that ends in a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60.0  # seconds for one answer

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)

# A shell can't: dash knows descriptors of one digit only.
LAUNCH = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 50) for n in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of one browser, and what it asked for and complained about."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-ISc", LAUNCH, str(theirs_in), str(theirs_out), CHROMIUM]
        self._process = subprocess.Popen(
            [*command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1280, 820)

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError):
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its answer; events in between are taken in."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._take(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], deadline - time.monotonic())
            if not ready:
                raise AssertionError("the browser doesn't answer")
            got = os.read(self._in, 1 << 20)
            if not got:
                raise OSError("the browser is gone")
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _take(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(given["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(given["args"])[:2000])
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(given["entry"])[:2000])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"a dialog: {given['message'][:200]}")
                raise AssertionError("the page opened a dialog")

    # --- what tests do ----------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_until("document.readyState === 'complete' && !!document.querySelector('h1')")

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of a promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise AssertionError(json.dumps(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Look again and again whether something has become true."""
        assert self._becomes(condition, 30_000), f"never became true: {condition}"

    def click_until(self, selector: str, condition: str) -> None:
        """Click until it shows: a page that is still being laid out may move under the mouse."""
        for _ in range(10):
            self.click(selector)
            if self._becomes(condition, 3_000):
                return
        raise AssertionError(f"clicks on {selector} never made it true: {condition}")

    def _becomes(self, condition: str, milliseconds: int) -> bool:
        script = f"""new Promise((resolve) => {{
            const begin = performance.now();
            const look = () => (({condition}) ? resolve(true)
                : performance.now() - begin > {milliseconds} ? resolve(false)
                : setTimeout(look, 10));
            look();
        }})"""
        return bool(self.evaluate(script))

    def go(self, route: str) -> None:
        """Another page of the report, drawn."""
        self.evaluate(f"location.hash = {json.dumps('#/' + route)}")
        self.wait_until(
            f"document.getElementById('main').dataset.page === {json.dumps('#/' + route)}"
        )
        self.evaluate("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of an element."""
        # Not before it stands still: a page that is being laid out moves under the mouse.
        box = self.evaluate(
            f"""new Promise((resolve) => {{
            const find = () => {{ const e = document.querySelector({json.dumps(selector)});
                e.scrollIntoView({{ block: "center" }});
                const b = e.getBoundingClientRect();
                return {{ x: b.x + b.width / 2, y: b.y + b.height / 2 }}; }};
            const look = (before) => setTimeout(() => {{ const now = find();
                now.x === before.x && now.y === before.y ? resolve(now) : look(now); }}, 50);
            look(find()); }})"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def press(self, key: str, text: str = "") -> None:
        more = {"text": text or key} if len(text or key) == 1 else {}
        if key == "Enter":
            more = {"text": "\r", "windowsVirtualKeyCode": 13, "code": "Enter"}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(shot["data"]))
