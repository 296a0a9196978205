#!/usr/bin/env python3
"""benchmarks/compare.py with contenders that only pretend, and with the program.

    compare_test.py PROGRAM
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

COMPARE = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/compare.py"
PROGRAM = sys.argv.pop(1)

# Stands for the program, and for a Python with a peer. Says that a step takes a second less in each round; notes when it is asked.
PRETENDER = """#!/usr/bin/env python3
import json, os, sys
words = sys.argv
mode = next(words[place + 1] for place, word in enumerate(words) if word in ("--mode", "--opt-level"))
report = words[words.index("--json") + 1]
note = open(os.environ["NOTES"], "a")
if "--device" in words:
    print(mode, 'on', words[words.index('--device') + 1], file=note, flush=True)
if "--without-kernels" in words:
    print("without", words[words.index("--without-kernels") + 1], file=note, flush=True)
if "NOTE_WAIT" in os.environ:
    print(mode, "waits", os.environ.get("OMP_WAIT_POLICY"), file=note, flush=True)
if mode == os.environ.get("BROKEN"):
    sys.exit("no good")
print("ready", flush=True)
seconds = {"O0": 60, "O1": 10, "fp32": 40, "bf16": 20, "ipex": 15}[mode]
if "--batch-size" in words:
    seconds *= int(words[words.index("--batch-size") + 1])
    if mode == "fp32":
        seconds = 30
for line in sys.stdin:
    note.write(f"{mode} {line}")
    note.flush()
    count = int(line.split()[1])
    if mode == os.environ.get("DIES"):
        sys.exit("killed")
    print(json.dumps({"steps": count, "seconds": seconds * count}), flush=True)
    seconds -= 1
json.dump({"items_per_step": 100} if mode.startswith("O") else {}, open(report, "w"))
"""


class CompareTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.pretender = self.folder / "pretender"
        self.pretender.write_text(PRETENDER)
        self.pretender.chmod(0o755)
        self.notes = self.folder / "notes"

    def run_compare(self, *words, **variables):
        command = [sys.executable, COMPARE, "--out", self.folder / "out", *words]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300,
                              env={**os.environ, "NOTES": str(self.notes), **variables})

    def pretend(self, *words, contenders="semitone O1,pytorch fp32,pytorch bf16", **variables):
        return self.run_compare("mnist", "--wait", "passive", "--program", self.pretender, "--python", self.pretender,
                                "--contenders", contenders, *words, **variables)

    def result(self):
        return json.loads((self.folder / "out/mnist.json").read_text())

    def test_contenders_take_turns_and_each_begins_a_round(self):
        done = self.pretend("--rounds", 3, "--steps", 5)
        self.assertEqual(done.returncode, 0, done.stderr)
        order = [line.split()[0] for line in self.notes.read_text().splitlines()]
        self.assertEqual(order, ["O1", "fp32", "bf16", "fp32", "bf16", "O1", "bf16", "O1", "fp32"])
        self.assertIn("O1 step 5", self.notes.read_text())

    def test_openmp_waits_as_it_decides_or_asleep(self):
        for policy, seen in [("default", "None"), ("passive", "PASSIVE")]:
            self.notes.unlink(missing_ok=True)
            done = self.pretend("--rounds", 1, "--wait", policy, contenders="semitone O1", NOTE_WAIT="1", OMP_WAIT_POLICY="ACTIVE")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"O1 waits {seen}\n", self.notes.read_text())

    def test_times_and_ratios_are_of_a_step_and_of_pairs(self):
        done = self.pretend("--rounds", 3, "--steps", 5)
        result = self.result()
        self.assertEqual(result["contenders"]["semitone O1"]["seconds"], [10, 9, 8])
        self.assertEqual(result["contenders"]["pytorch bf16"]["min"], 18)
        self.assertEqual(result["contenders"]["pytorch bf16"]["median"], 19)
        ratio = result["ratios"]["semitone O1"]["pytorch bf16"]
        self.assertEqual([ratio["min"], ratio["median"], ratio["max"]], [20 / 10, 19 / 9, 18 / 8])
        self.assertNotIn("pytorch bf16", result["ratios"])
        self.assertEqual(result["items_per_step"], 100)
        self.assertIn("2.00 (2.11)", done.stdout)
        self.assertIn("11.1", done.stdout)  # items/s
        chart = xml.dom.minidom.parse(str(self.folder / "out/mnist.svg"))
        self.assertEqual(len(chart.getElementsByTagName("rect")), 1 + 3)

    def rows(self, text):
        """The lines of the table by their first two words, the contender's name."""
        return {" ".join(line.split()[:2]): line.split()[2:] for line in text.splitlines() if line}

    def test_the_table_begins_with_the_best_peer(self):
        done = self.pretend("--rounds", 3, contenders="semitone O0,semitone O1,pytorch fp32,pytorch bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        result = self.result()
        self.assertEqual(result["best_peer"], "pytorch bf16")
        self.assertEqual(list(result)[:3], ["workload", "best_peer", "ratios_to_best_peer"])
        self.assertEqual(result["ratios_to_best_peer"], {mine: row["pytorch bf16"] for mine, row in result["ratios"].items()})
        self.assertIn("the best peer: pytorch bf16, with the least median of 2\n", done.stdout)
        rows = self.rows(done.stdout)
        # O1: 10, 9, 8; O0: 60, 59, 58; bf16: 20, 19, 18; fp32: 40, 39, 38 seconds.
        self.assertEqual(rows["semitone O1"], ["2.00", "(2.11)", "8000.00", "9000.00", "11.1", "4.00", "(4.33)"])
        self.assertEqual(rows["semitone O0"], ["0.31", "(0.32)", "58000.00", "59000.00", "1.7", "0.66", "(0.66)"])
        self.assertEqual(rows["pytorch bf16"], ["best", "peer", "18000.00", "19000.00", "5.3"])
        self.assertEqual(rows["pytorch fp32"], ["38000.00", "39000.00", "2.6"])
        head = next(line for line in done.stdout.splitlines() if "vs the best peer" in line)
        self.assertLess(head.index("vs the best peer"), head.index("min ms"))
        self.assertIn("vs pytorch fp32", head)
        self.assertNotIn("vs pytorch bf16", head)
        chart = xml.dom.minidom.parse(str(self.folder / "out/mnist.svg"))
        marked = [text.firstChild.data for text in chart.getElementsByTagName("text") if "the best peer" in text.firstChild.data]
        self.assertEqual(marked, ["19000.0, the best peer"])
        colours = [bar.getAttribute("fill") for bar in chart.getElementsByTagName("rect")][1:]
        self.assertEqual([colours.count(colour) for colour in colours], [2, 2, 1, 1])

    def test_ipex_has_its_own_python(self):
        done = self.pretend("--rounds", 1, "--ipex-python", self.pretender, "--python", "/no/such",
                            contenders="semitone O1,pytorch bf16,ipex bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["best_peer"], "ipex bf16")
        self.assertEqual(list(self.result()["left_out"]), ["pytorch bf16"])
        done = self.pretend("--rounds", 1, "--ipex-python", "/no/such", contenders="semitone O1,pytorch bf16,ipex bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["best_peer"], "pytorch bf16")
        self.assertIn("No such file", self.result()["left_out"]["ipex bf16"])
        refused = self.pretend("--device", "cuda", contenders="semitone O1,ipex bf16")
        self.assertIn("unknown: ipex bf16 on cuda", refused.stderr)

    def test_without_peers_there_is_no_best_one(self):
        done = self.pretend("--rounds", 1, contenders="semitone O0,semitone O1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIsNone(self.result()["best_peer"])
        self.assertEqual(self.result()["ratios_to_best_peer"], {})
        self.assertNotIn("best peer", done.stdout)
        self.assertEqual(self.rows(done.stdout)["semitone O1"], ["10000.00", "10000.00", "10.0"])

    def test_a_sweep_prints_a_line_for_each_combination(self):
        # fp32 takes 30 seconds at every size, bf16 20 for each image: the best peer changes with the size.
        done = self.pretend("--rounds", 1, "--sweep", "batch-size=1,4", "length=8,16", contenders="semitone O1,pytorch fp32,pytorch bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line for line in done.stdout.splitlines() if "batch-size" in line]
        expected = {1: "best peer pytorch bf16 20000.00 ms; semitone O1 10000.00 ms 2.00 (2.00)",
                    4: "best peer pytorch fp32 30000.00 ms; semitone O1 40000.00 ms 0.75 (0.75)"}
        self.assertEqual(lines, [f"batch-size={batch} length={length}: {expected[batch]}" for batch in (1, 4) for length in (8, 16)])
        result = json.loads((self.folder / "out/mnist_batch-size-4_length-16.json").read_text())
        self.assertEqual(result["sizes"], ["--batch-size", "4", "--length", "16"])
        self.assertTrue((self.folder / "out/mnist_batch-size-1_length-8.svg").exists())
        self.assertTrue((self.folder / "out/mnist_batch-size-1_length-8-semitone-O1.log").exists())

    def test_a_size_that_fails_does_not_end_the_sweep(self):
        done = self.pretend("--rounds", 1, "--sweep", "batch-size=1,2", BROKEN="O1")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout.count(": failed: mnist: nothing of Semitone's could run"), 2)
        done = self.pretend("--rounds", 1, "--sweep", "batch-size=1", BROKEN="bf16")
        self.assertEqual(done.returncode, 0)
        self.assertIn("; left out: pytorch bf16\n", done.stdout)

    def test_another_build_is_no_peer(self):
        done = self.pretend("--rounds", 1, "--baseline", self.pretender, contenders="semitone O1,baseline O1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["ratios"]["semitone O1"]["baseline O1"]["median"], 1)
        self.assertNotIn("baseline O1", self.result()["ratios"])
        self.assertIsNone(self.result()["best_peer"])
        self.assertIn("vs baseline O1", done.stdout)
        without = self.pretend("--rounds", 1, contenders="semitone O1,baseline O1")
        self.assertEqual(without.returncode, 2)
        self.assertIn("unknown: baseline O1", without.stderr)

    def test_who_cannot_start_is_left_out_with_the_reason(self):
        done = self.pretend("--rounds", 1, BROKEN="bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(self.result()["contenders"]), ["semitone O1", "pytorch fp32"])
        self.assertIn("no good", self.result()["left_out"]["pytorch bf16"])
        self.assertIn("left out: pytorch bf16: no good", done.stdout)
        done = self.pretend("--rounds", 1, "--paddle-python", "/no/such", contenders="semitone O1,paddle fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("No such file", self.result()["left_out"]["paddle fp32"])

    def test_tells_the_share_of_kernels(self):
        done = self.pretend("--rounds", 1, contenders="semitone O1,semitone O1 without gelu+dropout,pytorch fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("without gelu,dropout\n", self.notes.read_text())
        result = self.result()
        self.assertEqual(result["best_peer"], "pytorch fp32")
        self.assertEqual(result["ratios"]["semitone O1"]["semitone O1 without gelu+dropout"]["median"], 1)
        self.assertNotIn("semitone O1 without gelu+dropout", result["ratios"])
        unknown = self.pretend("--rounds", 1, contenders="pytorch bf16 without gelu")
        self.assertEqual(unknown.returncode, 2)
        self.assertIn("unknown: pytorch bf16 without gelu", unknown.stderr)

    def test_without_ours_or_with_one_that_dies_it_fails(self):
        done = self.pretend("--rounds", 1, BROKEN="O1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("[compare] mnist: nothing of Semitone's could run", done.stderr)
        done = self.pretend("--rounds", 1, DIES="fp32")
        self.assertEqual(done.returncode, 1)
        self.assertIn("[compare] pytorch fp32: killed", done.stderr)

    def test_all_run_on_the_device(self):
        done = self.pretend("--rounds", 1, "--device", "cuda:1", contenders="semitone O1 fp16,pytorch fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["device"], "cuda:1")
        self.assertEqual(sorted(line for line in self.notes.read_text().splitlines() if " on " in line), ["O1 on cuda:1", "fp32 on cuda:1"])
        refused = self.pretend("--rounds", 1, "--device", "cuda", contenders="semitone O1,paddle fp32")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("unknown: paddle fp32 on cuda", refused.stderr)

    def test_wrong_usage_is_code_2(self):
        for words in (["bert"], ["mnist", "--contenders", "jax"], ["mnist", "--rounds", "0"], ["mnist", "--sweep", "batch-size=1,x"],
                      ["mnist", "--sweep", "8"]):
            self.assertEqual(self.run_compare(*words).returncode, 2)

    def test_the_program_speaks_the_protocol(self):
        done = self.run_compare("mnist", "--program", PROGRAM, "--contenders", "semitone O0,semitone O1", "--rounds", 2, "--steps", 2,
                                "--threads", 1, "--", "--batch-size", 50)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = self.result()
        self.assertEqual(result["items_per_step"], 50)
        for name, level in {"semitone O0": "O0", "semitone O1": "O1"}.items():
            report = result["contenders"][name]["report"]
            self.assertEqual(report["opt_level"], level)
            self.assertEqual(len(report["losses"]), 4)
            self.assertEqual(report["step_seconds"], result["contenders"][name]["seconds"])


if __name__ == "__main__":
    unittest.main()
