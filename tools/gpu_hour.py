#!/usr/bin/env python3
"""An hour with a GPU: builds, tests and measures in steps, and writes a report that becomes the tables of docs/gpu.md.

    tools/gpu_hour.py [STEP ...] [flags]                     default: all steps, in the order of --list
    tools/gpu_hour.py --page docs/gpu.md [--report FOLDER]   puts the report's tables between the page's markers

Each step ends within --limit seconds (less than ten minutes), and writes STEP.json and STEP.log to the report folder. A step that has
succeeded is not repeated unless --again is given; a build compiles what has changed. One that failed or ran out of time does what is
missing when it is run again. A step that fails is recorded with the end of its log, and does not stop the others. A step that needs a
GPU, and has none, says so: "skipped: no GPU".

--device cpu --sizes small --no-build is the rehearsal, which shows that every step works. Its figures mean nothing.
Exit code: 0 if all steps succeeded (in a rehearsal: or were skipped), 1 if not, 2 for wrong usage.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import gpu_hour_steps
import gpu_hour_tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOG_LINES = 25  # of a failed step's log in its record
# The build system repeats no work, and a report may go on on another machine.
BUILD_STEPS = ("build", "build_all")


class StepFailed(Exception):
    def __init__(self, reason, result=None):
        super().__init__(reason)
        self.result = result


class OutOfTime(Exception):
    pass


class Skipped(Exception):
    pass


class Run:
    """What a step has: the options, its log, its result, and the time that is left."""

    def __init__(self, options, name, parts):
        self.options, self.name, self.parts = options, name, parts
        self.failures = []
        self.small = options.sizes == "small"
        self.build = options.build
        self.folder = options.report / name
        self.log = open(options.report / f"{name}.log", "a")
        self.end = time.monotonic() + options.limit

    def skip(self, reason):
        raise Skipped(reason)

    def fail(self, reason, result=None):
        """result: what was found all the same."""
        raise StepFailed(reason, result)

    def say(self, text):
        print(f"[{self.name}] {text}", flush=True)
        print(f"== {text}", file=self.log, flush=True)

    def attempt(self, *words, variables=None, most_seconds=None):
        """Runs a program, with its output in the log. Returns its exit code and its output."""
        words = [str(word) for word in words]
        left = self.end - time.monotonic()
        seconds = max(min(left, most_seconds or left), 0.1)
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                       errors="replace", cwd=ROOT, env={**os.environ, **(variables or {})}, start_new_session=True)
        except OSError as error:
            self.fail(f"{words[0]} could not be started: {error.strerror}")
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children: it is its session's first process
            output, _ = process.communicate()
            print("$ " + " ".join(words) + "\n" + output, file=self.log, flush=True)
            if seconds < left:
                self.fail(f"{pathlib.Path(words[0]).name} ran longer than {seconds:.0f} s")
            raise OutOfTime from None
        print("$ " + " ".join(words) + "\n" + output, file=self.log, flush=True)
        return process.returncode, output

    def command(self, *words, **more):
        """As attempt, and fails for another exit code than 0. Returns the output."""
        code, output = self.attempt(*words, **more)
        if code != 0:
            self.fail(f"{' '.join(str(word) for word in [pathlib.Path(words[0]).name, *words[1:4]])}: exit code {code}")
        return output

    def part(self, name, work):
        """Does a part of the step, unless it is in the record as done. A part that fails does not stop the next."""
        if self.parts.get(name, {}).get("state") == "done":
            self.say(f"{name}: done already")
            return
        if self.end - time.monotonic() < 1:
            raise OutOfTime
        self.say(name)
        begun = time.monotonic()
        try:
            self.parts[name] = {"state": "done", "result": work()}
        except Skipped as skipped:
            self.parts[name] = {"state": "skipped", "reason": str(skipped)}
            self.say(f"{name}: SKIPPED: {skipped}")
        except StepFailed as failure:
            self.parts[name] = {"state": "failed", "reason": str(failure), "result": failure.result}
            self.failures.append(f"{name}: {failure}")
            self.say(f"{name}: FAILED: {failure}")
        self.parts[name]["seconds"] = round(time.monotonic() - begun, 1)

    def program(self, path):
        file = self.build / path
        if not file.exists():
            self.fail(f"expected the program {file}, got none: not built")
        return file


def has_gpu():
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")


def write_record(options, name, record):
    file = options.report / f"{name}.json"
    partial = file.with_suffix(".json.tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(file)


def read_record(options, name):
    file = options.report / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def source_version():
    manifest = ROOT / "MANIFEST.json"  # of a bundle
    if manifest.exists():
        return json.loads(manifest.read_text())["commit"]
    done = subprocess.run(["git", "describe", "--always", "--abbrev=40", "--dirty=-changed"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run_step(options, step):
    """Returns the record's state."""
    before = read_record(options, step.name)
    again = options.again or step.name in BUILD_STEPS
    if before.get("state") == "done" and not again:
        print(f"[{step.name}] done already on {before['begun']}; --again repeats it")
        return "done"
    parts = {} if again else before.get("parts", {})
    record = {"step": step.name, "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "device": options.device, "sizes": options.sizes, "commit": source_version()}
    run = Run(options, step.name, parts)
    begun = time.monotonic()
    try:
        if step.needs_gpu and options.device == "cpu":
            run.skip("no GPU (--device cpu)")
        if step.name not in BUILD_STEPS and options.device != "cpu" and not has_gpu():
            run.skip(f"no GPU: this machine has no /dev/nvidia0, and --device is {options.device}")
        step.work(run)
        record |= {"state": "failed", "reason": "; ".join(run.failures)} if run.failures else {"state": "done"}
    except Skipped as skipped:
        record |= {"state": "skipped", "reason": str(skipped)}
    except StepFailed as failure:
        record |= {"state": "failed", "reason": str(failure)}
    except OutOfTime:
        record |= {"state": "unfinished", "reason": f"not done in {options.limit} s; run it again, and it continues"}
    except Exception as error:  # the report of an hour must not end with a mistake in one step
        record |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    run.log.close()
    record |= {"seconds": round(time.monotonic() - begun, 1), "parts": parts}
    if record["state"] in ("failed", "unfinished"):
        record["log_end"] = (options.report / f"{step.name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    write_record(options, step.name, record)
    reason = f": {record['reason']}" if "reason" in record else ""
    print(f"[{step.name}] {record['state'].upper()}{reason} ({record['seconds']} s)", flush=True)
    return record["state"]


def check_settings(options, parser):
    """A report is of one device and one size."""
    file = options.report / "settings.json"
    settings = {"device": options.device, "sizes": options.sizes}
    if file.exists() and json.loads(file.read_text()) != settings:
        parser.error(f"{options.report} has a report with {json.loads(file.read_text())}: give another --report")
    options.report.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--report", type=pathlib.Path, default=ROOT / "build/gpu-hour", metavar="FOLDER")
    parser.add_argument("--page", type=pathlib.Path, metavar="FILE", help="put the report's tables between the page's markers; no steps")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/cuda", metavar="FOLDER",
                        help="configured already; default: build/cuda")
    parser.add_argument("--no-build", action="store_true", help="the step build only lists what is there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu; default: cuda")
    parser.add_argument("--sizes", choices=["full", "small"], default="full")
    parser.add_argument("--python", default=os.environ.get("SEMITONE_PEER_PYTHON", "python3"),
                        help="a Python with torch; default: SEMITONE_PEER_PYTHON, or python3")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "data/mnist", metavar="FOLDER", help="MNIST's four files")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="that compile and test at once; default: one for each core")
    parser.add_argument("--limit", type=int, default=570, metavar="SECONDS", help="for each step; default: 570")
    parser.add_argument("--again", action="store_true", help="repeat steps that succeeded, too")
    options = parser.parse_args()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        parser.error(f"expected --device cpu, cuda or cuda:N, got {options.device}")
    unknown = [name for name in options.steps if name not in gpu_hour_steps.NAMES]
    if unknown:
        parser.error(f"unknown steps: {', '.join(unknown)}; there are {', '.join(gpu_hour_steps.NAMES)}")
    options.report, options.build, options.data = options.report.resolve(), options.build.resolve(), options.data.resolve()
    if not options.list and not options.page:
        check_settings(options, parser)
    return options


def main():
    options = parse()
    if options.list:
        print(*(f"{step.name:<14}{step.help}" for step in gpu_hour_steps.STEPS), sep="\n")
        return 0
    if options.page:
        records = {step.name: read_record(options, step.name) for step in gpu_hour_steps.STEPS}
        try:
            gpu_hour_tables.write_page(options.page, records)
        except ValueError as error:
            sys.exit(f"[gpu_hour] {error}")
        return 0
    steps = [step for step in gpu_hour_steps.STEPS if not options.steps or step.name in options.steps]
    states = {step.name: run_step(options, step) for step in steps}
    print("\n".join(f"{name:<14} {state}" for name, state in states.items()))
    print(f"report: {options.report}")
    fine = {"done", "skipped"} if options.device == "cpu" else {"done"}
    return 0 if set(states.values()) <= fine else 1


if __name__ == "__main__":
    sys.exit(main())
