"Write README.md: nbs/index.ipynb as Markdown, without hidden cells, with links that start at the repository's root."
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

root = Path(__file__).resolve().parents[1]

def readme():
    "The text that README.md must hold."
    notebook = nbformat.read(root/"nbs"/"index.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("#| hide")]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))
    text, _ = MarkdownExporter().from_notebook_node(notebook)
    return text.replace("](../", "](").replace('="../', '="').strip() + "\n"

if __name__ == "__main__":
    (root/"README.md").write_text(readme(), encoding="utf-8")
