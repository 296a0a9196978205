"""What the scripts for several ranks have in common: they run a function on each, and write the first one's results."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

Sections = dict[str, list]


def run(rank: int, ranks: int, sections_of: Callable[[int], Sections], store: str, queue: multiprocessing.Queue) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    sections = sections_of(rank)
    if rank == 0:
        queue.put(sections)
    dist.barrier()
    dist.destroy_process_group()


def write_results(path: str, schema: str, facts: dict, ranks: int, sections_of: Callable[[int], Sections]) -> None:
    """Calls sections_of(rank) on all ranks of a group over Gloo. Writes rank 0's sections as JSON, a line for each case, after the
    facts. sections_of must be a function of a module, since other processes call it."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, ranks, sections_of, folder + "/store", queue)) for rank in range(ranks)]
        for process in processes:
            process.start()
        sections = queue.get()
        for process in processes:
            process.join()
    head = {"schema": schema, "peer": f"PyTorch {torch.__version__}", **facts}
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, cases in sections.items():
        lines = ",\n".join("  " + json.dumps(case) for case in cases)
        parts.append(f' "{name}": [\n{lines}\n ]')
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(parts) + "\n}\n")
