#!/usr/bin/env bash
# Plays the tests of Kubernetes' sandboxes on a real cluster: those that CI plays on a fake API server.
#
#     scripts/prove_on_cluster.sh NAMESPACE [PYTEST…]
#
# The cluster is that of KUBECONFIG (or ~/.kube/config): kind, k3s or another, Kubernetes 1.30 or newer. NAMESPACE must
# exist and be nobody else's; the kubeconfig's user may make pods, NetworkPolicies and ResourceQuotas in it, and where
# agent-sandbox 0.5 or newer is installed with its extensions also SandboxTemplates, SandboxWarmPools and SandboxClaims:
# then claims are played, too; elsewhere that test is skipped, and says so. The cluster needs a network plug-in that
# enforces policies (kind's own does since 0.24) and pulls python:3.11-slim. It takes some minutes. Needs .venv (make
# install), and root for nothing. What it makes it removes; after a kill, pods and claims with the label turnstile.owner
# and pools with turnstile.pool are left:
#
#     kind create cluster && kubectl create namespace turnstile-proof && scripts/prove_on_cluster.sh turnstile-proof
set -euo pipefail

namespace=${1:?usage: prove_on_cluster.sh NAMESPACE [PYTEST…]}
shift
cd "$(dirname "$0")/.."
export TURNSTILE_TEST_CLUSTER=$namespace

# One after the other: a quota that one of them sets is the namespace's.
exec .venv/bin/pytest -m "cluster and not thorough" -n 0 --timeout 900 \
  tests/sandboxes/test_any_cluster.py "tests/sandboxes/test_sandbox_contract.py" -k "any_cluster or kubernetes" "$@"
