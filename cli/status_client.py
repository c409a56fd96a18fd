"""Client of a router's /status.json. The key comes from DIPTYCH_API_KEY; the default URL is the cluster of the run
folder."""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from diptych.cli.router_access import print_default
from diptych.cli.up.run_folder import RunFolder
from diptych.common.errors import AuthenticationError, ConfigError, NoWorkerError
from diptych.common.paths import run_dir

DEFAULT_URL = "http://127.0.0.1:8000"


def _context(tls_ca: Path | None, *, pinned: bool) -> ssl.SSLContext:
    """Raises: ConfigError when the file is invalid."""
    try:
        context = ssl.create_default_context(cafile=None if tls_ca is None else str(tls_ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("tls_ca", str(tls_ca), f"cannot be used: {error}") from None
    if tls_ca is not None:  # the given file is trusted, whatever signed it
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if pinned:  # exactly the certificate of this folder's router; its names are not checked
        context.check_hostname = False  # pinned
    return context


class _Connection(http.client.HTTPSConnection):
    """HTTPS to an address that the certificate does not name."""

    def __init__(self, host: str, *, server_name: str, context: ssl.SSLContext, **more: Any) -> None:
        super().__init__(host, context=context, **more)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or self.host)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(context=context)
        self._connection = functools.partial(_Connection, server_name=server_name, context=context)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        answer: http.client.HTTPResponse = self.do_open(self._connection, req)
        return answer


class StatusClient:
    """Client of one router.

    Args:
        url: of the router's HTTP server; empty: the cluster that runs from this folder, else the default port.
        tls_ca: PEM file of the authorities to trust; None: those of the system, or of the cluster of this folder.
        server_name: name that the router's certificate must hold; empty: the URL's host.
        changes: the command changes something: it takes no default port, where any cluster may be.
    Raises: ConfigError naming the url or the tls_ca.
    """

    def __init__(
        self,
        url: str = "",
        *,
        tls_ca: Path | None = None,
        server_name: str = "",
        timeout_s: float = 5.0,
        changes: bool = False,
    ) -> None:
        own = False
        if not url:
            state = RunFolder(run_dir()).read_state()
            if state is None and changes:
                raise ConfigError(
                    "url", "", f"no cluster runs from {run_dir()}: name the router of the one to change (--url)"
                )
            if state is None:
                print_default("url", DEFAULT_URL)
            url = state.http_url if state is not None else DEFAULT_URL
            if state is not None and state.tls_cert and tls_ca is None:
                tls_ca, own = Path(state.tls_cert), True
        if not url.startswith(("http://", "https://")):
            raise ConfigError("url", url, "must begin with http:// or https://")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.url.startswith("https://"):
            handlers.append(_Https(_context(tls_ca, pinned=own), server_name))
        elif tls_ca is not None and not own:
            raise ConfigError("tls_ca", str(tls_ca), f"is for https://, and the router's URL is {self.url}")
        self._opener = urllib.request.build_opener(*handlers)

    def get(self) -> dict[str, Any]:
        """Raises: AuthenticationError, NoWorkerError when the router cannot be reached or its answer is invalid."""
        request = urllib.request.Request(self.url + "/status.json")  # noqa: S310 - http or https, checked above
        if key := os.environ.get("DIPTYCH_API_KEY", ""):
            request.add_header("authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    raise AuthenticationError(f"{self.url} requires a key: set DIPTYCH_API_KEY") from None
                raise NoWorkerError(f"{self.url}/status.json answers HTTP {error.code}") from None
        except urllib.error.URLError as error:
            why = getattr(error.reason, "strerror", None) or error.reason
            raise NoWorkerError(f"the router at {self.url} cannot be reached: {why}") from None
        except (OSError, ValueError) as error:
            raise NoWorkerError(f"{self.url}/status.json: {error}") from None
        if not isinstance(found, dict) or "cluster" not in found:
            raise NoWorkerError(f"{self.url}/status.json is not a router's status")
        return found
