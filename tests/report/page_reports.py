"""Reports as `semitone report --json` writes them, made up."""
import copy
import json

FORMATS = [{"name": name, "max_exponent": largest, "min_normal": normal, "min_subnormal": smallest} for name, largest, normal, smallest in (
    ("float16", 15, -14, -24), ("bfloat16", 127, -126, -133), ("float8_e4m3fn", 8, -6, -9), ("float8_e5m2", 15, -14, -16))]


def histogram(first_exponent, counts, **other):
    return {"first_exponent": first_exponent, "counts": counts, "zeros": 0, "nans": 0, "infs": 0, "numel": sum(counts), "max_abs": 0.5,
            "dtype": "Float", "step": 312, "loss_scale": None, "samples": 3, **other}


def shares(of, shift):
    """As the report has them: of all values that are neither zero nor NaN."""
    found = {}
    for form in FORMATS:
        total = (sum(of["counts"]) + of["infs"]) or 1
        share = {"zero": 0, "subnormal": 0, "overflow": of["infs"] / total}
        for index, count in enumerate(of["counts"]):
            exponent = of["first_exponent"] + index + shift
            key = ("overflow" if exponent > form["max_exponent"] else "zero" if exponent < form["min_subnormal"] - 1 else
                   "subnormal" if exponent < form["min_normal"] else None)
            if key:
                share[key] += count / total
        found[form["name"]] = share
    return found


def parameter(name, gradient, ratio=1e-3):
    lost = None if ratio is None else {"float16": 0.25, "bfloat16": 0.75}
    return {"name": name, "layer": name.rpartition(".")[0], "layer_type": "Conv2d", "dtype": "Float", "numel": 400,
            "weight": histogram(-6, [10, 200, 190]), "gradient": gradient, "shares": shares(gradient, 16) if gradient else {},
            "update_ratio": ratio, "lost": lost, "updates": 400}


def layer(name):
    gradient, output = histogram(-30, [5, 90, 5]), histogram(-3, [20, 500, 2], dtype="Half", zeros=100)
    return {"name": name, "layer_type": "Conv2d", "output": output, "output_gradient": gradient, "shares": shares(gradient, 16),
            "output_shares": shares(output, 0)}


def operator(name, place, dtype, seconds):
    return {"name": name, "pass": place, "dtype": dtype, "kernel": "native", "calls": 12, "seconds": seconds, "share": seconds / 2,
            "bytes": 1 << 20, "casts": 3, "cached_casts": 9, "cast_bytes": 4096}


def run(directory="runs/7", exponent=-42):
    """312 steps, of which the last and another were skipped. `exponent`: the least of the gradients of conv1.weight."""
    verdicts = [
        {"severity": "problem", "id": "skips", "title": "Step 312 was skipped: a gradient of conv2.weight is inf", "figure": 6.4, "unit": "%",
         "detail": "It is larger than 65,504, the largest float16, when it is multiplied by the loss scale.",
         "remedy": "Start with a lower loss scale.", "where": ["conv2.weight"], "steps": [312]},
        {"severity": "warning", "id": "near", "title": "An output is near the largest float16", "figure": None, "unit": "", "detail": "",
         "remedy": "Use bfloat16.", "where": [f"layer{index}" for index in range(9)], "steps": []},
        {"severity": "good", "id": "lost", "title": "No update is lost", "figure": 0, "unit": "%", "detail": "", "remedy": "", "where": [], "steps": []}]
    config = {"lr": "0.1", "batch-size": "128"}
    about = {"directory": directory, "rank": 0, "world_size": 1, "started": "2026-11-24T01:20:33Z", "ended": None, "outcome": "running",
             "reason": "", "starts": 1, "steps": 312, "samples": 3, "device": "cpu", "processor": "a processor", "threads": 2,
             "opt_level": "O1", "dtype": "float16", "versions": {"semitone": "0.1", "libtorch": "2.11"}, "config": config}
    return {
        "format": "semitone-report", "version": 1, "run": about, "verdicts": verdicts,
        "loss": [[step, None if step == 77 else 2.5 - step / 200] for step in range(313)],
        "loss_scale": [[0, 131072.0], [12, 65536.0], [312, 32768.0]],
        "skipped": [{"step": 12, "exact": True, "parameter": "", "non_finite": 1, "loss_scale": 131072.0, "scale_after": 65536.0},
                    {"step": 312, "exact": True, "parameter": "conv2.weight", "non_finite": 3, "loss_scale": 65536.0, "scale_after": 32768.0}],
        "formats": FORMATS,
        "parameters": [parameter("conv1.weight", histogram(exponent, [100, 100, 100, *[0] * 10, 100])),
                       parameter("conv2.weight", histogram(-20, [1, 9, 30], infs=3, nans=2)), parameter("conv2.bias", None),
                       parameter("fc.weight", histogram(-18, [7, 9, 7]), None)],
        "layers": [layer("conv1"), {**layer("fc"), "output_gradient": None, "shares": {}}],
        "operators": [operator("conv2d", "forward", "Half", 1), operator("addmm", "backward", "Half", 0.5),
                      operator("_to_copy", "forward", "", 0.3), operator("relu", "forward", "Float", 0.2)],
        "phases": {"data": 0.01, "forward": 0.1, "backward": 0.2, "communication": 0, "unscale": 0.01, "optimizer": 0.02, "other": 0.01},
        "step_seconds": 0.35, "memory": {"parameters": 4000, "masters": 4000, "gradients": 4000, "activations": 90000},
        "compare": None}


def without_samples():
    report = run()
    report["run"].update(samples=0, opt_level=None, dtype=None)
    return {**report, "parameters": [], "layers": [], "operators": [], "phases": {}, "memory": {}, "step_seconds": None}


def empty():
    report = without_samples()
    report["run"].update(steps=0, config={})
    return {**report, "verdicts": [], "loss": [], "loss_scale": [], "skipped": []}


def large():
    """160 parameters with long names."""
    report = run("/home/somebody/experiments/with/a/long/path/to/the/directory/of/the/run")
    report["parameters"] = [parameter(f"encoder.blocks_of_a_stage_with_a_long_name_{index // 4}.convolution_{index % 4}.weight",
                                      histogram(-40 + index // 8, [3, 40, 90, 40, 3])) for index in range(160)]
    return report


def renamed(report, name):
    """With this text wherever a report has one."""
    text = json.dumps(copy.deepcopy(report)).replace("conv2", json.dumps(name)[1:-1]).replace("addmm", json.dumps(name)[1:-1])
    report = json.loads(text)
    report["run"].update(directory=name, processor=name, reason=name, config={name: name})
    for verdict in report["verdicts"]:
        verdict.update(title=name, detail=name, remedy=name, unit=name, where=[name])
    report["parameters"][1]["name"] = name
    return report
