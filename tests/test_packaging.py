"The package is what settings.ini says, README.md is the index notebook, and the notebooks keep to the house rules."
import configparser, importlib.metadata, json, runpy, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
notebooks = sorted(p for p in (root/"nbs").rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(root).parts))
experiments = [p for p in notebooks if p.parent.name == "experiments"]

def code_cells(path):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]

def name(path):
    return str(path.relative_to(root))

def test_one_version():
    import trace_nb
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(root/"settings.ini", encoding="utf-8")
    version = settings["DEFAULT"]["version"]
    assert importlib.metadata.version("trace_nb") == trace_nb.__version__ == version, "installed from older settings: run make again"

def test_command_is_installed():
    commands = importlib.metadata.entry_points(group="console_scripts", name="trace-nb")
    assert [command.value for command in commands] == ["trace_nb.cli:main"]

def test_readme_is_the_index_notebook():
    readme = runpy.run_path(str(root/".ci"/"readme.py"))["readme"]
    assert (root/"README.md").read_text(encoding="utf-8") == readme(), "run make readme"

@pytest.mark.parametrize("path", notebooks, ids=name)
def test_no_long_cell_and_no_error(path):
    for number, cell in enumerate(code_cells(path), 1):
        assert len("".join(cell["source"]).splitlines()) <= 30, f"code cell {number} is over 30 lines"
        assert all(output["output_type"] != "error" for output in cell["outputs"]), f"code cell {number} holds an error"

@pytest.mark.skipif(not experiments, reason="nbs/experiments holds no notebook")
def test_experiments_have_one_parameters_cell():
    tagged = {name(path): sum("parameters" in cell["metadata"].get("tags", []) for cell in code_cells(path)) for path in experiments}
    assert tagged == dict.fromkeys(tagged, 1)

@pytest.mark.skipif(not (root/"trace_nb"/"cli.py").exists(), reason="trace_nb/cli.py is not exported yet")
def test_the_command_line_imports_nothing_heavy():
    heavy = "{'torch', 'pandas', 'transformers', 'trl', 'peft', 'scipy', 'matplotlib'}"
    program = f"import sys, trace_nb.cli; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
