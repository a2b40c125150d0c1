"""The notebooks of docs/, executed cell by cell on the tiny model: one for each stage that a subclass may replace."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from paths import MODEL, ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
STAGES = {"generate", "score", "compute_advantages", "compute_loss"}
OUTPUTS = {  # the fields of nbformat 4
    "stream": {"output_type", "name", "text"},
    "display_data": {"output_type", "data", "metadata"},
    "execute_result": {"output_type", "data", "metadata", "execution_count"},
}
LENGTH = "max_completion_length=32"
# Processors without bfloat16 are slow at it.
QUICK = 'max_completion_length=12, model_init_kwargs={"dtype": "float32"}, bf16=False'
OF_STAGES = [path for path in NOTEBOOKS if path.stem in STAGES]


def cells(path: Path) -> list[str]:
    """The sources of the code cells."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_is_one_for_each_stage_and_pages_link_them() -> None:
    assert {path.stem for path in NOTEBOOKS} == STAGES | {"quickstart"}
    for page in (ROOT / "docs" / "quickstart.md", ROOT / "docs" / "architecture.md"):
        text = page.read_text()
        assert all(f"notebooks/{stage}.ipynb" in text for stage in STAGES), page.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_show_nothing_of_the_machine(path: Path) -> None:
    """A notebook has the outputs of one run, or none. Paths and clock times tell a reader nothing."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in found for output in cell["outputs"]]
    counts = [*range(1, len(found) + 1)] if outputs else [None] * len(found)
    assert [cell["execution_count"] for cell in found] == counts, "run once, from top to bottom"
    assert all(set(output) == OUTPUTS[output["output_type"]] for output in outputs)
    said = json.dumps(outputs)
    assert str(ROOT) not in said and not re.search(r"/(tmp|root|home|work)/|\(\d\d:\d\d\)|Error|Warning", said)


def test_quickstart_cells_compile_and_have_outputs() -> None:
    path = ROOT / "docs" / "notebooks" / "quickstart.ipynb"
    for source in cells(path):
        compile(source, path.name, "exec")
    said = path.read_text()
    assert "step 5/5" in said and "<th>Training Reward</th>" in said
    for page in ("README.md", "docs/quickstart.md"):
        assert "notebooks/quickstart.ipynb" in (ROOT / page).read_text()
    for target in re.findall(r"\]\(([\w./-]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_install_cell_refuses_a_folder_without_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Colab the working directory isn't the clone's. All notebooks have the same install cell."""
    (install,) = {cells(path)[0] for path in NOTEBOOKS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no clone of Colograd: set REPOSITORY to an address"):
        exec(compile(install, "install", "exec"), {})


def test_install_cell_enters_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is opened in its own folder, and models/ and runs/ are folders of the clone."""
    monkeypatch.chdir(ROOT / "docs" / "notebooks")
    exec(compile(cells(NOTEBOOKS[0])[0], "install", "exec"), {})
    assert Path.cwd() == ROOT


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the HTML that notebooks display."""

    def show(html: str, **kwargs: Any) -> SimpleNamespace:
        pages.append(html)
        return SimpleNamespace(update=pages.append)

    pages: list[str] = []
    display: Any = ModuleType("IPython.display")
    display.HTML, display.display = str, show
    package: Any = ModuleType("IPython")
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = importlib.import_module("transformers.utils.notebook")
    monkeypatch.setattr(notebook, "disp", display)  # it may have been imported in an earlier test
    for module in ("transformers.trainer", "colograd.extensions.recording.recorder"):
        monkeypatch.setattr(f"{module}.DEFAULT_PROGRESS_CALLBACK", notebook.NotebookProgressCallback)
    return pages


@pytest.mark.engine
@pytest.mark.parametrize("path", OF_STAGES, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOGRAD_MODEL", str(tiny_model))
    monkeypatch.setenv("COLOGRAD_STEPS", "2")
    names: dict[str, Any] = {}
    sources = cells(path)
    assert sum(LENGTH in source for source in sources) == 1
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # without a file descriptor, as Colab's
            for source in sources:
                exec(compile(source.replace(LENGTH, QUICK), f"{path.name}", "exec"), names)
    except BaseException:
        if "trainer" in names and hasattr(names["trainer"], "weights"):
            names["trainer"].close()
        raise
    assert names["trainer"].state.global_step == 2
    replaced = [name for name in STAGES if name in vars(type(names["trainer"]))]
    assert replaced == [path.stem]
    logged = [entry["reward"] for entry in names["trainer"].state.log_history if "reward" in entry]
    table = [page for page in shown if "<th>Training Reward</th>" in page][-1]
    assert len(logged) == 2 and all(f"<td>{reward:.6f}</td>" in table for reward in logged)


@pytest.mark.engine
@pytest.mark.parametrize("model", ["tiny", pytest.param("named", marks=pytest.mark.slow)])
def test_the_readme_s_script_runs(
    model: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs with a random model and with the named one, because a trained model has large logits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(tiny_model if model == "tiny" else MODEL)
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    assert LENGTH in script
    script = script.replace(LENGTH, QUICK) if model == "tiny" else script
    for name, size in {"max_steps": 1, "prompts_per_step": 1, "max_completion_length": 8}.items():
        script, found = re.subn(rf"{name}=\d+", f"{name}={size}", script)
        assert found == 1, name
    exec(compile(script, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 1
    names["trainer"].close()
