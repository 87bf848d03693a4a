# make test     lint and the default test suite (what every change must pass)
# make test-slow  whole programs played and killed, long loops, the package from its built wheel
# make test-workers  the contract of the control API and the table of retries, each server in them as two workers; with
#               TURNSTILE_EVERYTHING=1 OpenEnv, recorded traffic and the gate's faults too (docs/workers.md)
# make test-browser  the viewer in a real browser
# make test-docker  sandboxes, grading and episodes in a real Docker engine (DOCKER_HOST; scripts/ci_docker.sh makes one)
# make test-agents  real agents and clients from their registries (scripts/ci_installs.sh)
# make cheats   work that cheats: several hundred ways to a reward, which earn none
# make trainers exporters against the trainers' own types and code (scripts/ci_trainers.sh)
# make cluster  Ray, Slurm, Harbor's environments (a Python 3.12, Docker Compose 2), pods of a fake Kubernetes, the
#               chart, Docker by ssh and TLS, Podman, images without an engine (what it needs: scripts/ci_installs.sh
#               --cluster, scripts/ci_docker.sh, scripts/ci_podman.sh; apt-get install skopeo umoci squashfs-tools
#               docker-registry slurmctld slurmd slurm-client munge)
# make engines  real engines: TURNSTILE_SGLANG_PYTHON and TURNSTILE_VLLM_PYTHON (scripts/install_sglang_cpu.sh,
#               scripts/install_vllm_cpu.sh)
# make lowest   the quick tests with the lowest versions that pyproject.toml allows, in environments of their own in the
#               cache folder; then writes scripts/lowest.txt. To be played after a change of a bound
# make everything  every test and every check that there is, those included that .ci/run leaves out, with what they
#               need: hours. SUITES="slow docker" plays these; RECORD=1 keeps what they cost (CONTRIBUTING.md)
# make upstream  the newest openenv, mcp, trl, agents, …, in environments of their own, against our contract suites
#               (NAMES="mcp pi"; ALL=1 the pinned ones too; WRITE=1 writes docs/upstream.md). No part of CI
# make check    the quick inner loop: format, lint, types and the quick tests of what changed (BASE=main)
# make install  everything that tests, examples and documentation use, into .venv
# make demo     tasks to graded, token-exact episodes, end to end, on a tiny model
# make container  builds the image with `openenv build`, starts it hardened, and plays in it (docs/container.md); with
#               TURNSTILE_SGLANG_PYTHON (scripts/install_sglang_cpu.sh) on a real SGLang too
# make bench    the benchmarks (results are printed, docs/performance.md keeps them)
# make agents-matrix   every agent against every fault, live, in Docker: docs/agents-matrix.md (AGENTS="a b",
#               FAULTS="x y", AGAIN=1; RECORD=1 keeps the traffic that the test suite replays)
# make frameworks   agent frameworks from their index, in an environment of their own, in each of their modes:
#               writes docs/frameworks.md
# make recorded-run  the run of real agents that the viewer's tests and pictures show (tests/ui/recorded), in Docker
# make pictures  the viewer's pictures of the documentation, from that run (docs/pictures)
# make campaign  random faults against a whole server, and a checker that holds agents, engine and export against each
#               other: docs/campaign.md (MINUTES=5 SEED=1 BACKENDS="local:2 docker:2" OUT=folder; :2 are workers)
# make harbor   Harbor's task folders played by `harbor run` and by Turnstile: equal rewards (HARBOR=program;
#               RECORD=1 keeps Harbor's for the tests)
# make lint     format, lint, types, import rules, lock
# make ui       the viewer: its types from the server's OpenAPI, its bundle from ui/ (needs Node 20 and npm)
# make ui-check the committed types and bundle are those of the sources, and all types fit
# make docs     the documentation site, into site/: fails on a link that leads nowhere
# make clean    removes .venv and everything that was made here
#
# Needs python3 (3.11 to 3.14) with venv, make and git; the rest is installed into .venv, at the versions of
# uv.lock, from the package index this machine's pip is configured with: for the demo only what it runs, for the rest
# what they need besides.
#   PYTHON=python3.12             the interpreter that makes .venv, instead of the one that scripts/interpreter.sh finds
#   TORCH_INDEX=URL               an index to take torch from, e.g. PyTorch's own with the small CPU builds

BIN := .venv/bin
INSTALLED := .venv/installed
RUNS := .venv/runs
SUITE := $(BIN)/python scripts/suites.py

.PHONY: install model-kits test test-slow test-workers test-browser test-docker test-agents cheats cluster trainers lowest everything engines check lint demo container bench agents-matrix upstream frameworks recorded-run pictures campaign fleet-campaign harbor docs ui ui-check clean

install: $(INSTALLED)

model-kits: $(INSTALLED)
	$(BIN)/python scripts/model_kits.py --fetch

test: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python scripts/check.py --all

test-slow: $(INSTALLED)
	scripts/bubblewrap.sh
	scripts/nginx.sh
	$(SUITE) slow

test-workers: $(INSTALLED)
	$(SUITE) workers

test-browser: $(INSTALLED) ui/node_modules
	scripts/install_chromium.sh
	scripts/bubblewrap.sh
	$(SUITE) browser

test-docker: $(INSTALLED)
	$(SUITE) docker

test-agents: $(INSTALLED)
	scripts/bubblewrap.sh
	$(SUITE) agents

cheats: $(INSTALLED)
	scripts/bubblewrap.sh
	$(SUITE) cheats

cluster: $(INSTALLED)
	$(SUITE) cluster

trainers: $(INSTALLED)
	$(SUITE) trainers

engines: $(INSTALLED)
	scripts/bubblewrap.sh
	$(SUITE) engines

upstream: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python scripts/upstream.py $(NAMES) $(if $(ALL),--all) $(if $(WRITE),--write)

lowest: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python scripts/lowest.py

everything:
	.ci/run --everything $(SUITES)

check: $(INSTALLED)
	$(BIN)/python scripts/check.py $(if $(BASE),--base $(BASE))

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/agents.py examples/bash_agent.py examples/external_agents.py examples/local.py examples/program.py examples/take_turns.py examples/scripted_policy.py examples/scripted/*.py examples/tiny_policy/*.py examples/grpo/*.py examples/harbor/compare.py examples/own_tools/*.py examples/parts/example_parts/*.py examples/trl_grpo/*.py scripts/*.py
	$(BIN)/mypy benchmarks/agents_matrix/*.py
	$(BIN)/mypy benchmarks/exactness/*.py
	$(BIN)/mypy benchmarks/campaign/*.py benchmarks/soak.py benchmarks/ended_episodes.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/lock.py --check
	$(BIN)/python scripts/settings_doc.py --check
	$(BIN)/python scripts/seccomp_profile.py --check
	$(BIN)/python scripts/sandbox_filter.py --check

demo: $(RUNS)
	scripts/bubblewrap.sh
	$(BIN)/turnstile demo

container: $(INSTALLED)
	$(SUITE) container

bench: $(INSTALLED)
	for benchmark in benchmarks/*.py; do $(BIN)/python $$benchmark || exit 1; done

agents-matrix: $(INSTALLED)
	$(BIN)/python benchmarks/agents_matrix $(if $(AGENTS),--agents $(AGENTS)) $(if $(FAULTS),--faults $(FAULTS)) \
		$(if $(AGAIN)$(RECORD),--again) $(if $(RECORD),--record)

frameworks: $(INSTALLED)
	PYTHON=$(BIN)/python scripts/install_pinned.sh scripts/frameworks.txt .cache/frameworks
	RECORD=1 TURNSTILE_FRAMEWORKS_PYTHON=$(CURDIR)/.cache/frameworks/bin/python $(BIN)/python -m pytest -q tests/frameworks

recorded-run: $(INSTALLED)
	$(BIN)/python benchmarks/agents_matrix/recorded_run.py

pictures: $(INSTALLED)
	scripts/install_chromium.sh
	$(BIN)/python scripts/viewer_pictures.py

campaign: $(INSTALLED)
	scripts/bubblewrap.sh
	$(BIN)/python benchmarks/campaign $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(BACKENDS),--backends $(BACKENDS)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(OUT),--out $(OUT))

fleet-campaign: $(INSTALLED)
	scripts/bubblewrap.sh
	cd benchmarks && $(abspath $(BIN))/python -m campaign.fleet $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

# Harbor is a program of its own, in a Python of its own: HARBOR=/path/to/harbor.
harbor: $(INSTALLED)
	scripts/sandbox_image.sh turnstile-example:base
	scripts/install_compose.sh .cache/compose
	$(BIN)/python examples/harbor/variants.py .cache/harbor-variants
	$(BIN)/python examples/harbor/compare.py examples/harbor/tasks .cache/harbor-variants \
	    --harbor $(HARBOR) --compose .cache/compose/docker-compose $(if $(RECORD),--record)

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
$(RUNS): pyproject.toml uv.lock scripts/constraints.py scripts/image_packages.py
	python=$$(scripts/interpreter.sh $(PYTHON)) && \
		{ test -x $(BIN)/pip || "$$python" -m venv --clear .venv; }
	$(BIN)/pip install --quiet $$($(BIN)/python scripts/constraints.py packaging)
	$(BIN)/python scripts/image_packages.py --whole .venv server,embedded $(TORCH_INDEX)
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

$(INSTALLED): $(RUNS)
	$(BIN)/python scripts/constraints.py > .venv/constraints.txt
	$(BIN)/pip install --quiet --constraint .venv/constraints.txt uv
	scripts/pip_install.sh .venv --constraint .venv/constraints.txt --editable '.[dev,embedded]'
	touch $@

clean:
	rm -rf .venv .cache build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
