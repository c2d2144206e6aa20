"""Proposals by pattern: RAF's fusion cases with the patterns of the dialects, and the matcher with patterns of its own."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.lowering import _contracted
from raftune.compiler.proposals import proposed_regions, proposed_tasks
from raftune.dialects import registry
from raftune.dialects.torch_ops import graph_module
from raftune.graph import capture
from raftune.graph.fusion import propose
from raftune.graph.fusion.patterns import matches
from raftune.pattern import ANY, NUMBER, Declared, Pattern, either, op

aten = torch.ops.aten


def trace(function, *inputs):
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)


def by_pattern(module):
    """Regions that patterns alone give: what the rules group is refused."""
    return propose(module.graph, registry.patterns(), lambda workload: False)


def names(region):
    return "+".join(o.op.split(".")[1] for o in region.workload.operators)


def proposals(function, *inputs):
    return {names(r) for r in by_pattern(trace(function, *inputs))}


def t(*shape):
    return torch.empty(shape)


X, W, B, R = t(32, 16), t(8, 16), t(8), t(32, 8)

# RAF, tests/python/pass/test_pass_fuse_*.py: the product, its inputs, and the operator that it becomes.
RAF_PRODUCTS = {
    "matmul": (torch.mm, (X, W.t()), "mm"),
    "dense": (F.linear, (X, W), "mm"),
    "batch_matmul": (torch.bmm, (t(4, 32, 16), t(4, 16, 8)), "bmm"),
}
RAF_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "gelu": F.gelu}


@pytest.mark.parametrize("scale", [None, 1, 0.5])
@pytest.mark.parametrize("activation", RAF_ACTIVATIONS)
@pytest.mark.parametrize("product", RAF_PRODUCTS)
def test_products_with_scaled_bias_and_activation(product, activation, scale):
    multiply, inputs, name = RAF_PRODUCTS[product]
    activate = RAF_ACTIVATIONS[activation]

    def function(x, w, bias):
        out = multiply(x, w)
        return activate(out if scale is None else out + scale * bias if scale != 1 else out + bias)

    members = [name, *{None: [], 1: ["add"], 0.5: ["mul", "add"]}[scale]]
    members += [] if activation == "none" else [activation]
    found = proposals(function, *inputs, B)
    assert found == (set() if len(members) == 1 else {"+".join(members)})


def test_a_lone_dense_is_no_region():
    assert proposals(F.linear, X, W, B) == set()
    assert proposals(lambda x, w: F.linear(x.view(4, 8, 16), w).view(32, 8), X, W) == set()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w, b, r: torch.add(F.linear(x, w), b, alpha=2), {"mm+add"}),
        (lambda x, w, b, r: F.linear(x, w) / 2 + b, {"mm+div+add"}),
        (lambda x, w, b, r: r + F.linear(x, w, b), {"addmm+add"}),
        (lambda x, w, b, r: (r.view(4, 8, 8) + F.linear(x.view(4, 8, 16), w, b)).relu(), {"addmm+view+add+relu"}),
        (lambda x, w, b, r: F.linear(x, w, b).relu() + r, {"addmm+relu"}),
        (lambda x, w, b, r: F.linear(x, w, b).t().relu(), set()),
        (lambda x, w, b, r: F.linear(x, w, b).exp(), set()),
        (lambda x, w, b, r: F.linear(x[:1], w, b).expand(4, 8).relu(), set()),
        (lambda x, w, b, r: (F.linear(x, w, b) * r).relu(), set()),
        (lambda x, w, b, r: F.linear(x, w, b) + F.linear(x, w), {"addmm+add"}),
    ],
)
def test_what_libraries_take_in_one_call(function, expected):
    assert proposals(function, X, W, B, R) == expected


def test_convolutions():
    image, kernel, bias, residual = t(2, 4, 8, 8), t(4, 4, 3, 3), t(4), t(2, 4, 8, 8)

    def function(x, w, b, r):
        return F.conv2d(x, w, b, padding=1).relu(), (F.conv2d(x, w, padding=1) + r).relu(), F.conv2d(x, w)

    assert proposals(function, image, kernel, bias, residual) == {"convolution+relu", "convolution+add+relu"}


def test_a_diamond_inside_is_not_cut_and_one_read_outside_is_no_match():
    """A library's kernel gives its last result only; what is read elsewhere as well ends the region before."""

    def whole(x, w, b):
        y = F.linear(x, w, b)
        return F.gelu(y) * y

    def middle(x, w, b, r):
        total = F.linear(x, w, b) + r
        return total.relu(), total

    assert proposals(whole, X, W, B) == set()
    assert proposals(middle, X, W, B, R) == {"addmm+add"}


def test_a_diamond_gives_several_results_where_its_dialect_takes_them():
    def function(x, w, b):
        y = F.linear(x, w, b)
        return F.gelu(y), y.exp()

    module = trace(function, X, W, B)
    pattern = Pattern(op("aten.gelu.default")(op("aten.addmm.default")()))
    (region,) = propose(module.graph, [Declared(pattern, lambda workload: True)], lambda workload: False)
    assert [node.name for node, _ in region.results] == ["addmm", "gelu"]


def test_concat_ends_a_region_and_does_not_join_two():
    def function(x, w, b):
        y = F.linear(x, w, b)
        return torch.cat([y.relu(), F.linear(x, w).tanh()])

    assert proposals(function, X, W, B) == {"addmm+relu", "mm+tanh"}


def test_tuple_results_are_looked_through():
    norm, relu = op("aten.native_layer_norm.default")(ANY), op("aten.relu.default")
    module = trace(lambda x: F.layer_norm(x, (16,)).relu(), X)
    (region,) = propose(module.graph, [Declared(Pattern(relu(norm)), lambda w: True)], lambda w: False)
    assert names(region) == "native_layer_norm+relu"
    assert [(node.name, i) for node, i in region.results] == [("relu", 0)]


def test_nothing_that_writes_is_a_member_and_no_region_runs_across_a_write():
    def writes(x, w, b):
        return F.linear(x, w, b).relu_()

    def between(x, w, b):
        y = F.linear(x, w)
        b.copy_(x[0, :8])
        return (y + b).relu()

    assert proposals(writes, X, W, B.clone()) == set()
    module = trace(between, X, W, B.clone())
    for region in by_pattern(module):
        assert _contracted(module, [region])[1] == []


def test_equal_regions_share_one_workload_and_one_task():
    def function(x, y, v, w, b):
        return F.linear(x, w, b).relu(), F.linear(y, v, b).relu()

    module = trace(function, X, t(32, 16), W, t(8, 16), B)
    first, second = by_pattern(module)
    assert first.workload == second.workload
    assert first.inputs != second.inputs
    assert [task.weight for task in proposed_tasks(module) if task.workload == first.workload] == [2]


def test_what_only_the_default_can_do_is_no_task():
    module = trace(lambda x, y: F.layer_norm(x + y, (64,)), t(64, 64), t(64, 64))
    with registry.with_dialects(["aten"]):
        assert proposed_regions(module.graph) == []
    with registry.with_dialects(["aten", "tvm"]):
        assert {names(r) for r in proposed_regions(module.graph)} == {"add+native_layer_norm"}


def test_patterns_are_those_of_the_enabled_dialects():
    with registry.with_dialects(["tvm"]):
        default = registry.patterns()
    with registry.with_dialects(["tvm", "onednn"]):
        assert len(registry.patterns()) > len(default) > 0


class Twice(nn.Module):
    """Two equal layers with a residual sum, and a classifier."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(x + self.layers[0](x)), y)


def test_a_step_with_its_pattern_regions_as_one_gives_what_eager_gives():
    torch.manual_seed(0)
    model, inputs = Twice(), {"x": torch.randn(48, 16), "y": torch.randint(5, (48,))}
    graph = capture(model, inputs)
    regions = by_pattern(graph.graph_module)
    found = sorted(names(r) for r in regions)
    assert sum("nll_loss_backward" in name for name in found) == 1
    assert found.count("addmm+relu") == 2
    taken, disjoint = set(), []
    for region in sorted(regions, key=lambda r: -len(r.nodes)):
        if taken.isdisjoint(region.nodes):
            taken |= set(region.nodes)
            disjoint.append(region)
    module, fitting = _contracted(graph.graph_module, disjoint)
    assert len(fitting) == len(disjoint)
    program = Program(module, [BoundKernel(r, graph_module(r.workload)) for r in fitting])
    result = graph.bind().run(lambda *tensors: program(list(tensors)), inputs).loss
    torch.testing.assert_close(result, model(**inputs).detach())
    assert program.kernels == len(fitting)


def test_the_start_of_the_backward_does_not_wait_for_the_loss():
    graph = capture(Twice(), {"x": torch.randn(48, 16), "y": torch.randint(5, (48,))}).graph_module.graph
    (gradient,) = graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default)
    assert gradient.args[0].all_input_nodes == []


def test_the_pattern_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text()
    found = {}
    exec(next(block for block in text.split("```python\n")[1:] if "linear_relu" in block).split("```")[0], found)
    module = trace(lambda x, w, b: ((x @ w + b).relu(), F.linear(x, w.t(), b).relu()), X, W.t(), B)
    regions = propose(module.graph, [Declared(found["linear_relu"], lambda w: True)], lambda w: False)
    assert [names(r) for r in regions] == ["mm+add+relu", "addmm+relu"]


# The matcher alone.

MM, ADD, MUL, RELU = (op(f"aten.{name}") for name in ("mm.default", "add.Tensor", "mul.Tensor", "relu.default"))


def found_members(pattern, function, *inputs):
    """The names of the members of every match, by last operator."""
    module = trace(function, *inputs)
    return [sorted(n.name for n in members) for node in module.graph.nodes for members in matches(pattern, node)]


def test_operands_are_matched_in_order_unless_commutative():
    plain, either_order = ADD(MM(), ANY), op("aten.add.Tensor", commutative=True)(MM(), ANY)
    for function, ordered in ((lambda x, w: x @ w + x, 1), (lambda x, w: x + x @ w, 0)):
        assert len(found_members(Pattern(plain), function, t(4, 4), t(4, 4))) == ordered
        assert len(found_members(Pattern(either_order), function, t(4, 4), t(4, 4))) == 1


def test_one_object_is_one_node_and_two_objects_are_two():
    same, a, b = RELU(ANY), RELU(ANY), RELU(ANY)
    square, product = (lambda x: x.relu() * x.relu()), (lambda x: (y := x.relu()) * y)
    assert found_members(Pattern(MUL(same, same)), product, X) == [["mul", "relu"]]
    assert found_members(Pattern(MUL(same, same)), square, X) == []
    assert found_members(Pattern(MUL(a, b)), square, X) == [["mul", "relu", "relu_1"]]
    assert found_members(Pattern(MUL(a, b)), product, X) == []


def test_alternatives_come_in_their_order_and_numbers_are_no_tensors():
    pattern = Pattern(RELU(either(MUL(MM(), NUMBER), MM(), ANY)))
    assert found_members(pattern, lambda x, w: (2 * (x @ w)).relu(), X, W.t()) == [["mm", "mul", "relu"], ["relu"]]
    assert found_members(pattern, lambda x, w: ((x @ w) * w[0]).relu(), X, W.t()) == [["relu"]]


def test_readers_beside_the_last_operator_join_where_they_are():
    relu = RELU(ANY)
    pattern = Pattern(MM(relu, ANY), beside=(op("aten.sum.dim_IntList")(relu),))

    def with_sum(x, w):
        return x.relu() @ w, x.relu().sum(0), (y := x.relu()) @ w, y.view(32, 2, 8).sum(0)

    found = found_members(pattern, with_sum, X, W.t())
    assert found == [["mm", "relu"], ["mm_1", "relu_2", "sum_2"]]


def test_a_match_inside_another_is_left_out_and_a_refused_one_gives_way_to_the_next():
    pattern = Pattern(either(RELU(ADD(MM(), ANY)), ADD(MM(), ANY), RELU(MM())))
    module = trace(lambda x, w, b: (x @ w + b).relu(), X, W.t(), B)

    def regions(accepts):
        return [names(r) for r in propose(module.graph, [Declared(pattern, accepts)], lambda w: False)]

    assert regions(lambda workload: True) == ["mm+add+relu"]
    assert regions(lambda workload: len(workload.operators) < 3) == ["mm+add"]
    assert regions(lambda workload: False) == []


def test_a_set_of_nodes_is_proposed_once():
    pattern = Pattern(op("aten.native_layer_norm.default")(ADD(ANY, ANY)))
    module = trace(lambda x, y: F.layer_norm(x + y, (64,)), t(64, 64), t(64, 64))
    assert len(propose(module.graph, [Declared(pattern, lambda w: True)] * 2)) == 1


def test_a_match_that_something_outside_runs_through_is_no_region():
    def function(x, w):
        y = x @ w
        return (y + y.exp()).relu()

    assert proposals(function, t(16, 16), t(16, 16)) == set()
    pattern = Pattern(ADD(MM(), ANY))
    module = trace(function, t(16, 16), t(16, 16))
    assert propose(module.graph, [Declared(pattern, lambda w: True)], lambda w: False) == []
