# Needs Python 3.11 or 3.12 and make; everything else is installed into .venv.
PYTHON ?= python3
NAME   ?= quick
SEED   ?= 0
EXTRAS ?= dev

BIN  = .venv/bin
DONE = .venv/.installed

export TOKENIZERS_PARALLELISM = false

.PHONY: help run test check export readme lab pocket clean

help:    ## list these targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*##/make \1:/'

run: $(DONE)    ## run the whole loop on the built-in agent, in minutes (NAME=quick SEED=0), into runs/NAME
	$(BIN)/trace-nb run --target desk --model pocket --scale quick --seed $(SEED) --out runs/$(NAME)

test: export HF_HUB_OFFLINE = 1
test: export MPLBACKEND = Agg
test: export OMP_NUM_THREADS = 1
test: $(DONE) check    ## check that all is in step, then test the notebooks, then tests/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nbdev-test nbs --timing
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests -q

# Exports into a copy and compares, so that no hand edit is lost and a second run says the same.
check: $(DONE)    ## check that trace_nb/ and README.md are what the notebooks export, and that nbs/ is clean
	@set -e; copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; mkdir "$$copy/trace_nb"; \
	cp -R nbs .ci settings.ini setup.py pyproject.toml "$$copy"; cp trace_nb/__init__.py "$$copy/trace_nb"; \
	for tool in nbdev-export nbdev-clean 'python .ci/readme.py'; do (cd "$$copy" && "$(CURDIR)/$(BIN)"/$$tool); done; \
	for part in nbs trace_nb README.md; do \
	  diff -rq -x __pycache__ -x .ipynb_checkpoints -x .last_checked $$part "$$copy/$$part" || true; \
	done > "$$copy/changes" 2>&1; \
	if [ -s "$$copy/changes" ]; then \
	  sed "s#$$copy/#exported #g" "$$copy/changes" >&2; \
	  echo "The files above are not what the notebooks export: run 'make export', delete a module whose notebook is gone, and commit." >&2; exit 1; \
	fi

export: $(DONE)    ## write trace_nb/ and README.md from the notebooks, and clean the notebooks
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/python .ci/readme.py

readme: $(DONE)    ## write README.md from nbs/index.ipynb
	$(BIN)/python .ci/readme.py

lab: $(DONE)    ## open the notebooks in JupyterLab
	$(BIN)/jupyter-lab nbs

pocket: export OMP_NUM_THREADS = 1
pocket: $(DONE)    ## train the built-in agent again, for desk and for phone, into data/pocket
	$(BIN)/python -m trace_nb.train.pocket --out data/pocket
	$(BIN)/python -m trace_nb.train.pocket --world phone --out data/pocket/phone

clean:    ## remove what builds and tests leave; keeps .venv and runs
	rm -rf build dist *.egg-info _proc _docs .pytest_cache
	find nbs trace_nb tests \( -name __pycache__ -o -name .ipynb_checkpoints -o -name .last_checked \) -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in [(3, 11), (3, 12)] or sys.exit("trace_nb needs Python 3.11 or 3.12 and $(PYTHON) is %d.%d: name another with make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear .venv

$(DONE): settings.ini setup.py pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into .venv: minutes the first time, seconds later"
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
