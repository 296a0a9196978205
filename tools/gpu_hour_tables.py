"""The tables of docs/gpu.md, from the records of gpu_hour.py."""
import re

BEGIN = "<!-- tools/gpu_hour.py writes from here … -->"
END = "<!-- … to here -->"
WORKLOADS = {"resnet50": "ResNet-50", "encoder": "encoder"}
# The contenders of other systems that compute in the same formats.
PEERS = {"fp32": ["pytorch fp32", "pytorch tf32"], "fp16": ["pytorch fp16", "pytorch compile-fp16", "pytorch apex"],
         "bf16": ["pytorch bf16", "pytorch compile"]}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows)])


def result_of(record, part):
    """Of a part that succeeded; None otherwise."""
    entry = record.get("parts", {}).get(part, {})
    return entry.get("result") if entry.get("state") == "done" else None


def number(value, digits=1):
    return "–" if value is None or value != value else f"{value:,.{digits}f}"


def state_rows(records):
    for name, record in records.items():
        if not record:
            yield name, "not run", "–", ""
            continue
        parts = record.get("parts", {})
        notes = [record["reason"]] if "reason" in record else []
        notes += [f"{part}: {entry['state']}, {entry['reason']}" for part, entry in parts.items()
                  if entry["state"] != "done" and entry["reason"] not in record.get("reason", "")]
        yield name, record["state"], f"{sum(entry['seconds'] for entry in parts.values()):.0f} s", short("; ".join(notes))


def short(text, most=300):
    return text if len(text) <= most else text[:most] + " …"


def states(records):
    return "### Steps\n\n" + table(["step", "state", "time", "reason"], state_rows(records))


def device(records):
    record = records.get("facts") or {}
    rows = []
    machine, torch = result_of(record, "machine"), result_of(record, "torch")
    for index, gpu in enumerate(result_of(record, "nvidia-smi") or []):
        rows.append((f"GPU {index}", f"{gpu['name']}, {gpu['memory.total']}, compute capability {gpu['compute_cap']}, "
                     f"driver {gpu['driver_version']}, at most {gpu['clocks.max.sm']} (memory {gpu['clocks.max.mem']}), "
                     f"{gpu['power.limit']}, {gpu['temperature.gpu']} °C before"))
    if machine:
        rows.append(("host", f"{machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}"))
        rows.append(("program", f"{machine['semitone']}; nvcc: {machine['nvcc'] or 'none'}; commit {record['commit']}, {record['begun'][:10]}"))
    if torch:
        rows.append(("PyTorch of the comparison", f"{torch['torch']}, CUDA {torch['cuda']}, cuDNN {torch.get('cudnn', '–')}"))
        rows.append(("copy of 1 GiB, bytes read and written", f"{number(torch['copy_gb_per_s'], 0)} GB/s"))
        rows.append(("products of 8192 × 8192 matrices",
                     ", ".join(f"{name} {number(speed)}" for name, speed in torch["tflop_per_s"].items()) + " TFLOP/s"))
    return "### The machine\n\n" + table(["", ""], rows) if rows else ""


def tests(records):
    rows = []
    cases = (records.get("kernels") or {}).get("parts", {}).get("cases", {}).get("result")
    if cases:
        rows.append(("CUDA kernels against the CPU's, and resumed trainings", cases["cases"], ", ".join(cases["failed"]) or "none"))
    for tool, entry in (records.get("sanitizer") or {}).get("parts", {}).items():
        rows.append((f"compute-sanitizer, {tool}", "all kernels", "none" if entry["state"] == "done" else entry["reason"]))
    for label, entry in (records.get("suite") or {}).get("parts", {}).items():
        found = entry.get("result")
        if found:
            rows.append((f"test suite, {label}", found["tests"], ", ".join(found["failed"]) or "none"))
    return "### Tests\n\n" + table(["what", "cases", "failed"], rows) if rows else ""


def mnist(records):
    rows = []
    for dtype, entry in ((records.get("mnist") or {}).get("parts") or {}).items():
        for row in entry.get("result") or []:
            rows.append((row["opt_level"], row["dtype"] if row["opt_level"] != "O0" else f"{row['dtype']} (beside {dtype})",
                         f"{100 * row['test_accuracy']:.2f} %", number(row["images_per_second"], 0), number(row["ms_per_step"], 2),
                         number(row["peak_tensor_mb"]), row["skipped_steps"], f"{row['final_loss_scale']:g}"))
    head = ["level", "dtype", "accuracy", "images/s", "ms/step", "tensors, MB", "skipped", "loss scale"]
    return "### MNIST, the ConvNet\n\n" + table(head, rows) if rows else ""


def peak_of(row):
    report = row["report"]
    return report["tensor_mb"]["peak"] if "tensor_mb" in report else report.get("peak_mb")


def training_rows(parts):
    for group, entry in parts.items():
        result = entry.get("result")
        if not result:
            yield (group, "–", "–", "–", "–", short(entry.get("reason", ""), 120))
            continue
        for name, row in result["contenders"].items():
            ratios = result["ratios"].get(name, {})
            against = ", ".join(f"{peer.removeprefix('pytorch ')} {ratios[peer]['median']:.2f} ({ratios[peer]['min']:.2f})"
                                for peer in PEERS[group] if peer in ratios)
            rate = f"{result['items_per_step'] / row['median']:,.0f}" if result["items_per_step"] else "–"
            yield name, number(1e3 * row["median"], 2), number(1e3 * row["min"], 2), rate, number(peak_of(row), 0), against or "–"
        for name, reason in result["left_out"].items():
            yield name, "–", "–", "–", "–", "left out: " + short(reason, 120)


def training(records):
    texts = []
    for name, record in records.items():
        workload = name.partition("_")[0]
        if workload not in WORKLOADS or not record or not record.get("parts"):
            continue
        sizes = next((entry["result"]["sizes"] for entry in record["parts"].values() if entry.get("result")), [])
        texts.append(f"### {WORKLOADS[workload]}, `{' '.join(map(str, sizes))}`\n\n"
                     + table(["contender", "ms, median", "ms, least", "items/s", "peak of tensors, MB", "speed-up over PyTorch: median (least)"],
                             training_rows(record["parts"])))
    return "\n\n".join(texts)


def kernels(records):
    result = result_of(records.get("bandwidth") or {}, "kernels_bench")
    if not result:
        return ""
    rows = [(row["kernel"] + (f", {row['pass']}" if row["pass"] else ""), row["dtype"], row["shape"],
             number(1e3 * row["semitone"]["min_seconds"], 3), number(row["per_second"] / 1e9, 0),
             f"{100 * row['share_of_baseline']:.0f} %", number(row["ratio"], 2)) for row in result["rows"]]
    return "### Kernels\n\n" + table(["kernel", "dtype", "shape", "ms, least", "GB/s", "of a copy", "LibTorch's time / Semitone's"], rows)


def captured(records):
    result = (records.get("captured") or {}).get("parts", {}).get("captured_bench", {}).get("result")
    if not result:
        return ""
    rows = []
    for row in result["rows"]:
        times = [number(1e3 * row[key], 3) if key in row else "–" for key in ("by_operators_seconds", "captured_seconds")]
        ratio = short(row.get("reason", "not captured"), 120)
        if row["captured"]:
            ratio = number(row["by_operators_seconds"] / row["captured_seconds"], 2)
        rows.append((row["model"], row["level"], row["dtype"], row["batch_size"], *times, ratio))
    return "### Captured steps\n\n" + table(["model", "level", "dtype", "batch", "ms by operators", "ms captured", "speed-up"], rows)


def nccl(records):
    rows = []
    for name, entry in ((records.get("nccl") or {}).get("parts") or {}).items():
        for row in (entry.get("result") or {}).get("results", []):
            rows.append((name, entry["result"]["ranks"], f"{100 * row['test_accuracy']:.2f} %", number(row["images_per_second"], 0),
                         number(row["ms_per_step"], 2)))
    return "### Data-parallel training over NCCL\n\n" + table(["what", "ranks", "accuracy", "images/s of a rank", "ms/step"], rows) if rows else ""


def text_of(records):
    run = [record for record in records.values() if record]
    head = []
    if any(record["sizes"] == "small" for record in run):
        head.append("**A rehearsal with small sizes: these figures mean nothing.**")
    if any(record["device"] == "cpu" for record in run):
        head.append("**Run on a CPU: nothing here is about a GPU.**")
    sections = [states(records), device(records), tests(records), mnist(records), training(records), kernels(records), captured(records), nccl(records)]
    return "\n\n".join(head + [section for section in sections if section])


def write_page(page, records):
    if not any(records.values()):
        raise ValueError("expected a report with at least one step, got none — give its folder with --report")
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected the lines '{BEGIN}' and '{END}' in {page}, once each")
    page.write_text(re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: f"{BEGIN}\n\n{text_of(records)}\n\n{END}", text, flags=re.S))
    print(f"{page}: written")
