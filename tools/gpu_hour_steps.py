"""The steps of gpu_hour.py. Each gets a Run, whose part() does one part of the step and remembers that it is done."""
import collections
import concurrent.futures
import json
import os
import pathlib
import platform
import re
import shutil
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
Step = collections.namedtuple("Step", "name help needs_gpu work")

BATCHES = (64, 128, 256)  # of ResNet-50
DTYPES = ("fp16", "bf16")
# What is compared in interleaved rounds. All of a group are on the device at once.
GROUPS = {"fp32": ["semitone O0", "pytorch fp32", "pytorch tf32"],
          "fp16": ["semitone O1 fp16", "semitone O2 fp16", "semitone O3 fp16", "pytorch fp16", "pytorch compile-fp16", "pytorch apex"],
          "bf16": ["semitone O1 bf16", "semitone O2 bf16", "semitone O3 bf16", "pytorch bf16", "pytorch compile"]}
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZER_SECONDS = 130  # of each


def read_json(file):
    return json.loads(file.read_text())


def out(run, name):
    run.folder.mkdir(parents=True, exist_ok=True)
    return run.folder / name


# --- build ---------------------------------------------------------------------------------------------------------

PROGRAMS = {"program": ("semitone_cli", "apps/semitone"), "kernel tests": ("cuda_test", "tests/cuda_test"),
            "benchmarks": ("semitone_benchmarks", "benchmarks/kernels_bench"), "example": ("apex_mnist_ddp", "examples/apex_mnist_ddp")}


def build(run):
    for name, (target, program) in PROGRAMS.items():
        if run.options.no_build and name != "program":
            continue
        if target == "cuda_test" and run.options.device == "cpu":
            continue
        run.part(name, lambda target=target, program=program: compile_target(run, target, program))


def build_all(run):
    if run.options.no_build:
        run.skip("--no-build")
    run.part("everything", lambda: compile_target(run, "all", "tests/core_test"))


def compile_target(run, target, program):
    if not run.options.no_build:
        run.command("cmake", "--build", run.build, "-j", run.options.jobs, "--target", target)
    return str(run.program(program))


# --- facts ---------------------------------------------------------------------------------------------------------

SMI = ("name", "driver_version", "compute_cap", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")

SETTINGS = ("SEMITONE_LIBTORCH", "SEMITONE_CUDA_ARCHITECTURES", "CMAKE_CUDA_ARCHITECTURES", "CMAKE_BUILD_TYPE", "SEMITONE_CUDA_INCLUDE_DIR",
            "SEMITONE_NCCL_INCLUDE_DIR")


def facts(run):
    run.part("machine", lambda: machine(run))
    run.part("nvidia-smi", lambda: nvidia_smi(run))
    run.part("torch", lambda: torch_facts(run))


def machine(run):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cache = (run.build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", cache, re.M)
    return {"cpu": next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown"),
            "cores": len(os.sched_getaffinity(0)), "kernel": platform.release(),
            "semitone": run.command(run.program("apps/semitone"), "--version").strip().splitlines()[-1],
            "nvcc": nvcc.group(1) if nvcc and "NOTFOUND" not in nvcc.group(1) else None,
            "settings": dict(re.findall(rf"^({'|'.join(SETTINGS)}):\w+=(.*)$", cache, re.M))}


def nvidia_smi(run):
    if run.options.device == "cpu":
        run.skip("no GPU (--device cpu)")
    run.command("nvidia-smi")
    output = run.command("nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader")
    return [dict(zip(SMI, (cell.strip() for cell in line.split(",")))) for line in output.strip().splitlines()]


def has_torch(run):
    return run.attempt(run.options.python, "-c", "import torch")[0] == 0


def torch_facts(run):
    if not has_torch(run):
        run.skip(f"no torch in {run.options.python}")
    file = out(run, "torch.json")
    run.command(run.options.python, ROOT / "benchmarks/peers/device_facts.py", "--device", run.options.device, "--json", file,
                *(["--small"] if run.small else []))
    return read_json(file)


# --- tests ---------------------------------------------------------------------------------------------------------


def kernels(run):
    """Each case of cuda_test in a process of its own: an error of the device stays in the process."""
    program = run.program("tests/cuda_test")
    run.part("cases", lambda: kernel_cases(run, program))


def case_names(run, program):
    """The names behind the last slash, which tests of the same case share."""
    listed = run.command(program, "--gtest_list_tests")
    names = re.findall(r"^  \w+/(\S+)", listed, re.M)
    return list(dict.fromkeys(names))


def kernel_cases(run, program):
    names = case_names(run, program)
    if not names:
        run.fail("expected cases in cuda_test, got none")

    def one(name):
        code, output = run.attempt(program, f"--gtest_filter=*/{name}", "--gtest_brief=1", most_seconds=120,
                                   variables={"OMP_NUM_THREADS": "2"})  # several run at once
        return name, "passed" if code == 0 else "\n".join(output.strip().splitlines()[-12:])

    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, run.options.jobs))) as pool:
        results = dict(pool.map(one, names))
    failed = {name: text for name, text in results.items() if text != "passed"}
    if failed:
        run.fail(f"{len(failed)} of {len(names)} cases failed: {', '.join(failed)}", {"cases": len(names), "failed": failed})
    return {"cases": len(names), "failed": {}}


def sanitizer(run):
    """compute-sanitizer on cuda_test, all cases in one process for each tool."""
    program = run.program("tests/cuda_test")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not tool:
        run.skip("no compute-sanitizer on this machine")
    for name in SANITIZERS:
        run.part(name, lambda name=name: sanitize(run, tool, name, program))


def sanitize(run, tool, name, program):
    code, output = run.attempt(tool, "--tool", name, "--error-exitcode", "99", program, "--gtest_filter=*EqualsTheCpusKernels*",
                               "--gtest_brief=1", most_seconds=SANITIZER_SECONDS)
    summary = re.search(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)", output)
    if summary is None:
        run.fail(f"{name} gave no summary (exit code {code})")
    errors = int(summary.group(1) or summary.group(2))
    if errors or code != 0:
        run.fail(f"{name}: {errors} errors, exit code {code}")
    return {"errors": errors}


def suite(run):
    """The whole test suite, but for the kernels' tests, by label. LibTorch sees the device."""
    if run.small:
        run.part("unit", lambda: ctest(run, "unit", "-R", "^core_test$"))
        return
    for label in ("unit", "mp", "slow"):
        run.part(label, lambda label=label: ctest(run, label, "-L", f"^{label}$", "-LE", "^gpu$"))
    run.part("others", lambda: ctest(run, "others", "-LE", "^(unit|mp|slow|gpu)$"))


def ctest(run, name, *words):
    file = out(run, f"{name}.xml")
    code, _ = run.attempt("ctest", "--test-dir", run.build, "--output-on-failure", "-j", run.options.jobs, "--output-junit", file,
                          "--no-tests=ignore", *words)
    cases = xml.etree.ElementTree.parse(file).getroot().findall("testcase") if file.exists() else []
    failed = [case.get("name") for case in cases if case.get("status") == "fail"]
    result = {"tests": len(cases), "failed": failed, "not_run": [case.get("name") for case in cases if case.get("status") not in ("run", "fail")]}
    if code != 0 or failed:
        run.fail(f"{len(failed)} of {len(cases)} tests failed: {', '.join(failed)} (exit code {code})", result)
    return result


# --- training ------------------------------------------------------------------------------------------------------


def mnist(run):
    for dtype in DTYPES:
        run.part(dtype, lambda dtype=dtype: train(run, f"{dtype}.json", "--opt-level", "all", "--dtype", dtype,
                                                  *(["--limit-batches", 3, "--batch-size", 20] if run.small else [])))


def train(run, name, *flags):
    file = out(run, name)
    run.command(run.program("apps/semitone"), "train", "--model", "convnet", "--data", run.options.data, "--device", run.options.device,
                "--json", file, *flags)
    return read_json(file)


def resnet50(batch):
    def work(run):
        groups = {"fp32": ["semitone O0", "pytorch fp32"], "bf16": ["semitone O1 bf16", "pytorch bf16"]} if run.small else GROUPS
        sizes = ["--batch-size", 8, "--image-size", 32, "--check-steps", 2] if run.small else ["--batch-size", batch]
        compare(run, "resnet50", groups, sizes)
    return work


def encoder(run):
    sizes = ["--batch-size", 32, "--length", 512]
    if run.small:
        sizes = ["--batch-size", 2, "--length", 16, "--width", 64, "--heads", 4, "--layers", 1, "--vocabulary", 500]
    compare(run, "encoder", GROUPS, sizes)


def compare(run, workload, groups, sizes):
    for name, contenders in groups.items():
        run.part(name, lambda name=name, contenders=contenders: compare_group(run, workload, out(run, name), contenders, sizes))


def compare_group(run, workload, folder, contenders, sizes):
    """benchmarks/compare.py: all of a group in interleaved rounds."""
    rounds, steps = (2, 1) if run.small else (10, 10)
    run.command("python3", ROOT / "benchmarks/compare.py", workload, "--program", run.program("apps/semitone"), "--python", run.options.python,
                "--device", run.options.device, "--contenders", ",".join(contenders), "--rounds", rounds, "--steps", steps,
                "--out", folder, "--", *sizes)
    result = read_json(folder / f"{workload}.json")
    return {key: result[key] for key in ("contenders", "ratios", "left_out", "items_per_step", "rounds", "steps_per_round", "sizes")}


# --- kernels, graphs, several GPUs ---------------------------------------------------------------------------------


def bandwidth(run):
    def work():
        file = out(run, "kernels.json")
        run.command(run.program("benchmarks/kernels_bench"), "--device", run.options.device, "--json", file,
                    *(["--small", "--rounds", 1, "--only", "norm|AdamW"] if run.small else []))
        return read_json(file)
    run.part("kernels_bench", work)


def captured(run):
    def work():
        file = out(run, "captured.json")
        run.command(run.program("benchmarks/captured_bench"), "--device", run.options.device, "--json", file,
                    *(["--rounds", 1, "--steps", 2] if run.small else []))
        result = read_json(file)
        not_captured = [f"{row['model']} {row['level']} {row['dtype']}: {row.get('reason', 'ran operator by operator')}"
                        for row in result["rows"] if not row["captured"]]
        if run.options.device != "cpu" and not_captured:
            run.fail("not captured: " + "; ".join(not_captured), result)
        return result
    run.part("captured_bench", work)


def nccl(run):
    """Data-parallel training with one rank for each GPU, over NCCL."""
    gpus = len(re.findall(r"^GPU \d", run.command("nvidia-smi", "-L"), re.M))
    most = ["--limit-batches", 5] if run.small else []
    for level in ("O0", "O2"):
        run.part(f"train {level}", lambda level=level: {"ranks": gpus, "results": train(
            run, f"{level}.json", "--opt-level", level, "--nproc", "gpu", "--sync-bn", *most)})
    run.part("example", lambda: {"ranks": gpus, "output": run.command(
        run.program("apps/semitone"), "launch", "--nproc-per-node", gpus, run.program("examples/apex_mnist_ddp"))[-2000:]})


STEPS = [Step("build", "compiles the program, the kernels' tests, the benchmarks, an example", False, build),
         Step("facts", "device, driver, versions, bandwidth of a copy, speed of products", False, facts),
         Step("kernels", "every CUDA kernel against the CPU's, and resumed trainings, each case in its own process", True, kernels),
         Step("mnist", "MNIST at O0 to O3, in fp16 and bf16", False, mnist),
         Step("bandwidth", "every kernel in GB/s, beside a copy and LibTorch's operator", False, bandwidth),
         *(Step(f"resnet50_b{batch}", f"ResNet-50, {batch} images: all levels and PyTorch, interleaved", False, resnet50(batch))
           for batch in BATCHES),
         Step("encoder", "the encoder, 32 sequences of 512 tokens: the same", False, encoder),
         Step("captured", "steps as CUDA graphs, beside the same steps operator by operator", False, captured),
         Step("nccl", "data-parallel training over NCCL, a rank for each GPU", True, nccl),
         Step("sanitizer", "compute-sanitizer on every CUDA kernel", True, sanitizer),
         Step("build_all", "compiles everything", False, build_all),
         Step("suite", "all tests of the project with the device", False, suite)]
NAMES = [step.name for step in STEPS]
