#!/ usr / bin / env python3
"""Reads a run that RunLog wrote with Python, as its users do.

tensorboard_files.py own REPORT_TEST          with the reader below, which shares no code with the writer
tensorboard_files.py tensorboard REPORT_TEST  with the package tensorboard
"""
import csv
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

STEPS = [1, 2, 3, 4, 5, 6]
VALUES = [i / 10 for i in range(-50, 50)]


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> dict:
    """The last value of each field of a protobuf message."""
    found, at = {}, 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            found[key >> 3], at = varint(data, at)
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = varint(data, at)
        found[key >> 3], at = data[at:at + size], at + size
    return found


def records(path: pathlib.Path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12:at + 12 + size]
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at:at + 8]), "the length's checksum"
        assert struct.unpack_from("<I", data, at + 12 + size)[0] == masked(body), "the data's checksum"
        yield fields(body)
        at += size + 16


def doubles(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 8}d", packed))


def read_own(folder: pathlib.Path) -> dict:
    """What a reader of all files has: name, step → value. A restart drops the steps from there on."""
    scalars, texts, histograms = {}, {}, {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in records(path):
            step = event.get(2, 0)
            if 7 in event:
                assert fields(event[7]) == {1: 1}
                for series in (*scalars.values(), *texts.values(), *histograms.values()):
                    for later in [other for other in series if other >= step]:
                        del series[later]
            if 5 not in event:
                continue
            value = fields(fields(event[5])[1])
            name = value[1].decode()
            if 2 in value:
                scalars.setdefault(name, {})[step] = struct.unpack("<f", value[2])[0]
            elif 5 in value:
                histogram = fields(value[5])
                numbers = [struct.unpack("<d", histogram[i])[0] for i in range(1, 6)]
                histograms.setdefault(name, {})[step] = (*numbers, doubles(histogram[6]), doubles(histogram[7]))
            else:
                assert fields(fields(value[9])[1])[1] == b"text"
                texts.setdefault(name, {})[step] = fields(value[8])[8].decode()
    return {"scalars": scalars, "texts": texts, "histograms": histograms}


def read_with_tensorboard(folder: pathlib.Path) -> dict:
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.compat.proto import summary_pb2  # noqa: F401

    kinds = {kind: 0 for kind in (event_accumulator.SCALARS, event_accumulator.HISTOGRAMS, event_accumulator.TENSORS)}
    run = event_accumulator.EventAccumulator(str(folder), size_guidance=kinds).Reload()
    tags = run.Tags()
    scalars = {name: {e.step: e.value for e in run.Scalars(name)} for name in tags["scalars"]}
    counts = {name: len(run.Scalars(name)) for name in tags["scalars"]}
    assert all(counts[name] == len(scalars[name]) for name in counts), "steps that were trained again appear once"
    texts = {name: {e.step: e.tensor_proto.string_val[0].decode() for e in run.Tensors(name)}
             for name in tags["tensors"]}
    for name in tags["tensors"]:
        assert run.SummaryMetadata(name).plugin_data.plugin_name == "text"
    histograms = {}
    for name in tags["histograms"]:
        values = [(e.step, e.histogram_value) for e in run.Histograms(name)]
        histograms[name] = {step: (h.min, h.max, h.num, h.sum, h.sum_squares, list(h.bucket_limit), list(h.bucket))
                            for step, h in values}
    return {"scalars": scalars, "texts": texts, "histograms": histograms}


def check_histogram(histogram) -> None:
    least, most, number, total, squares, limits, counts = histogram
    assert (least, most, number) == (min(VALUES), max(VALUES), len(VALUES))
    assert math.isclose(total, sum(VALUES)) and math.isclose(squares, sum(v * v for v in VALUES))
    assert sorted(limits) == limits and len(limits) == len(counts)
    for i in range(len(limits)):
        assert sum(counts[:i + 1]) == sum(value < limits[i] for value in VALUES), (i, limits[i])


def check(run: dict) -> None:
    loss = run["scalars"]["train/loss"]
    assert list(loss) == STEPS, loss
    assert all(struct.pack("<f", loss[step]) == struct.pack("<f", 1 / step) for step in STEPS)
    assert all(math.isnan(value) for value in run["scalars"]["train/nan"].values())
    assert run["texts"]["note/text_summary"] == {
      step: f"step **{step}**" for step in STEPS
      }
    config = "| setting | value |\n|---|---|\n| lr | 0.1 |\n"
    assert run["texts"]["config/text_summary"] == {0: config, 4: config}
    assert list(run["histograms"]["values"]) == STEPS
    for histogram in run["histograms"]["values"].values():
        check_histogram(histogram)


def check_table(folder: pathlib.Path) -> None:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "train/loss"}
    assert losses == {
    step: 1 / step for step in STEPS
    }
    assert [int(row["step"]) for row in rows if row["name"] == "train/nan"] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert all(math.isnan(float(row["value"])) for row in rows if row["name"] == "train/nan")


def main() -> None:
    reader = {"own": read_own, "tensorboard": read_with_tensorboard}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "run"
        subprocess.run([sys.argv[2], "--gtest_filter=RunForPython.*", "--gtest_brief=1"], check=True,
                       env={**os.environ, "SEMITONE_TEST_FOLDER": str(folder)})
        check(reader(folder))
        check_table(folder)


if __name__ == "__main__":
    main()
