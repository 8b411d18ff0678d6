"""The notebook runs from top to bottom, and is committed without what a run leaves in it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs the cells in the notebooks' folder; CellExecutionError if one raises."""
    with warnings.catch_warnings():
        # Imported here, and its warnings let pass: what jupyter deprecates in itself says nothing about this project.
        warnings.simplefilter("default")
        from nbclient import NotebookClient

        client = NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "notebooks")}}
        )
        return client.execute()


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")


def test_notebooks_are_committed_without_outputs():
    assert [path.name for path in NOTEBOOKS] == ["quickstart.ipynb"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert set(notebook.metadata) <= {"kernelspec", "language_info"}
        for cell in notebook.cells:
            assert cell.metadata == {}
            if cell.cell_type == "code":
                assert (cell.outputs, cell.execution_count) == ([], None), cell.source


def test_quickstart_runs_and_the_adapters_answer_in_their_forms(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # so that it installs nothing
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import json\nprint(json.dumps(answers))"))
    done = execute(notebook)

    answers = json.loads(printed(done.cells[-1]))
    assert set(answers) == {"base", "upper", "json", "xml"}
    assert answers["upper"] == answers["upper"].upper() != answers["base"]
    assert list(json.loads(answers["json"])) == ["answer"]
    assert answers["xml"].startswith("<answer>")
    assert answers["xml"].endswith("</answer>")
    assert "Paris" in answers["base"]

    maps = [printed(cell) for cell in done.cells if "pool_map(engine)" in cell.source]
    assert len(maps) == 2
    for text in maps:
        assert all(f"adapter {name}: " in text for name in ("upper", "json", "xml"))
    assert "keys and values: 0" not in maps[0]
    assert "keys and values: 0" in maps[1]
    assert "compiled after the start: 0" in maps[1]


def test_a_cell_that_raises_is_noticed():
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('no')")])
    with pytest.raises(CellExecutionError, match="no"):
        execute(notebook)
