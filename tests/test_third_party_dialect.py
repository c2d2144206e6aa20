import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs" / "dialects.md"

TARGET = """
    import torch

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return torch.mm(x, self.weight).sum()

    def make():
        return Product(), torch.randn(6, 8)
"""


@pytest.fixture
def installed(tmp_path):
    """The dialect of the documentation, installed as a distribution of its own; a function that runs raftune beside it."""
    example = DOCS.read_text().split("```python\n")[1].split("```")[0]
    site = tmp_path / "site"
    metadata = site / "mylib-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "mylib_raftune.py").write_text(example)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[raftune.dialects]\neinsum = mylib_raftune:MatmulByEinsum\n")
    (tmp_path / "product.py").write_text(textwrap.dedent(TARGET))

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "raftune.cli", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    return run


def test_a_dialect_installed_from_outside_is_listed_and_tuned(installed, tmp_path):
    listed = {row["name"]: row for row in json.loads(installed("dialects", "--json"))}
    assert listed["einsum"]["available"]

    told = installed("tune", "model", "product.py:make", "--dialects", "einsum", "--budget", "60s", "--threads", "1", "--json")
    assert json.loads(told.splitlines()[-1])["measured"] > 0
    with sqlite3.connect(tmp_path / "raftune.sqlite") as log:
        rows = log.execute(
            "select m.status from measurement m join candidate c on c.id = m.candidate_id where c.dialect = 'einsum'"
        ).fetchall()
    assert ("ok",) in rows
