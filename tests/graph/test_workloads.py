import json
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from raftune.dialects.torch_ops import graph_module
from raftune.graph.workloads import merge_tasks, tasks_of, workload_from_call, workload_of
from raftune.workload import InvalidRecord, Workload

aten = torch.ops.aten


def trace(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_equal_operators_collapse_into_one_task_with_a_weight():
    def step(x, w):
        return torch.mm(torch.mm(torch.mm(x, w), w), w).relu()

    tasks = tasks_of(trace(step, torch.randn(8, 8), torch.randn(8, 8)))
    assert {t.workload.op: t.weight for t in tasks} == {"aten.mm.default": 3, "aten.relu.default": 1}


def test_weights_add_up_within_a_step_and_do_not_across_ways_to_run_it():
    module = trace(lambda x: x.relu(), torch.randn(3))
    (both,) = tasks_of(module, module)
    assert both.weight == 2
    (merged,) = merge_tasks(tasks_of(module), [both])
    assert merged.weight == 2


def test_views_random_operators_and_factories_are_not_tasks():
    def step(x):
        y = x.t().unsqueeze(0).expand(2, -1, -1)
        return y + torch.bernoulli(torch.full_like(y, 0.5)) + torch.zeros(2, 1, 1)

    ops = {t.workload.op for t in tasks_of(trace(step, torch.randn(2, 3)))}
    assert ops == {"aten.add.Tensor"}


@pytest.mark.parametrize(("dropout", "tasks"), [(0.0, 1), (0.5, 0)])
def test_attention_is_a_task_only_without_dropout(dropout, tasks):
    def step(q):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout)[0]

    assert len(tasks_of(trace(step, torch.randn(1, 2, 8, 4)))) == tasks


def test_node_and_call_give_the_same_identity():
    b, x, w = torch.randn(16), torch.randn(4, 8), torch.randn(16, 8)
    module = trace(lambda b, x, w: torch.addmm(b, x, w.t()), b, x, w)
    node = next(n for n in module.graph.nodes if n.target is aten.addmm.default)
    assert workload_of(node).digest == workload_from_call(aten.addmm.default, (b, x, w.t())).digest


def test_identity_does_not_depend_on_how_arguments_are_passed():
    x = torch.randn(2, 3)
    spelled_out = workload_from_call(aten.add.Tensor, (x, x), {"alpha": 1})
    assert spelled_out.digest == workload_from_call(aten.add.Tensor, (x, x)).digest
    by_keyword = workload_from_call(aten.sum.dim_IntList, (x,), {"dim": [1]})
    assert by_keyword.digest == workload_from_call(aten.sum.dim_IntList, (x, [1], False)).digest


@pytest.mark.parametrize(
    "other",
    [
        lambda: workload_from_call(aten.mm.default, (torch.randn(4, 4), torch.randn(4, 4).t())),  # stride
        lambda: workload_from_call(aten.mm.default, (torch.randn(4, 4), torch.randn(4, 5))),  # shape
        lambda: workload_from_call(aten.mm.default, (torch.randn(4, 4).double(), torch.randn(4, 4).double())),  # dtype
        lambda: workload_from_call(aten.mm.default, (x := torch.randn(4, 4), x)),  # the same tensor twice
        lambda: workload_from_call(aten.mm.default, (torch.randn(4, 4), w := torch.randn(4, 4)), constant=[w]),
    ],
)
def test_what_changes_the_work_changes_the_digest(other):
    base = workload_from_call(aten.mm.default, (torch.randn(4, 4), torch.randn(4, 4)))
    assert other().digest != base.digest


def test_only_used_results_are_part_of_the_workload():
    def step(x):
        return aten.native_layer_norm(x, [4], None, None, 1e-5)[0]

    module = trace(step, torch.randn(2, 4))
    module.graph.eliminate_dead_code()
    (task,) = tasks_of(module)
    assert [(o.node, o.index) for o in task.workload.outputs] == [(0, 0)]
    x = torch.randn(2, 4)
    torch.testing.assert_close(graph_module(task.workload)(x), torch.nn.functional.layer_norm(x, [4]))


def test_value_ranges_follow_from_the_operator():
    embedding = workload_from_call(aten.embedding.default, (torch.randn(10, 4), torch.zeros(3, dtype=torch.int64)))
    assert (embedding.inputs[1].low, embedding.inputs[1].high) == (0, 9)
    scores, target = torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)
    loss = workload_from_call(aten.nll_loss_forward.default, (scores, target, None, 1, -100))
    assert (loss.inputs[1].low, loss.inputs[1].high) == (0, 4)
    assert workload_from_call(aten.rsqrt.default, (torch.rand(3),)).inputs[0].low > 0
    assert workload_from_call(aten.pow.Tensor_Scalar, (torch.rand(3), 2)).inputs[0].low is None
    assert workload_from_call(aten.pow.Tensor_Scalar, (torch.rand(3), 0.5)).inputs[0].low > 0


def test_integers_of_unknown_range_are_not_a_workload():
    with pytest.raises(ValueError, match="valid integers"):
        workload_from_call(aten.cumsum.default, (torch.zeros(3, dtype=torch.int64), 0))


def test_an_in_place_update_lists_what_it_mutates():
    parameters, gradients, buffers = ([torch.randn(3)] for _ in range(3))
    workload = workload_from_call(
        aten._fused_sgd_.tensor_lr,
        (parameters, gradients, buffers),
        {
            "weight_decay": 0.0,
            "momentum": 0.9,
            "lr": torch.tensor(0.1),
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            "is_first_step": False,
        },
    )
    assert workload.outputs == ()
    assert 0 in workload.mutates
    assert 2 in workload.mutates


def test_json_round_trip_keeps_the_digest():
    x = torch.randn(1, 3, 8, 8)
    arguments = (x, torch.randn(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    workload = workload_from_call(aten.convolution.default, arguments)
    again = Workload.from_json(json.loads(workload.canonical))
    assert again == workload
    assert again.digest == workload.digest
    infinite = workload_from_call(aten.masked_fill.Scalar, (x, x > 0, float("-inf")))
    assert Workload.from_json(json.loads(infinite.canonical)).digest == infinite.digest


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"operators": 3}', '{"operators":[{"op":"a","args":[{"in":0,"out":1}],"kwargs":{}}]}']
)
def test_foreign_json_is_refused(text):
    with pytest.raises(InvalidRecord):
        Workload.from_json(json.loads(text))


def test_digest_is_stable_across_processes():
    # A literal, so that a change of the format cannot go unnoticed: it would orphan every log.
    program = (
        "import torch; from raftune.graph.workloads import workload_from_call as w;"
        "print(w(torch.ops.aten.addmm.default, (torch.ones(16), torch.ones(4, 8), torch.ones(16, 8).t())).digest)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "9959bd078cd41ce0f0aeca45d88ec110"
