"""Asks a router for /status.json. The key comes from DIPTYCH_API_KEY; without a URL the cluster of the run folder is asked."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from diptych.cli.run_folder import RunFolder
from diptych.common.errors import AuthenticationError, ConfigError, NoWorkerError
from diptych.common.paths import run_dir

DEFAULT_URL = "http://127.0.0.1:8000"


class StatusClient:
    """Args:
    url: of the router's HTTP server; empty: the cluster that runs from this folder, else the default port here.
    tls_ca: PEM file of the authorities to trust; None: those of the system, or as the cluster here has it.
    """

    def __init__(self, url: str = "", *, tls_ca: Path | None = None, timeout_s: float = 5.0) -> None:
        own = False
        if not url:
            state = RunFolder(run_dir()).read_state()
            url = state.http_url if state is not None else DEFAULT_URL
            if state is not None and state.tls_cert and tls_ca is None:
                tls_ca, own = Path(state.tls_cert), True
        if not url.startswith(("http://", "https://")):
            raise ConfigError("url", url, "must begin with http:// or https://")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if tls_ca is not None:
            try:
                context = ssl.create_default_context(cafile=str(tls_ca))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError("tls_ca", str(tls_ca), f"cannot be used: {error}") from None
            if own:  # the very certificate that the router of this folder shows: whom it names does not matter
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self) -> dict[str, Any]:
        """Raises: AuthenticationError, NoWorkerError when the router cannot be asked or answers nonsense."""
        request = urllib.request.Request(self.url + "/status.json")  # noqa: S310 - http or https, checked above
        if key := os.environ.get("DIPTYCH_API_KEY", ""):
            request.add_header("authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    raise AuthenticationError(f"{self.url} asks for a key: set DIPTYCH_API_KEY") from None
                raise NoWorkerError(f"{self.url}/status.json answers HTTP {error.code}") from None
        except (OSError, ValueError) as error:
            raise NoWorkerError(f"{self.url}/status.json: {error}") from None
        if not isinstance(found, dict) or "cluster" not in found:
            raise NoWorkerError(f"{self.url}/status.json is no router's status")
        return found
