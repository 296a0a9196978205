#!/usr/bin/env python3
"""tools/gpu_hour.py: the rehearsal on the CPU with the program, and with programs that only pretend what a GPU's steps do.

    gpu_hour_test.py PROGRAM
"""
import contextlib
import io
import json
import os
import pathlib
import random
import re
import struct
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_hour  # noqa: E402
import gpu_hour_steps  # noqa: E402
import gpu_hour_tables  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()

# Notes that it was called, does what the file "behaviour" says, and writes what --json asks for.
PRETENDER = """#!/bin/sh
echo "$(basename "$0") $*" >> "{folder}/notes"
[ ! -e "{folder}/behaviour" ] || . "{folder}/behaviour"
while [ $# -gt 0 ]; do
  if [ "$1" = --json ]; then cp "{folder}/$(basename "$0").json" "$2"; fi
  shift
done
"""
KERNELS = {"rows": [{"kernel": "AdamW", "pass": "", "dtype": "float32", "shape": "2 x 3", "semitone": {"min_seconds": 1e-3}, "per_second": 4e12,
                     "share_of_baseline": 0.9, "ratio": 1.5}]}
CAPTURED = {"rows": [{"model": "convnet", "level": "O2", "dtype": "float16", "batch_size": 100, "captured": True, "by_operators_seconds": 2e-3,
                      "captured_seconds": 1e-3}]}
LISTED = "Kernels/Cuda.\\n  Equals/adam  # comment\\n  Equals/sgd  # comment\\n  Twice/adam  # comment\\n  Twice/sgd  # comment\\n"


def write_images(folder):
    """MNIST's four files with a few random images."""
    numbers = random.Random(0)
    for name, count in (("train", 60), ("t10k", 20)):
        labels = bytes(numbers.randrange(10) for _ in range(count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + numbers.randbytes(784 * count))


class HourTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.build, self.report = self.folder / "build", self.folder / "report"
        for name in ("apps", "benchmarks", "tests", "examples", "bin", "data"):
            (self.build / name).mkdir(parents=True)
        write_images(self.build / "data")
        (self.build / "CMakeCache.txt").write_text("CMAKE_BUILD_TYPE:STRING=Release\nCMAKE_CUDA_COMPILER:FILEPATH=/x/nvcc\n")
        (self.build / "CTestTestfile.cmake").write_text("add_test(core_test true)\n")
        for name, text in (("kernels_bench", KERNELS), ("captured_bench", CAPTURED)):
            self.pretender(self.build / "benchmarks" / name)
            (self.folder / f"{name}.json").write_text(json.dumps(text))
        self.pretender(self.build / "tests/cuda_test")
        self.pretender(self.build / "examples/apex_mnist_ddp")
        for name in ("nvidia-smi", "compute-sanitizer", "python-without-torch"):
            self.pretender(self.build / "bin" / name)
        (self.build / "apps/semitone").symlink_to(PROGRAM)
        self.behave('case "$0" in *python-without-torch) exit 1;; esac')

    def pretender(self, file):
        file.write_text(PRETENDER.format(folder=self.folder))
        file.chmod(0o755)

    def behave(self, text):
        (self.folder / "behaviour").write_text(text + "\n")

    def notes(self):
        file = self.folder / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def forget(self):
        (self.folder / "notes").unlink(missing_ok=True)

    def hour(self, *words, device="cpu", gpu=False):
        """The exit code and what was printed."""
        command = ["gpu_hour.py", *words, "--device", device, "--sizes", "small", "--no-build", "--build", self.build, "--report", self.report,
                   "--data", self.build / "data", "--python", self.build / "bin/python-without-torch", "--jobs", 2]
        printed = io.StringIO()
        path = f"{self.build / 'bin'}:{os.environ['PATH']}"
        with mock.patch.object(sys, "argv", list(map(str, command))), mock.patch.dict(os.environ, {"PATH": path}), \
                mock.patch.object(gpu_hour, "has_gpu", lambda: gpu), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = gpu_hour.main()
            except SystemExit as end:
                code = end.code
        return code, printed.getvalue()

    def record(self, step):
        return json.loads((self.report / f"{step}.json").read_text())

    def page(self):
        page = self.folder / "page.md"
        page.write_text(f"before\n\n{gpu_hour_tables.BEGIN}\nold\n{gpu_hour_tables.END}\n\nbehind\n")
        return page


class RehearsalTest(HourTest):
    def test_every_step_runs_on_a_cpu_or_says_why_not(self):
        code, printed = self.hour()
        self.assertEqual(code, 0, printed)
        records = {name: self.record(name) for name in gpu_hour_steps.NAMES}
        skipped = {name for name, record in records.items() if record["state"] == "skipped"}
        self.assertEqual(skipped, {"kernels", "nccl", "sanitizer", "build_all"})
        self.assertEqual(records["build_all"]["reason"], "--no-build")
        for name in skipped - {"build_all"}:
            self.assertIn("no GPU", records[name]["reason"])
            self.assertIn(f"[{name}] SKIPPED: no GPU", printed)
        self.assertEqual({name for name, record in records.items() if record["state"] == "done"}, set(records) - skipped)
        for name in records:
            self.assertTrue((self.report / f"{name}.log").exists(), name)
        self.check_mnist(records["mnist"])
        self.check_training(records["encoder"])
        self.assertEqual(records["suite"]["parts"]["unit"]["result"], {"tests": 1, "failed": [], "not_run": []})
        self.assertEqual(records["facts"]["parts"]["torch"]["state"], "skipped")
        self.check_second_run()
        self.check_page()

    def check_mnist(self, record):
        for dtype, name in (("fp16", "float16"), ("bf16", "bfloat16")):
            rows = record["parts"][dtype]["result"]
            self.assertEqual([row["opt_level"] for row in rows], ["O0", "O1", "O2", "O3"])
            self.assertEqual([row["dtype"] for row in rows], ["float32", name, name, name])
            self.assertEqual({row["steps"] for row in rows}, {3})

    def check_training(self, record):
        for group, contenders in gpu_hour_steps.GROUPS.items():
            result = record["parts"][group]["result"]
            ours = [name for name in contenders if name.startswith("semitone")]
            self.assertEqual(list(result["contenders"]), ours)
            self.assertEqual(set(result["left_out"]), set(contenders) - set(ours))
            for row in result["contenders"].values():
                self.assertEqual(len(row["seconds"]), 2)

    def check_second_run(self):
        before = {name: (self.report / f"{name}.json").read_bytes() for name in gpu_hour_steps.NAMES
                  if self.record(name)["state"] == "done" and name not in gpu_hour.BUILD_STEPS}
        self.forget()
        code, printed = self.hour()
        self.assertEqual(code, 0, printed)
        self.assertEqual({name: (self.report / f"{name}.json").read_bytes() for name in before}, before)
        self.assertEqual(self.notes(), [])
        self.assertEqual(printed.count("done already"), len(before))

    def check_page(self):
        page = self.page()
        code, printed = self.hour("--page", page)
        self.assertEqual(code, 0, printed)
        text = page.read_text()
        self.assertTrue(text.startswith("before\n") and text.endswith("behind\n"))
        self.assertNotIn("old", text)
        for part in ("nothing here is about a GPU", "these figures mean nothing", "| nccl | skipped |", "| AdamW | float32 |", "semitone O2 fp16",
                     "| O3 | float16 |", "left out"):
            self.assertIn(part, text)
        self.hour("--page", page)
        self.assertEqual(page.read_text(), text)


class StepsTest(HourTest):
    def test_a_failure_is_recorded_and_stops_no_other_step(self):
        self.behave('case "$0" in *kernels_bench) echo "the reason why"; exit 3;; esac')
        code, _ = self.hour("bandwidth", "captured")
        self.assertEqual(code, 1)
        record = self.record("bandwidth")
        self.assertEqual(record["state"], "failed")
        self.assertIn("exit code 3", record["reason"])
        self.assertIn("the reason why", record["log_end"])
        self.assertEqual(self.record("captured")["state"], "done")
        self.forget()
        self.behave("true")
        self.assertEqual(self.hour("bandwidth", "captured")[0], 0)
        self.assertEqual([line.split()[0] for line in self.notes()], ["kernels_bench"])
        self.assertEqual(self.record("bandwidth")["state"], "done")

    def test_again_repeats_what_succeeded(self):
        self.hour("captured")
        self.forget()
        self.hour("captured")
        self.assertEqual(self.notes(), [])
        self.hour("captured", "--again")
        self.assertEqual(len(self.notes()), 1)

    def test_a_build_is_looked_at_again_on_another_machine(self):
        self.assertEqual(self.hour("build")[0], 0)
        (self.build / "apps/semitone").unlink()
        self.assertEqual(self.hour("build")[0], 1)
        self.assertIn("not built", self.record("build")["reason"])

    def test_a_step_that_runs_out_of_time_ends_and_goes_on_later(self):
        self.behave(f'case "$*" in *racecheck*) sleep 60 & wait;; *) echo "ERROR SUMMARY: 0 errors";; esac')
        code, _ = self.hour("sanitizer", "--limit", "3", device="cuda", gpu=True)
        self.assertEqual(code, 1)
        record = self.record("sanitizer")
        self.assertEqual(record["state"], "unfinished")
        self.assertEqual({name: part["state"] for name, part in record["parts"].items()}, {"memcheck": "done"})
        self.behave('case "$*" in *racecheck*) echo "RACECHECK SUMMARY: 0 hazards displayed";; *) echo "ERROR SUMMARY: 0 errors";; esac')
        self.forget()
        self.assertEqual(self.hour("sanitizer", device="cuda", gpu=True)[0], 0)
        self.assertEqual(re.findall(r"--tool (\w+)", "\n".join(self.notes())), ["racecheck", "synccheck", "initcheck"])

    def test_each_kernel_has_a_process_and_failures_have_names(self):
        listed = f'case "$*" in *--gtest_list_tests*) printf "{LISTED}"; exit 0;; '
        self.behave(listed + '*/sgd*) echo "adam is fine, this is not"; exit 1;; esac')
        self.assertEqual(self.hour("kernels", device="cuda", gpu=True)[0], 1)
        self.assertEqual(sorted(re.findall(r"gtest_filter=(\S+)", "\n".join(self.notes()))), ["*/adam", "*/sgd"])
        part = self.record("kernels")["parts"]["cases"]
        self.assertEqual(part["state"], "failed")
        self.assertEqual(part["result"]["cases"], 2)
        self.assertEqual(list(part["result"]["failed"]), ["sgd"])
        self.behave(listed + "esac")
        self.assertEqual(self.hour("kernels", device="cuda", gpu=True)[0], 0)
        self.assertEqual(self.record("kernels")["parts"]["cases"]["result"], {"cases": 2, "failed": {}})

    def test_nccl_has_a_rank_for_each_gpu(self):
        (self.build / "apps/semitone").unlink()
        self.pretender(self.build / "apps/semitone")
        row = {"test_accuracy": 0.99, "images_per_second": 5000.0, "ms_per_step": 2.0}
        (self.folder / "semitone.json").write_text(json.dumps([row]))
        self.behave('case "$0" in *nvidia-smi) echo "GPU 0: one"; echo "GPU 1: two";; esac')
        code, printed = self.hour("nccl", device="cuda", gpu=True)
        self.assertEqual(code, 0, printed)
        self.assertIn("semitone launch --nproc-per-node 2", "\n".join(self.notes()))
        part = self.record("nccl")["parts"]["train O2"]
        self.assertEqual(part["result"], {"ranks": 2, "results": [row]})
        page = self.page()
        self.hour("--page", page)
        self.assertIn("| train O2 | 2 | 99.00 % | 5,000 | 2.00 |", page.read_text())

    def test_errors_of_the_sanitizer_fail_the_step(self):
        self.behave('echo "ERROR SUMMARY: 2 errors"')
        self.assertEqual(self.hour("sanitizer", device="cuda", gpu=True)[0], 1)
        self.assertIn("memcheck: 2 errors", self.record("sanitizer")["reason"])

    def test_captured_steps_that_were_not_captured_fail_on_a_gpu(self):
        row = {**CAPTURED["rows"][0], "captured": False, "reason": "no graphs"}
        (self.folder / "captured_bench.json").write_text(json.dumps({"rows": [row]}))
        self.assertEqual(self.hour("captured", device="cuda", gpu=True)[0], 1)
        self.assertIn("convnet O2 float16: no graphs", self.record("captured")["reason"])

    def test_without_a_gpu_no_step_of_one_succeeds(self):
        code, printed = self.hour("kernels", "captured", device="cuda")
        self.assertEqual(code, 1)
        self.assertEqual({self.record(name)["state"] for name in ("kernels", "captured")}, {"skipped"})
        self.assertIn("[captured] SKIPPED: no GPU", printed)
        self.assertEqual(self.notes(), [])

    def test_a_report_is_of_one_device(self):
        self.hour("captured")
        code, printed = self.hour("captured", device="cuda", gpu=True)
        self.assertEqual(code, 2)
        self.assertIn("give another --report", printed)

    def test_wrong_usage_is_code_2(self):
        self.assertEqual(self.hour("dance")[0], 2)
        self.assertEqual(self.hour("facts", device="tpu")[0], 2)

    def test_a_page_without_markers_or_report_is_an_error(self):
        page = self.folder / "page.md"
        page.write_text("no markers\n")
        self.hour("captured")
        self.assertIn("once each", str(self.hour("--page", page)[0]))
        self.assertEqual(page.read_text(), "no markers\n")


if __name__ == "__main__":
    unittest.main()
