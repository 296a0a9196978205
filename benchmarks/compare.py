#!/usr/bin/env python3
"""Compares the speed of `semitone bench` with PyTorch's, IPEX's and Paddle's on the same workloads: docs/benchmarking.md.

    compare.py [WORKLOAD ...] [flags] [-- flags of semitone bench for sizes, for all contenders: --batch-size 4 …]
    compare.py WORKLOAD --sweep batch-size=1,8,32 length=128,512 [flags] [-- …]
    compare.py WORKLOAD --contenders 'semitone O2,semitone O2 without gelu,semitone O2 without all'

Starts each contender as a process that checks itself and warms up, then asks one after the other for a few steps, round after round,
each round beginning with another one. Meanwhile the others wait for their standard input and compute nothing. Prints a table that begins
with the ratios to the best peer, and writes WORKLOAD.json, WORKLOAD.svg and each contender's output (*.log) to a folder. With --sweep it
does that for every combination of the sizes, and prints one line for each.
"""
import argparse
import datetime
import html
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
WORKLOADS = ["mnist", "resnet50", "encoder", "decoder"]
# Steps of each contender in a round: about a second, or one step.
STEPS = {"mnist": 50, "resnet50": 1, "encoder": 1, "decoder": 1}
# How OpenMP's threads wait for work: environment, and seconds before a turn, in which the threads of the turn before stop
# spinning (libgomp's take milliseconds, Intel's 0.2 s). Spinning threads would take the cores of the process that computes.
WAIT = {"default": ({}, 0.3), "passive": ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}, 0)}
OURS = {f"semitone {level}": ["--opt-level", level] for level in ("O0", "O1", "O2", "O3")}
OURS |= {f"{name} {dtype}": [*flags, "--dtype", dtype] for name, flags in list(OURS.items())[1:] for dtype in ("fp16", "bf16")}
# Another build of the program, such as that of an earlier commit: what did a change cost?
BASELINE = {f"baseline {level}": ["--opt-level", level] for level in ("O0", "O1", "O2", "O3")}
TORCH = {f"pytorch {mode}": ["--mode", mode]
         for mode in ("fp32", "bf16", "pure-bf16", "compile", "max-autotune", "tf32", "fp16", "compile-fp16", "apex")}
IPEX = {"ipex bf16": ["--mode", "ipex"]}
PADDLE = {"paddle fp32": ["--mode", "fp32"]}
CPU_ONLY = {**IPEX, **PADDLE}
DEFAULT_CONTENDERS = ["semitone O0", "semitone O1", "semitone O2", "pytorch fp32", "pytorch bf16", "pytorch pure-bf16", "pytorch compile",
                      "pytorch max-autotune", *IPEX, *PADDLE]


WITHOUT = " without "  # "semitone O2 without gelu+layer_norm": with Semitone's kernels for these turned off


class Failed(Exception):
    pass


class Contender:
    """A process that runs steps on request."""

    def __init__(self, name, command, environment, log, report):
        self.name, self.report_file = name, report
        self.log = open(log, "w+")
        self.seconds = []  # of a step, one for each round
        self.process = subprocess.Popen([*map(str, command), "--json", str(report)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment, text=True)

    def wait_until_ready(self):
        self.expect("ready")

    def expect(self, what=None):
        line = self.process.stdout.readline()
        if not line or (what and line.strip() != what):
            self.process.kill()
            self.process.wait()
            self.log.seek(0)
            said = self.log.read().strip().splitlines()
            raise Failed(f"{self.name}: {said[-1] if said else 'no word why'} (all of it in {self.log.name})")
        return line

    def step(self, count):
        try:
            print(f"step {count}", file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # expect() tells why
        self.seconds.append(json.loads(self.expect())["seconds"] / count)

    def finish(self):
        """Ends its standard input, waits for its end, and returns its report."""
        self.process.stdin.close()
        if self.process.wait() != 0:
            raise Failed(f"{self.name}: exit code {self.process.returncode} (see {self.log.name})")
        return json.loads(self.report_file.read_text())

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


def is_known(name, options):
    if WITHOUT in name:
        return name.split(WITHOUT)[0] in set(OURS) - {"semitone O0"}
    return name in {**OURS, **TORCH, **CPU_ONLY, **(BASELINE if options.baseline else {})}


def is_semitone(name):
    """Whether it is Semitone. Those that are not in OURS, such as another build, are compared with OURS, but are no peers."""
    return name in OURS or name in BASELINE or WITHOUT in name


def program_of(name, options):
    level, _, kernels = name.partition(WITHOUT)
    if level in OURS:
        return [options.program, "bench"], [*OURS[level], *(["--without-kernels", kernels.replace("+", ",")] if kernels else [])]
    if name in BASELINE:
        return [options.baseline, "bench"], BASELINE[name]
    if name in TORCH:
        return [options.python, HERE / "peers/torch_workloads.py"], TORCH[name]
    if name in IPEX:
        return [options.ipex_python, HERE / "peers/torch_workloads.py"], IPEX[name]
    return [options.paddle_python, HERE / "peers/paddle_workloads.py"], PADDLE[name]


def environment(options):
    inherited = {name: value for name, value in os.environ.items() if name not in WAIT["passive"][0]}
    return {**inherited, "OMP_NUM_THREADS": str(options.threads), **WAIT[options.wait][0]}


def start(workload, options, sizes, stem, folder, reports):
    """The contenders that reach "ready"; the others are reported."""
    contenders, failures = [], {}
    for name in options.contenders:
        program, flags = program_of(name, options)
        if is_semitone(name):
            flags = [*flags, *options.ours.split(), "--steps-from-stdin"]
        if options.device != "cpu":
            flags = [*flags, "--device", options.device]
        command = [*program, workload, *flags, "--threads", options.threads, "--seed", options.seed, *sizes]
        label = name.replace(" ", "-")
        print(f"[{workload}] {name}: checks itself and warms up", file=sys.stderr)
        contender = None
        try:
            contender = Contender(name, command, environment(options), folder / f"{stem}-{label}.log", reports / f"{label}.json")
            contender.wait_until_ready()
            contenders.append(contender)
        except (Failed, OSError) as failure:
            failures[name] = str(failure)
            print(f"[{workload}] left out: {failure}", file=sys.stderr)
            if contender:
                contender.kill()
    return contenders, failures


def take_turns(workload, contenders, rounds, steps, pause):
    for turn in range(rounds):
        for place in range(len(contenders)):
            time.sleep(pause)
            contenders[(turn + place) % len(contenders)].step(steps)
        print(f"[{workload}] round {turn + 1} of {rounds}", file=sys.stderr)


def ratios(mine, other):
    """The speed-up of this contender, round by round."""
    pairs = [theirs / ours for ours, theirs in zip(mine, other)]
    return {"min": min(pairs), "median": statistics.median(pairs), "max": max(pairs)}


def best_peer(contenders):
    """The name of the peer with the least median; None where there is none. Another build of Semitone is no peer."""
    peers = [name for name in contenders if not is_semitone(name)]
    return min(peers, key=lambda name: contenders[name]["median"], default=None)


def machine():
    def field(path, key):
        lines = pathlib.Path(path).read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "unknown")

    return {"cpu": field("/proc/cpuinfo", "model name"), "cores": len(os.sched_getaffinity(0)),
            "memory": field("/proc/meminfo", "MemTotal"), "kernel": platform.release(), "load_before": os.getloadavg()[0]}


def items_per_step(reports):
    return next((report["items_per_step"] for report in reports.values() if "items_per_step" in report), None)


def ratio_text(cell):
    return f"{cell['min']:.2f} ({cell['median']:.2f})" if cell else ""


def print_table(result):
    contenders, best = result["contenders"], result["best_peer"]
    others = [name for name in contenders if name not in OURS and name != best]
    items = result["items_per_step"]
    print(f"\n{result['workload']}: {result['rounds']} rounds of {result['steps_per_round']} steps, {result['threads']} threads; "
          "ratios to others: least (median) of the rounds, above 1 where Semitone is faster")
    if best:
        print(f"the best peer: {best}, with the least median of {sum(not is_semitone(name) for name in contenders)}")
    head = f"{'vs the best peer':>18}" if best else ""
    wide = max(21, *(len(name) + 1 for name in contenders))
    print(f"{'':<{wide}}{head}{'min ms':>10}{'median ms':>11}{'items/s':>10}" + "".join(f"{'vs ' + name:>{max(25, len(name) + 5)}}" for name in others))
    for name, row in contenders.items():
        rate = f"{items / row['median']:.1f}" if items else "-"
        cells = result["ratios"].get(name, {})
        first = ("best peer" if name == best else ratio_text(cells.get(best))).rjust(18) if best else ""
        print(f"{name:<{wide}}{first}{1e3 * row['min']:>10.2f}{1e3 * row['median']:>11.2f}{rate:>10}"
              + "".join(ratio_text(cells.get(other)).rjust(max(25, len(other) + 5)) for other in others).rstrip())
    for failure in result["left_out"].values():
        print(f"left out: {failure}")


def sweep_line(result, sizes):
    """One line for a set of sizes: the best peer, and the ratios to it of all of ours."""
    best, contenders = result["best_peer"], result["contenders"]
    peer = f"{best} {1e3 * contenders[best]['median']:.2f} ms" if best else "no peer"
    ours = [f"{name} {1e3 * contenders[name]['median']:.2f} ms" + (f" {ratio_text(cells[best])}" if best else "")
            for name, cells in result["ratios"].items()]
    left_out = f"; left out: {', '.join(result['left_out'])}" if result["left_out"] else ""
    return f"{sizes}: best peer {peer}; {', '.join(ours)}{left_out}"


def bar_chart(result):
    """Median milliseconds per step, as SVG."""
    rows = list(result["contenders"].items())
    height, left, right, top = 28, 160, 160, 46
    width = 480
    largest = max(row["median"] for _, row in rows)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + right}" height="{top + height * len(rows) + 14}" '
             'font-family="sans-serif" font-size="13">',
             '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="10" y="26" font-size="15">{html.escape(result["workload"])}: ms a step, median of '
             f'{result["rounds"]} rounds, {result["threads"]} threads (less is better)</text>']
    for place, (name, row) in enumerate(rows):
        y = top + height * place
        length = max(1.0, width * row["median"] / largest)
        is_best = name == result["best_peer"]
        colour = "#2a6fb0" if name in OURS else "#c8721c" if is_best else "#9aa5b1"
        parts += [f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{html.escape(name)}</text>',
                  f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height - 8}" fill="{colour}"/>',
                  f'<text x="{left + length + 6:.1f}" y="{y + 16}">{1e3 * row["median"]:.1f}{", the best peer" if is_best else ""}</text>']
    return "\n".join([*parts, "</svg>\n"])


def compare(workload, options, swept=()):
    """Measures one set of sizes, writes the files, and returns the result. @param swept  pairs of a flag's name and its value"""
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    steps = options.steps or STEPS[workload]
    sizes = [*options.sizes, *(word for name, value in swept for word in (f"--{name}", value))]
    stem = "_".join([workload, *(f"{name}-{value}" for name, value in swept)])
    begun = datetime.datetime.now(datetime.timezone.utc)
    host = machine()
    with tempfile.TemporaryDirectory() as temporary:
        contenders, failures = start(workload, options, sizes, stem, folder, pathlib.Path(temporary))
        try:
            take_turns(workload, contenders, options.rounds, steps, WAIT[options.wait][1])
            reports = {contender.name: contender.finish() for contender in contenders}
        finally:
            for contender in contenders:
                contender.kill()
    if not any(contender.name in OURS for contender in contenders):
        raise Failed(f"{workload}: nothing of Semitone's could run")
    seconds = {contender.name: contender.seconds for contender in contenders}
    rows = {name: {"min": min(taken), "median": statistics.median(taken), "seconds": taken, "report": reports[name]}
            for name, taken in seconds.items()}
    pairs = {mine: {other: ratios(seconds[mine], seconds[other]) for other in seconds if other not in OURS}
             for mine in seconds if mine in OURS}
    best = best_peer(rows)
    result = {"workload": workload, "best_peer": best, "ratios_to_best_peer": {mine: cells[best] for mine, cells in pairs.items()} if best else {},
              "date": begun.isoformat(timespec="seconds"), "machine": host, "threads": options.threads,
              "device": options.device, "wait_policy": options.wait, "rounds": options.rounds, "steps_per_round": steps, "sizes": sizes,
              "items_per_step": items_per_step(reports), "contenders": rows, "ratios": pairs, "left_out": failures}
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{stem}.svg").write_text(bar_chart(result))
    return result


def compare_once(workload, options):
    print_table(compare(workload, options))
    print(f"written: {pathlib.Path(options.out) / workload}.json, .svg")


def compare_sizes(workload, options):
    """All combinations of the sizes. One that fails does not end the others; returns whether none failed."""
    succeeded = True
    print(f"\n{workload}: {options.rounds} rounds, {options.threads} threads; median of a step, and the best peer's time divided by "
          "Semitone's: least (median) of the rounds", flush=True)
    for swept in itertools.product(*([(name, value) for value in values] for name, values in options.sweep)):
        sizes = " ".join(f"{name}={value}" for name, value in swept)
        try:
            print(sweep_line(compare(workload, options, swept), sizes), flush=True)
        except Failed as failure:
            succeeded = False
            print(f"{sizes}: failed: {failure}", flush=True)
    return succeeded


def sizes_to_sweep(text):
    """("batch-size", ["1", "8"]) of "batch-size=1,8"."""
    name, _, values = text.partition("=")
    numbers = values.split(",")
    if not name or not all(number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"expected a flag of sizes and its values, as batch-size=1,8,32, got '{text}'")
    return name.removeprefix("--"), numbers


def parse():
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--contenders",
                        help=f"of {', '.join([*OURS, *BASELINE, *TORCH, *CPU_ONLY])}, with commas between them; 'semitone O2 without "
                             "gelu+layer_norm' turns off kernels of Semitone's, 'without all' all of them; default: "
                             f"{', '.join(DEFAULT_CONTENDERS)}; with --baseline: O0 to O3 of both programs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help=f"of each contender in each round; default: {STEPS}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="of all contenders, as semitone bench has it; default: cpu. IPEX and Paddle have the CPU only")
    parser.add_argument("--wait", choices=list(WAIT), default="default",
                        help="how OpenMP's threads wait for work: as OpenMP decides, with a pause of 0.3 s before each turn (default), or asleep at "
                             "once, without a pause (passive)")
    parser.add_argument("--sweep", nargs="+", type=sizes_to_sweep, metavar="FLAG=N,N",
                        help="flags for sizes with several values, for all contenders: batch-size=1,8,32 length=128,512; each combination is "
                             "compared, and gets one line")
    parser.add_argument("--ours", default="", help="additional flags for semitone bench only, as one argument: '--optimizer torch'")
    parser.add_argument("--program", default=ROOT / "build/release/apps/semitone")
    parser.add_argument("--baseline", metavar="PROGRAM", help="another build of the program, to compare with instead of the peers")
    parser.add_argument("--python", default=os.environ.get("SEMITONE_PEER_PYTHON", ROOT / ".deps/peers/bin/python"),
                        help="a Python with torch; default: SEMITONE_PEER_PYTHON, or the one of make bench-peers")
    parser.add_argument("--ipex-python", default=ROOT / ".deps/peers-ipex/bin/python",
                        help="a Python with intel_extension_for_pytorch and the torch that it needs; default: that of make bench-peers")
    parser.add_argument("--paddle-python", help="a Python with paddle; default: as --python")
    parser.add_argument("--out", default=ROOT / "build/bench")
    options = parser.parse_args(arguments[:cut])
    options.sizes = arguments[cut + 1:]
    options.paddle_python = options.paddle_python or options.python
    options.workloads = options.workloads or WORKLOADS
    default = [*OURS, *BASELINE] if options.baseline else DEFAULT_CONTENDERS
    if options.device != "cpu":
        default = [name for name in default if name not in CPU_ONLY]
    options.contenders = [name.strip() for name in options.contenders.split(",")] if options.contenders else default
    unknown = [name for name in options.contenders if not is_known(name, options)]
    unknown += [name for name in options.workloads if name not in WORKLOADS]
    if options.device != "cpu":
        unknown += [f"{name} on {options.device}" for name in options.contenders if name in CPU_ONLY]
    if unknown or options.rounds < 1 or options.threads < 1:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "--rounds and --threads have to be at least 1")
    return options


def main():
    options = parse()
    try:
        if options.sweep:
            succeeded = [compare_sizes(workload, options) for workload in options.workloads]
            sys.exit(0 if all(succeeded) else 1)
        for workload in options.workloads:
            compare_once(workload, options)
    except Failed as failure:
        sys.exit(f"[compare] {failure}")


if __name__ == "__main__":
    main()
