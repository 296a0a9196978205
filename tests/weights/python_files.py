#!/usr/bin/env python3
"""Weights between this library and the real packages of Python: torch and safetensors.

python_files.py make JSON       writes files with these packages, in base64, for tests without them
python_files.py check PROGRAM   converts files in both directions with `semitone convert`, and compares
                                every tensor
"""

import argparse
import base64
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy
import safetensors
import safetensors.torch
import torch

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64",
]


def tensor_of(dtype: str) -> torch.Tensor:
    values = torch.tensor([[0, 1, 2], [3, 4, 5]])
    return (values > 2) if dtype == "bool" else values.to(getattr(torch, dtype))


def all_dtypes() -> dict[str, torch.Tensor]:
    return {f"of.{dtype}": tensor_of(dtype) for dtype in DTYPES}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        for i, value in enumerate(self.state_dict().values()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + 10 * i)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


class Payload:
    """What a hostile pickle calls."""

    def __reduce__(self):
        return (__import__("os").system, ("touch /tmp/semitone-payload-was-run",))


def quantised(net: torch.nn.Module) -> dict:
    return {"state_dict": net.state_dict(), "observer": {"scale": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}}


def views() -> dict[str, torch.Tensor]:
    """Tensors that share memory, in other orders than it."""
    base = torch.arange(12.0).reshape(3, 4)
    return {"base": base, "row": base[1], "transposed": base.t(), "expanded": base[:, :1].expand(3, 2),
            "empty": torch.empty(0, 3), "scalar": torch.tensor(7.0)}


def files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    net = Net()
    contents = {
        "state_dict.pt": net.state_dict(),
        "dtypes.pt": all_dtypes(),
        "views.pt": views(),
        "checkpoint.pt": {"state_dict": net.state_dict(), "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 3},
        "parameters.pt": collections.OrderedDict(net.named_parameters()),
        "module.pt": net,
        "payload.pt": {"weight": torch.ones(2), "args": Payload()},
        "list.pt": [torch.ones(2)],
        "sparse.pt": {"dense": torch.ones(2), "sparse": torch.eye(2).to_sparse()},
        "conjugated.pt": {"weight": torch.tensor([1 + 2j]).conj()},
        "best.pt": {"state_dict": net.state_dict(), "best": torch.tensor(0.5)},
        "with_module.pt": {"weight": torch.ones(2), "model": net},
        "defaultdict.pt": collections.defaultdict(list, net.state_dict()),
        "empty.pt": {},
        "quantised.pt": quantised(net),
        "models.pt": {"models": [net.state_dict(), net.state_dict()]},
        "complex128.pt": {"weight": torch.tensor([1.0, 2.0], dtype=torch.complex128)},
        "expanded.pt": {"weight": torch.zeros(1).expand(1 << 25)},
    }
    made = {}
    for name, content in contents.items():
        made[name] = folder / name
        torch.save(content, made[name])
    made["protocol5.pt"] = folder / "protocol5.pt"
    torch.save(net.state_dict(), made["protocol5.pt"], pickle_protocol=5)
    made["before_1_6_protocol4.pt"] = folder / "before_1_6_protocol4.pt"
    torch.save(net.state_dict(), made["before_1_6_protocol4.pt"], pickle_protocol=4, _use_new_zipfile_serialization=False)
    made["before_1_6.pt"] = folder / "before_1_6.pt"
    torch.save({**net.state_dict(), **{f"views.{key}": value for key, value in views().items()}}, made["before_1_6.pt"],
               _use_new_zipfile_serialization=False)
    made["quantised_before_1_6.pt"] = folder / "quantised_before_1_6.pt"
    torch.save(quantised(net), made["quantised_before_1_6.pt"], _use_new_zipfile_serialization=False)
    made["arrays.npz"] = folder / "arrays.npz"
    numpy.savez(made["arrays.npz"], weight=numpy.ones(2))
    made["exported.pt2"] = folder / "exported.pt2"
    with zipfile.ZipFile(made["exported.pt2"], "w") as archive:  # the names that torch.export.save gives
        archive.writestr("exported/models/model.json", "{}")
        archive.writestr("exported/archive_format", "pt2")
    made["script.pt"] = folder / "script.pt"
    torch.jit.script(net).save(made["script.pt"])
    made["dtypes.safetensors"] = folder / "dtypes.safetensors"
    safetensors.torch.save_file(all_dtypes(), made["dtypes.safetensors"], metadata={"format": "pt", "step": "12"})
    return made


def as_json(tensor: torch.Tensor) -> dict:
    tensor = tensor.detach()
    values = tensor.to(torch.float64) if not tensor.is_complex() else tensor.real.to(torch.float64)
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "values": values.flatten().tolist()}


def make(target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in files(pathlib.Path(folder)).items()}
    state = {"state_dict": Net().state_dict(), "dtypes": all_dtypes(), "views": views(), "parameters": dict(Net().named_parameters()),
             "complex128": {"weight": torch.tensor([1.0, 2.0], dtype=torch.complex128)}}
    expected = {name: {key: as_json(value) for key, value in tensors.items()} for name, tensors in state.items()}
    target.write_text(json.dumps({
        "schema": "weights_files/1",
        "source": f"torch {torch.__version__}, safetensors {safetensors.__version__}: tests/weights/python_files.py make",
        "files": data, "expected": expected}, indent=1) + "\n")


def load(path: pathlib.Path, weights_only: bool = True) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=weights_only)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        # Not torch.equal, which some dtypes lack.
        bytes_of = lambda t: t.contiguous().flatten().view(torch.uint8) if t.numel() else torch.empty(0)
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bytes_of(x), bytes_of(y))

    return set(a) == set(b) and all(same(a[name], b[name]) for name in a)


def check(program: str) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder_name:
        folder = pathlib.Path(folder_name)
        made = files(folder)
        for name in ["state_dict.pt", "dtypes.pt", "views.pt", "protocol5.pt", "before_1_6.pt", "dtypes.safetensors"]:
            for suffix in [".safetensors", ".pt"]:
                out = folder / f"converted{suffix}"
                subprocess.run([program, "convert", made[name], out, "--dtype", "keep"], check=True, stdout=subprocess.DEVNULL)
                good = equal(load(made[name], weights_only=False), load(out))  # PyTorch refuses its own protocol 5
                print(f"{'ok  ' if good else 'FAIL'} {name} -> {suffix}")
                failed += not good
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("json", type=pathlib.Path)
    commands.add_parser("check").add_argument("program")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.json)
        return 0
    return 1 if check(arguments.program) else 0


if __name__ == "__main__":
    sys.exit(main())
