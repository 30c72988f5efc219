# make demo [TINY=1]   the whole job on this machine: sshd, storage, corpus, training, answers
# make check           format, lint, types, unit tests
# make test            everything once, on real parts; installs what is missing
# make soak [SOAK_MIN=20]  repetitions and fuzzing, bounded in minutes

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOAK_MIN ?= 20
WORKERS ?= 3
DEMO_OUT ?= demo-out
CPU_LOCK := configs/environments/cpu.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test soak install packages

demo: install packages
	$(BIN)/zy demo --out $(DEMO_OUT) $(if $(TINY),--tiny)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto -m "not e2e and not soak"

# A file is one worker's: its tests share a machine. Four tenths of it is waiting, so two cores are busy with three.
test: packages check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "e2e and not soak"

soak: install packages
	SOAK_MIN=$(SOAK_MIN) $(BIN)/python -m pytest -m soak

install: $(VENV)/.installed

# The lock file in its stages, as on a box: torch first and alone, DeepSpeed's build last.
$(VENV)/.installed: pyproject.toml $(CPU_LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PYTHON) -m controller.boxside.environment $(CPU_LOCK) $(BIN)/python
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[dev]'
	touch $@

packages:
	@.ci/debian-packages sshd=openssh-server tmux=tmux shellcheck=shellcheck git=git zsh=zsh fish=fish tcsh=tcsh c++=g++ chromium=chromium \
		/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc=fonts-noto-cjk
