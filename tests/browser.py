"""A real headless Chromium, spoken to over its own protocol: open a page, click, look, take a
picture."""

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
WHY_NOT = "no Chromium here; apt-get install chromium"


class Browser:
    """One tab. `errors` are the console's errors, uncaught exceptions and refused loads so far;
    `requests` every address that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-background-networking", "--disable-dev-shm-usage", "--mute-audio",
                   "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={folder}",
                   "about:blank"]  # fmt: skip
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self._loop = asyncio.new_event_loop()
        self._last = 0
        try:
            self._loop.run_until_complete(self._connect(folder / "DevToolsActivePort"))
        except BaseException:
            self._end()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._loop.run_until_complete(self._session.close())
        self._end()

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.close()

    async def _connect(self, file: Path) -> None:
        self._session = aiohttp.ClientSession()
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n")):
            assert time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = file.read_text().split()[0]
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            tabs = await answer.json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._socket = await self._session.ws_connect(address, max_msg_size=0)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), 60))

    async def _call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._last += 1
        number = self._last
        await self._socket.send_str(
            json.dumps({"id": number, "method": method, "params": dict(params)})
        )
        while True:
            told = json.loads(await self._socket.receive_str())
            if told.get("id") == number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            self._hear(told.get("method"), told.get("params", {}))

    def _hear(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, address: str, ready: str = "document.readyState === 'complete'") -> None:
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def evaluate(self, script: str) -> Any:
        """What an expression comes to in the page."""
        told = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never came true: {script}"
            time.sleep(0.05)

    def view(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the theme that the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Of the whole page, or of what is in the window."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as tab,
    ):
        yield tab
