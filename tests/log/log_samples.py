"""Workloads, candidates and results for the tests of the log and of what reads it."""

from raftune.device import Device
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.workload import Candidate, In, Operator, Out, TensorSpec, Workload


def matmul(m=64, n=32, k=16):
    specs = TensorSpec("float32", (m, k), (k, 1)), TensorSpec("float32", (k, n), (n, 1))
    result = TensorSpec("float32", (m, n), (n, 1))
    return Workload((Operator("aten.mm.default", (In(0), In(1))),), specs, (Out(0),), (result,))


def ok(time_us, cost_s=1.0):
    return Outcome(Status.OK, time_us, time_us * 0.99, time_us * 1.01, repeats=20, max_error=0.5, build_s=0.1, cost_s=cost_s)


def failed(status, message=""):
    return Outcome(status, message=message, cost_s=0.5)


def against(ratio, ratio_high, default_us=100.0, status=Status.OK):
    return Rematch(status, ratio * default_us, default_us, ratio, ratio_high, rounds=15, cost_s=2.0)


DEFAULT = Candidate("base", "1.0", {"formulation": "default"})
FAST = Candidate("fast", "2.0", {"tile": [8, 16]})
FASTER = Candidate("faster", "3.0", {"unroll": 4})
DEVICE = Device("cpu", "Some CPU", 2, ("avx2",), 1)
POLICY = Policy()
