"Files that the package reads: importlib.resources.files('trace_nb.data') finds them, installed or editable."
