"""Proposed regions: what is grouped, that a group can run as one, and that running groups as one changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.lowering import _contracted
from raftune.dialects.torch_ops import graph_module
from raftune.graph import capture, fused_region
from raftune.graph.fusion import Ancestry, contract, propose

aten = torch.ops.aten


def trace(function, *inputs):
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)


def proposals(function, *inputs):
    return {"+".join(o.op.split(".")[1] for o in r.workload.operators) for r in propose(trace(function, *inputs).graph)}


def node(module, name):
    return next(n for n in module.graph.nodes if n.name == name)


X, Y = torch.randn(64, 16), torch.randn(64, 16)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: (x + y).relu(), {"add+relu"}),
        (lambda x, y: F.layer_norm(x + y, (16,)), {"add+native_layer_norm"}),
        (lambda x, y: F.layer_norm(x, (16,)).relu(), {"native_layer_norm+relu"}),
        (lambda x, y: (x + y).view(1024).exp(), {"add+view+exp"}),
        (lambda x, y: ((x * y).exp(), (x * y).sum(0)), {"mul+exp", "mul+sum"}),
        (lambda x, y: x.mm(y.t()), set()),
        (lambda x, y: x.mm(y.t()).relu(), set()),
        (lambda x, y: (x.relu(), y.relu()), set()),
        (lambda x, y: x.relu().mm(y.t()).exp(), set()),
        (lambda x, y: F.dropout(x + y, 0.5), set()),
        (lambda x, y: (x[0] + y[0]).relu(), set()),
    ],
)
def test_what_is_grouped(function, expected):
    assert proposals(function, X, Y) == expected


def test_a_longer_chain_is_proposed_whole_and_in_pairs():
    assert proposals(lambda x, y: (x + y).exp().tanh(), X, Y) == {"add+exp+tanh", "add+exp", "exp+tanh"}


def test_what_lies_between_products_is_one_section_over_all_its_sizes():
    def rms_norm(x, y):
        x = x.mm(y.t())
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        x = x * scale
        first, second = x[:, :32], x[:, 32:]
        return torch.cat((-second, first), dim=-1).mm(y)

    assert "pow+mean+add+rsqrt+mul+slice+slice+neg+cat" in proposals(rms_norm, X, Y)
    assert proposals(lambda x, y: (x.relu().sum(0) + 1.0).exp(), torch.randn(8, 4), Y) == set()


def test_sections_and_chains_end_somewhere():
    def long(x, y):
        for _ in range(60):
            x = x.exp()
        return x

    lengths = sorted(len(r.workload.operators) for r in propose(trace(long, X, Y).graph))
    assert lengths[-1] == 48
    assert lengths.count(8) == 7


def test_a_diamond_is_one_group_and_a_path_through_something_else_is_not():
    def diamond(x, y):
        z = x + y
        return z.exp() * z.tanh()

    def detour(x, y):
        z = x + y
        return z.mm(y.t()).mm(x) * z

    assert "add+exp+tanh+mul" in proposals(diamond, X, Y)
    assert not any("add" in p for p in proposals(detour, X, Y))


def test_a_region_says_what_is_read_outside():
    def function(x, y):
        z = x + y
        mean = aten.native_layer_norm(z, [16], None, None, 1e-5)
        return z, mean[0], mean[2]

    module = trace(function, X, Y)
    (region,) = propose(module.graph)
    assert [(n.name, i) for n, i in region.results] == [("add", 0), ("native_layer_norm", 0), ("native_layer_norm", 2)]
    found = graph_module(region.workload)(X, Y)
    for got, wanted in zip(found, function(X, Y), strict=True):
        torch.testing.assert_close(got, wanted)


def test_equal_groups_are_one_workload():
    def function(x, y):
        return F.layer_norm(x + y, (16,)).mm(y.t()), F.layer_norm(y + x, (16,)).mm(x.t())

    first, second = propose(trace(function, X, Y).graph)
    assert first.workload == second.workload
    assert first.inputs != second.inputs


def test_what_writes_or_draws_is_no_member():
    module = trace(lambda x, y: aten.add_.Tensor(x.exp(), y).relu(), X, Y)
    assert fused_region([n for n in module.graph.nodes if n.op == "call_function"]) is None


def test_convexity():
    def function(x, y):
        z = x + y
        w = z.mm(y.t())
        return z.exp(), w

    module = trace(function, X, Y)
    ancestry = Ancestry(module.graph)
    assert ancestry.is_convex([node(module, "add"), node(module, "exp")])
    assert ancestry.is_convex([node(module, "add"), node(module, "t"), node(module, "mm")])
    chain = trace(lambda x: x.exp().relu().tanh(), X)
    assert not Ancestry(chain.graph).is_convex([node(chain, "exp"), node(chain, "tanh")])


def test_two_regions_that_wait_for_each_other_are_not_both_contracted():
    def function(x, y):
        a, b = x.exp(), y.exp()
        return a.tanh() + b, b.tanh() + a

    module = trace(function, X, Y)
    n = {v.name: v for v in module.graph.nodes}
    crossing = [fused_region([n["exp"], n["add_1"]]), fused_region([n["exp_1"], n["add"]])]
    assert None not in crossing
    contracted, fitting = _contracted(module, crossing)
    assert len(fitting) == 1
    program = Program(contracted, [BoundKernel(r, graph_module(r.workload)) for r in fitting])
    for _ in range(2):
        for got, wanted in zip(program([X, Y]), function(X, Y), strict=True):
            torch.testing.assert_close(got, wanted)


def test_nothing_is_moved_across_a_write_or_out_of_the_order_of_random_numbers():
    def write(x, y):
        z = x.exp()
        w = y.sin()
        y.copy_(z)
        return z.tanh() + w

    def draw(x, y):
        z = x.exp()
        first, second = torch.rand_like(x), torch.rand_like(y)
        return z.tanh() + second, first

    for function in (write, draw):
        module = trace(function, X, Y.clone())
        n = {v.name: v for v in module.graph.nodes}
        before = [node.name for node in module.graph.nodes]
        region = fused_region([n["exp"], n["tanh"], n["add"]])
        assert not contract(module.graph, region.nodes)
        assert [node.name for node in module.graph.nodes] == before


def test_what_a_region_needs_is_moved_before_it_and_views_are_made_again():
    def function(x, y):
        z = x + y
        flat = z.view(1024)
        late = y.mm(y.t()).sum()
        return flat.exp() * late, flat.view(16, 64), flat

    module = trace(function, X, Y)
    n = {v.name: v for v in module.graph.nodes}
    region = fused_region([n["add"], n["view"], n["exp"], n["mul"]])
    contracted, fitting = _contracted(module, [region])
    assert len(fitting) == 1
    program = Program(contracted, [BoundKernel(r, graph_module(r.workload)) for r in fitting])
    for _ in range(2):
        for got, wanted in zip(program([X, Y]), function(X, Y), strict=True):
            torch.testing.assert_close(got, wanted)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.end = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.end(x.relu()) * torch.sigmoid(x)


@pytest.mark.parametrize("longest_first", [True, False])
def test_steps_with_every_proposal_as_one_follow_eager(longest_first):
    torch.manual_seed(0)
    model, inputs = Block(), (torch.randn(64, 16), torch.randint(16, (64,)))
    twin = copy.deepcopy(model)
    graph = capture(model, inputs, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)).reinplaced()
    taken, regions = set(), []
    for region in sorted(propose(graph.graph_module.graph), key=lambda r: len(r.nodes), reverse=longest_first):
        if taken.isdisjoint(region.nodes):
            taken |= set(region.nodes)
            regions.append(region)
    module, fitting = _contracted(graph.graph_module, regions)
    assert len(fitting) == len(regions) > 1
    program = Program(module, [BoundKernel(r, graph_module(r.workload)) for r in fitting])
    step, optimizer = graph.bind(), torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        found = step.run(lambda *tensors: program(list(tensors)), inputs).loss
        optimizer.zero_grad()
        wanted = F.cross_entropy(twin(inputs[0]), inputs[1])
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(found, wanted.detach())
    assert program.kernels == len(fitting)
    for (name, value), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=name)


def test_a_region_whose_kernel_fails_gives_its_place_back():
    def function(x, y):
        return F.layer_norm(x + y, (16,)).tanh()

    module = trace(function, X, Y)
    region = max(propose(module.graph), key=lambda r: len(r.nodes))

    def broken(*_):
        raise RuntimeError("no such instruction")

    contracted, (fitting,) = _contracted(module, [region])
    program = Program(contracted, [BoundKernel(fitting, broken)])
    for _ in range(2):
        torch.testing.assert_close(program([X, Y]), function(X, Y))
    assert program.kernels == 0


def test_contract_leaves_the_graph_valid():
    module = trace(lambda x, y: (x + y).view(1024).exp().view(64, 16).mm(y.t()), X, Y)
    for region in propose(module.graph):
        assert contract(module.graph, region.nodes)
        module.graph.lint()
    assert isinstance(module.graph, fx.Graph)
