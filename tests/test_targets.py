import sys
import textwrap

import pytest
import torch

from raftune.models import BUILT_IN, Target
from raftune.targets import TargetError, load_target, with_optimizer


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    "returned",
    [
        "model, inputs",
        "model, inputs, loss",
        "model, inputs, loss, optimizer",
        "{'model': model, 'inputs': inputs, 'loss': loss}",
        "raftune.models.Target(model, inputs, loss, optimizer)",
    ],
)
def test_a_callable_in_a_file_may_return_any_of_the_forms(tmp_path, returned):
    path = write(
        tmp_path / "forms.py",
        f"""
        import torch, raftune.models
        def make():
            model, inputs = torch.nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2))
            loss, optimizer = torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1)
            return {returned}
        """,
    )
    target = load_target(f"{path}:make")
    assert isinstance(target.model, torch.nn.Linear)
    assert len(target.inputs) == 2


def test_a_file_can_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "layers_of_mine.py", "import torch\nmodel = torch.nn.Linear(2, 2)\n")
    path = write(
        tmp_path / "uses_neighbour.py",
        "import torch, layers_of_mine\ndef make(): return layers_of_mine.model, torch.randn(1, 2)\n",
    )
    assert isinstance(load_target(f"{path}:make").model, torch.nn.Linear)


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_mine").mkdir()
    write(
        tmp_path / "package_of_mine" / "models.py",
        "import torch\ndef make(): return torch.nn.Linear(2, 2), torch.randn(1, 2)\n",
    )
    assert isinstance(load_target("package_of_mine.models:make"), Target)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp", r"unknown target 'gtp'.*gpt"),
        ("nowhere.py:make", r"no file nowhere\.py"),
        ("no.such.module:make", r"module 'no\.such\.module' cannot be imported: ModuleNotFoundError"),
        (":make", "unknown target"),
    ],
)
def test_what_does_not_exist_is_named(name, message):
    with pytest.raises(TargetError, match=message):
        load_target(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import missing_thing\ndef make(): pass", r"cannot be imported: ModuleNotFoundError.*broken\.py, line 1"),
        ("def make(:", "cannot be imported: SyntaxError"),
        ("def other(): pass", r"no callable 'make'; it has: other"),
        ("def make(): raise KeyError('depth')", r"failed: KeyError: 'depth' \(broken\.py, line 1\)"),
        ("def make(): return 3", "returned int"),
        ("def make(): return 3, 4", "returned int as the model"),
        ("def make(): return {'net': 1}", r"mapping with keys \['net'\]"),
    ],
)
def test_mistakes_in_a_users_file_are_one_line_with_the_place(tmp_path, text, message):
    path = write(tmp_path / "broken.py", text)
    with pytest.raises(TargetError, match=message) as caught:
        load_target(f"{path}:make")
    assert "\n" not in str(caught.value)


def test_the_optimizer_can_be_named_instead():
    target = BUILT_IN["mlp"]()
    assert isinstance(with_optimizer(target, "adamw").optimizer(target.model.parameters()), torch.optim.AdamW)
    assert with_optimizer(target, "none").optimizer is None
    assert with_optimizer(target, None) is target
