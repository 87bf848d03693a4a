# make test     lint and the default test suite (what every change must pass)
# make test-slow  whole programs played and killed, long loops, the package from its built wheel
# make test-workers  the contract of the control API and of OpenEnv, recorded traffic and the gate's faults, each server
#               in them as two workers (docs/workers.md)
# make test-browser  the viewer in a real browser
# make cheats   every cheat on every shipped task, as root with many uids and with one; with TURNSTILE_TEST_IMAGE (an
#               image with Python) in Docker too
# make test-thorough  the properties with 100 examples each (make test: 30), and the longest loops
# make engines  every test on real engines, those included that .ci/run leaves out: TURNSTILE_SGLANG_PYTHON and
#               TURNSTILE_VLLM_PYTHON (scripts/install_sglang_cpu.sh, scripts/install_vllm_cpu.sh)
# make check    the quick inner loop: format, lint, types and the quick tests of what changed (BASE=main)
# make demo     tasks to graded, token-exact episodes, end to end, on a tiny model
# make container  builds the image with `openenv build`, starts it hardened, and plays in it (docs/container.md); with
#               TURNSTILE_SGLANG_PYTHON (scripts/install_sglang_cpu.sh) on a real SGLang too
# make bench    the benchmarks (results are printed, docs/performance.md keeps them)
# make agents-matrix   every agent against every fault, live, in Docker: docs/agents-matrix.md (AGENTS="a b",
#               FAULTS="x y", AGAIN=1; RECORD=1 keeps the traffic that the test suite replays)
# make recorded-run  the run of real agents that the viewer's tests and pictures show (tests/ui/recorded), in Docker
# make pictures  the viewer's pictures of the documentation, from that run (docs/pictures)
# make campaign  random faults against a whole server, and a checker that holds agents, engine and export against each
#               other: docs/campaign.md (MINUTES=5 SEED=1 BACKENDS="local local:2 docker" OUT=folder; :2 are workers)
# make harbor   Harbor's task folders played by `harbor run` and by Turnstile: equal rewards (HARBOR=program;
#               RECORD=1 keeps Harbor's for the tests)
# make lint     format, lint, types, import rules, lock
# make ui       the viewer: its types from the server's OpenAPI, its bundle from ui/ (needs Node 20 and npm)
# make ui-check the committed types and bundle are those of the sources, and all types fit
# make docs     the documentation site, into site/: fails on a link that leads nowhere
# make clean    removes .venv and everything that was made here
#
# Needs python3 (3.11 to 3.14) with venv, make and git; the rest is installed into .venv, at the versions of
# uv.lock, from the package index this machine's pip is configured with.
#   PYTHON=python3.12             the interpreter that makes .venv
#   TORCH_INDEX=URL               an index to take torch from, e.g. PyTorch's own with the small CPU builds

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: test test-slow test-workers test-browser cheats test-thorough engines check lint demo container bench agents-matrix recorded-run pictures campaign harbor docs ui ui-check clean

test: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python scripts/check.py --all

test-slow: $(INSTALLED)
	scripts/bubblewrap.sh
	scripts/nginx.sh
	$(BIN)/pytest -n 3 -m "slow and not docker and not cheats and not thorough and not sglang and not vllm"

# The rest of these suites asks one server for an order, a bound or a journal that several do not share.
WORKERS_PLAY := tests/control/test_control_api.py tests/openenv/test_openenv_http.py tests/openenv/test_openenv_mcp.py \
	tests/traffic/test_replay.py tests/gate/test_disconnects.py tests/gate/test_failures.py \
	tests/gate/test_lost_replies.py tests/gate/test_retries.py

test-workers: $(INSTALLED)
	TURNSTILE_TEST_WORKERS=2 $(BIN)/pytest -n 3 -m "not slow and not docker and not thorough" $(WORKERS_PLAY)

test-browser: $(INSTALLED) ui/node_modules
	scripts/install_chromium.sh
	scripts/bubblewrap.sh
	$(BIN)/pytest -n 2 -m "browser and not thorough" tests/ui

cheats: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/pytest -n 2 $(if $(TURNSTILE_TEST_IMAGE),,-m "not docker") tests/grading/test_shipped_cheats.py \
	  tests/grading/test_boundary_cheats.py tests/grading/test_further_cheats.py

test-thorough: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/pytest -n 2 --hypothesis-profile=thorough -m "(thorough or hypothesis and not slow and not docker) and not sglang and not vllm"

# A real engine loads for half a minute on one core, so two files at a time take little more than half as long.
engines: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/pytest -n 2 --dist loadfile -m "(sglang or vllm) and not container$(if $(QUICKER), and not thorough)"

check: $(INSTALLED)
	$(BIN)/python scripts/check.py $(if $(BASE),--base $(BASE))

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/agents.py examples/bash_agent.py examples/external_agents.py examples/local.py examples/program.py examples/take_turns.py examples/scripted_policy.py examples/scripted/*.py examples/tiny_policy/*.py examples/grpo/*.py examples/harbor/compare.py examples/own_tools/*.py examples/trl_grpo/*.py scripts/*.py
	$(BIN)/mypy benchmarks/agents_matrix/*.py
	$(BIN)/mypy benchmarks/campaign/*.py benchmarks/soak.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/lock.py --check
	$(BIN)/python scripts/settings_doc.py --check
	$(BIN)/python scripts/seccomp_profile.py --check
	$(BIN)/python scripts/sandbox_filter.py --check

demo: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/turnstile demo

container: $(INSTALLED)
	$(BIN)/pytest -v -n 2 -m "container$(if $(TURNSTILE_SGLANG_PYTHON),, and not sglang)" tests/container

bench: $(INSTALLED)
	for benchmark in benchmarks/*.py; do $(BIN)/python $$benchmark || exit 1; done

agents-matrix: $(INSTALLED)
	$(BIN)/python benchmarks/agents_matrix $(if $(AGENTS),--agents $(AGENTS)) $(if $(FAULTS),--faults $(FAULTS)) \
		$(if $(AGAIN)$(RECORD),--again) $(if $(RECORD),--record)

recorded-run: $(INSTALLED)
	$(BIN)/python benchmarks/agents_matrix/recorded_run.py

pictures: $(INSTALLED)
	scripts/install_chromium.sh
	$(BIN)/python scripts/viewer_pictures.py

campaign: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python benchmarks/campaign $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(BACKENDS),--backends $(BACKENDS)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(OUT),--out $(OUT))

# Harbor is a program of its own, in a Python of its own: HARBOR=/path/to/harbor.
harbor: $(INSTALLED)
	scripts/sandbox_image.sh turnstile-example:base
	scripts/install_compose.sh .cache/compose
	$(BIN)/python examples/harbor/compare.py --harbor $(HARBOR) --compose .cache/compose/docker-compose $(if $(RECORD),--record)

docs: $(INSTALLED)
	rm -rf site
	$(BIN)/zensical build --strict

# A change of package-lock.json installs again; openapi.json lies in a folder that git does not know.
ui/node_modules: ui/package.json ui/package-lock.json
	cd ui && npm ci --silent
	touch $@

ui: $(INSTALLED) ui/node_modules
	mkdir -p ui/build
	$(BIN)/python scripts/openapi.py > ui/build/openapi.json
	cd ui && npm run --silent types && npm run --silent check && npm run --silent build

ui-check: ui
	git diff --exit-code --stat -- ui/src/api/schema.d.ts env_server/turnstile_server/viewer

# An interrupted installation has no stamp, so the next make completes it.
$(INSTALLED): pyproject.toml uv.lock scripts/constraints.py
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.14 found; name one: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c '$(SUITABLE)' || { echo "make: $(PYTHON) is not a Python 3.11 to 3.14" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) has no venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	$(BIN)/python scripts/constraints.py > .venv/constraints.txt
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$($(BIN)/python scripts/constraints.py torch)"
	$(BIN)/pip install --quiet --constraint .venv/constraints.txt --editable '.[dev,embedded]'
	touch $@

clean:
	rm -rf .venv .cache build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
