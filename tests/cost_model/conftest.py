"""A made-up world with a known rule for which candidate is fast, and logs of measurements in it."""

import math
import random

import pytest

from raftune.device import Device
from raftune.log import TrainingRow
from raftune.measurement import Outcome, Status
from raftune.workload import Candidate, In, Operator, Out, TensorSpec, Workload


class World:
    """Products of all sizes. ``skinny`` is fast on narrow ones, ``tiled`` by its tile, ``fragile`` fails on odd sizes."""

    device = Device("cpu", "Some CPU", 2, ("avx2",), 1)
    default = Candidate("base", "1", {"formulation": "default"})
    skinny = Candidate("skinny", "1", {"packed": True})
    fragile = Candidate("fragile", "1", {"style": "plain"})
    tiled = tuple(Candidate("tiled", "1", {"tile": 2**i}) for i in range(2, 6))
    candidates = (default, skinny, fragile, *tiled)

    @staticmethod
    def workload(m, n, k):
        specs = TensorSpec("float32", (m, k), (k, 1)), TensorSpec("float32", (k, n), (n, 1))
        result = TensorSpec("float32", (m, n), (n, 1))
        return Workload((Operator("aten.mm.default", (In(0), In(1))),), specs, (Out(0),), (result,))

    @classmethod
    def log_ratio(cls, workload, candidate):
        """The rule; ``None`` is a failure."""
        (m, k), (_, n) = (spec.shape for spec in workload.inputs)
        match candidate.dialect:
            case "skinny":
                return math.log(0.4 if min(m, n) <= 32 else 1.8)
            case "fragile":
                return None if k % 2 else math.log(0.75)
            case "tiled":
                return 0.12 * abs(math.log2(candidate.config["tile"]) - math.log2(k) / 2) - 0.2
        return 0.0

    @classmethod
    def best(cls, workload):
        return min(r for c in cls.candidates if (r := cls.log_ratio(workload, c)) is not None)

    @classmethod
    def rows(cls, workloads, seed=0, noise=0.01):
        draw = random.Random(seed)
        for workload in workloads:
            default_us = 10.0 * math.prod(workload.results[0].shape) ** 0.5
            for candidate in cls.candidates:
                ratio = cls.log_ratio(workload, candidate)
                if ratio is None:
                    outcome = Outcome(Status.CRASH, message="odd")
                else:
                    outcome = Outcome(Status.OK, default_us * math.exp(ratio + draw.gauss(0.0, noise)))
                yield TrainingRow(workload, candidate, cls.device.digest, outcome, candidate == cls.default, cls.device)

    @classmethod
    def workloads(cls, count, seed):
        draw = random.Random(seed)
        sizes = [8, 16, 27, 32, 64, 81, 128, 243, 256, 512, 1024]
        found = {}
        while len(found) < count:
            workload = cls.workload(*(draw.choice(sizes) for _ in range(3)))
            found[workload.digest] = workload
        return list(found.values())


@pytest.fixture(scope="session")
def world():
    return World


@pytest.fixture(scope="session")
def rows(world):
    return list(world.rows(world.workloads(80, seed=1)))


@pytest.fixture
def unseen(world, rows):
    seen = {row.workload.digest for row in rows}
    return [w for w in world.workloads(60, seed=2) if w.digest not in seen]
