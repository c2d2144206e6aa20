"""The process in which ``raftune tune`` races a whole step: threads are pinned by its environment before torch is loaded."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from raftune.compiler.step import compile_step
from raftune.dialects import registry
from raftune.lifetime import die_with
from raftune.targets import load_target, with_optimizer


def main(task: dict[str, Any]) -> int:
    """Race ``task["target"]`` from ``task["log"]``, which keeps the result; the descriptor ``task["answer"]`` gets it too.

    A second result follows the first if there are single compilers to race: they may take longer than anyone waits.
    """
    die_with(task["parent"])
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    target = with_optimizer(load_target(task["target"]), task["optimizer"])
    with registry.with_dialects(task["dialects"] or tuple(registry.installed())):
        step = compile_step(
            target.model, target.inputs, loss=target.loss, optimizer=target.optimizer, mode=task["mode"], log=task["log"]
        )
        if step.race is None:
            print("the plan computes another loss than eager", file=sys.stderr)
            return 1
        with os.fdopen(task["answer"], "w", encoding="utf-8") as answer:
            print(json.dumps(step.race.to_json()), file=answer, flush=True)
            step.race_singles(target.inputs)
            print(json.dumps(step.race.to_json()), file=answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
