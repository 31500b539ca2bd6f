"""The Python of the README and the guide, as a reader tries it."""

import json
import re

import pytest
from conftest import ROOT


def blocks(document):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


CASES = [(document, n, code) for document in ("README.md", "docs/python.md") for n, code in enumerate(blocks(document))]


@pytest.mark.parametrize("code", [pytest.param(code, id=f"{document}-{n}") for document, n, code in CASES])
def test_a_block_of_a_document_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "import ray" in code:
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    exec(compile(code, "block", "exec"), {"__name__": "block"})
    if "import ray" in code:
        said = capsys.readouterr().out
        assert "kitchen" in said and "garden" in said
        ray.shutdown()
    elif "Where is Mary" in code:
        assert re.search("kitchen|office", capsys.readouterr().out)


def test_the_documents_have_blocks():
    assert len(CASES) >= 6


def test_the_notebook_runs(monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    path = ROOT / "crates/armt-py/examples/read_a_book.ipynb"
    monkeypatch.chdir(path.parent)
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    assert "Mary -> office" in capsys.readouterr().out
