"""The address of the cluster's API server, and the credentials for it.

From the kubeconfig that ``KUBECONFIG`` names, else as a pod of the cluster, else from ``~/.kube/config``. Formats:
Kubernetes, "Config (v1)" of client-go (kubeconfig), "Accessing the API from a Pod", "client-go credential plugins"
(``client.authentication.k8s.io``). Tokens in files change while the server runs, so they are read each time.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import yaml

from turnstile_server.errors import SandboxUnavailable, StartupError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EARLY_S = 60.0
"""A token of a plug-in is renewed so long before it expires."""
_PLUGIN_S = 60.0


@dataclass
class Token:
    """A bearer token: written down, in a file, or of a plug-in (``plugin``: the ``exec`` of the kubeconfig)."""

    text: str | None = None
    file: Path | None = None
    plugin: Mapping[str, Any] | None = None
    _expires: float | None = field(default=None, init=False)

    async def get(self) -> str | None:
        """Raises SandboxUnavailable."""
        if self.plugin is not None and (self.text is None or self._is_due()):
            await self._ask(self.plugin)
        if self.file is None:
            return self.text
        try:
            return (await anyio.Path(self.file).read_text()).strip()
        except OSError as error:
            raise SandboxUnavailable(f"the token of the cluster, {self.file}: {error.strerror}") from error

    def _is_due(self) -> bool:
        return self._expires is not None and time.time() > self._expires - _EARLY_S

    async def _ask(self, plugin: Mapping[str, Any]) -> None:
        version = str(plugin.get("apiVersion"))
        info = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}})
        added = {each["name"]: each["value"] for each in plugin.get("env") or ()}
        argv = [str(plugin["command"]), *map(str, plugin.get("args") or ())]
        try:
            with anyio.fail_after(_PLUGIN_S):
                done = await anyio.run_process(argv, env={**os.environ, **added, "KUBERNETES_EXEC_INFO": info})
            status = json.loads(done.stdout)["status"]
            self.text = str(status["token"])
            expires = status.get("expirationTimestamp")
            self._expires = None if expires is None else datetime.fromisoformat(expires).timestamp()
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise SandboxUnavailable(
                f"{argv[0]}, which the kubeconfig asks for a token, gave none: {error}"
            ) from error
        except Exception as error:  # CalledProcessError
            raise SandboxUnavailable(
                f"{argv[0]}, which the kubeconfig asks for a token, failed: {error}"
            ) from error


@dataclass(frozen=True)
class ClusterAccess:
    server: str
    """``https://10.0.0.1:443``"""
    namespace: str
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    token: Token


def find_access(namespace: str | None) -> ClusterAccess:
    """``namespace`` None: that of the context, or of this pod. Raises StartupError, saying what was looked for."""
    named = [Path(each) for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    if len(named) > 1:
        raise StartupError(
            "KUBECONFIG names several files; make one of them: kubectl config view --flatten --minify > FILE"
        )
    if not named and SERVICE_ACCOUNT.joinpath("token").is_file():
        return _of_pod(namespace)
    path = named[0] if named else Path.home() / ".kube" / "config"
    if not path.is_file():
        raise StartupError(
            f"sandboxes.kind = kubernetes finds no cluster: this is no pod with a service account, and {path} is "
            "not there. Name a kubeconfig by the environment variable KUBECONFIG"
        )
    try:
        return _of_file(path, namespace)
    except (OSError, ValueError, KeyError, StopIteration, TypeError, yaml.YAMLError) as error:
        raise StartupError(f"the kubeconfig {path} cannot be used: {type(error).__name__}: {error}") from error


def _of_pod(namespace: str | None) -> ClusterAccess:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host is None:
        raise StartupError("KUBERNETES_SERVICE_HOST is not set, though this pod has a service account")
    address = f"[{host}]" if ":" in host else host
    try:
        own = SERVICE_ACCOUNT.joinpath("namespace").read_text().strip()
        tls = ssl.create_default_context(cafile=SERVICE_ACCOUNT / "ca.crt")
    except OSError as error:
        raise StartupError(f"the service account in {SERVICE_ACCOUNT} cannot be used: {error}") from error
    return ClusterAccess(f"https://{address}:{port}", namespace or own, tls, Token(file=SERVICE_ACCOUNT / "token"))


def _of_file(path: Path, namespace: str | None) -> ClusterAccess:
    config = yaml.safe_load(path.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    server = str(cluster["server"]).rstrip("/")
    file = user.get("tokenFile")
    token = Token(user.get("token"), None if file is None else path.parent / file, user.get("exec"))
    tls = _tls(cluster, user, path.parent) if server.startswith("https:") else None
    return ClusterAccess(server, namespace or context.get("namespace") or "default", tls, token)


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [each for each in entries if each["name"] == name]
    if not found:
        raise KeyError(f"it has no {name}")
    return found[0]


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context()
    authority = _content(cluster, "certificate-authority", folder)
    if authority is not None:
        tls = ssl.create_default_context(cadata=authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = (_content(user, name, folder) for name in ("client-certificate", "client-key"))
    if certificate is not None and key is not None:
        with tempfile.NamedTemporaryFile() as pair:  # the ssl module reads certificates from files alone
            pair.write(certificate + b"\n" + key)
            pair.flush()
            tls.load_cert_chain(pair.name)
    return tls


def _content(entry: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """Of a field that holds a path, or with ``-data`` the content in base64."""
    if (data := entry.get(f"{name}-data")) is not None:
        return base64.b64decode(data)
    return None if (path := entry.get(name)) is None else (folder / path).read_bytes()
