"""Every notebook runs from its first cell to its last, in one kernel, with the values of its parameters made small."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
TINY = 'OVERRIDES = ["preset=debug", "evaluation.video=false", "evaluation.num_envs=2", "logging.tensorboard=false"]'
SMALL = {
    "01_first_run": f"{TINY}\nEPISODES = 2",
    "02_own_environment": TINY,
    "03_own_algorithm": TINY,
    "04_world_models_and_dreams": "UPDATES = 3",
    "05_comparing_seeds": f"{TINY}\nSEEDS = 2",
    "06_sweeps": "OVERRIDES = ['total_timesteps=500', 'evaluation.num_envs=2']\nVALUES = [0.0003, 0.001]",
    "07_exporting_a_policy": TINY,
}


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all of them: importing torch anew would take longer than the notebooks."""
    home = tmp_path_factory.mktemp("kernel")
    manager = jupyter_client.KernelManager(kernel_name="python3", connection_file=str(home / "kernel.json"))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    places = {name: str(home) for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "IPYTHONDIR")}
    manager.start_kernel(env={**os.environ, **places, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    yield manager
    manager.shutdown_kernel(now=True)


def execute(kernel: Any, notebook: Any, folder: Path) -> None:
    first = f"%reset -f\nimport os; os.chdir({str(folder)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbclient.NotebookClient(notebook, km=kernel, timeout=100).execute(cleanup_kc=False)


def test_every_notebook_is_listed_small_and_kept_without_outputs() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(SMALL)
    page = (FOLDER / "README.md").read_text()
    for name, small in SMALL.items():
        notebook = read(name)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert f"`{name}.ipynb`" in page
        assert all(not cell.outputs and cell.execution_count is None for cell in cells), name
        (parameters,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
        names = {line.partition("=")[0].strip() for line in parameters.source.splitlines()}
        assert names == {line.partition("=")[0].strip() for line in small.splitlines()}, name


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_from_its_first_cell_to_its_last(name: str, kernel: Any, tmp_path: Path) -> None:
    if name == "03_own_algorithm":  # it looks for examples/my_algorithm above the folder it runs in
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    notebook = read(name)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = SMALL[name]
    execute(kernel, notebook, tmp_path)


def test_a_cell_that_raises_fails_the_test(kernel: Any, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(kernel, notebook, tmp_path)
