"""A headless Chromium, driven by the DevTools protocol over a pipe."""
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile

SECONDS = 120  # until a browser that does not answer counts as lost
# Waits until every chart that has a width is drawn.
DRAWN = """new Promise((done) => {
  const look = () => document.readyState === "complete" &&
    [...document.querySelectorAll(".chart")].every((chart) => chart.clientWidth === 0 || chart.firstChild) ? done(true) : requestAnimationFrame(look);
  look();
})"""


def find_chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page at a time. Messages and exceptions of a page are collected in `problems`."""

    def __init__(self, program):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Chromium reads requests from descriptor 3 and writes answers to 4: all ends are first moved out of the way.
        request_read, request_write, answer_read, answer_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in (*os.pipe(), *os.pipe()))

        def connect():
            os.dup2(request_read, 3)
            os.dup2(answer_write, 4)

        words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", "about:blank"]
        with open(pathlib.Path(self.folder.name) / "log", "wb") as log:
            self.process = subprocess.Popen(words, preexec_fn=connect, close_fds=False, stdout=log, stderr=log)
        os.close(request_read)
        os.close(answer_write)
        self.requests, self.answers = request_write, answer_read
        self.unread, self.number, self.session, self.problems = b"", 0, None, []
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.requests)
        os.close(self.answers)
        self.folder.cleanup()

    def message(self):
        while b"\0" not in self.unread:
            if not select.select([self.answers], [], [], SECONDS)[0]:
                raise TimeoutError(f"the browser is silent for {SECONDS} s")
            received = os.read(self.answers, 1 << 16)
            if not received:
                raise EOFError((pathlib.Path(self.folder.name) / "log").read_text(errors="replace"))
            self.unread += received
        first, self.unread = self.unread.split(b"\0", 1)
        return json.loads(first)

    def call(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters, **({"sessionId": self.session} if self.session else {})}
        unsent = json.dumps(request).encode() + b"\0"
        while unsent:
            unsent = unsent[os.write(self.requests, unsent):]
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)

    def note(self, event):
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(str([argument.get("value") for argument in parameters["args"]]))

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, page, width=1280, height=800, scheme="light", media=""):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.problems.clear()
        self.call("Page.navigate", url=pathlib.Path(page).resolve().as_uri())
        self.evaluate(DRAWN)
