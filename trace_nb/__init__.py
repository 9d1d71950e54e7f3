"TRACE in notebooks: diagnose what an agent lacks, synthesize environments for it, train adapters, route tasks to them."
from importlib.metadata import version as _version

__version__ = _version("trace_nb")
