"""Certificate and private key of a server, read and checked once at the start. `ssl` is imported in functions, since
loading OpenSSL would slow --help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files and their content. The chain begins with the server's certificate."""

    cert_file: Path
    key_file: Path
    cert: bytes
    key: bytes = field(repr=False)


def load_server_tls(cert_file: Path | str, key_file: Path | str) -> ServerTls:
    """Raises: ConfigError when a file cannot be read or the key does not belong to the certificate."""
    import ssl

    found: dict[str, bytes] = {}
    for name, file in (("tls_cert", cert_file), ("tls_key", key_file)):
        try:
            found[name] = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(name, str(file), f"cannot be read: {error.strerror}") from None
    try:
        # An empty password: an encrypted key raises an error instead of prompting on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls_cert", str(cert_file), f"does not match tls_key={str(key_file)!r}: {error}") from None
    return ServerTls(Path(cert_file), Path(key_file), found["tls_cert"], found["tls_key"])


def load_client_tls(cert_file: Path | str, key_file: Path | str) -> ServerTls:
    """As `load_server_tls`, of decode's endpoint for clients."""
    try:
        return load_server_tls(cert_file, key_file)
    except ConfigError as error:
        raise ConfigError(error.field.replace("tls_", "client_tls_"), error.value, error.rule) from None


@dataclass(frozen=True, slots=True)
class RedisTls:
    """PEM files of connections to Redis. `ca`: who may sign its certificate; empty: the system's. `cert`, `key`: ours; empty:
    Redis asks for none."""

    ca: str = ""
    cert: str = ""
    key: str = ""


NO_FILES = RedisTls()


def load_redis_tls(ca_file: Path | str, cert_file: Path | str, key_file: Path | str) -> RedisTls:
    """Raises: ConfigError when a file cannot be used, or the key does not belong to the certificate."""
    import ssl

    ca, cert, key = map(str, (ca_file, cert_file, key_file))
    if bool(cert) != bool(key):
        raise ConfigError("redis_key" if cert else "redis_cert", "", "redis_cert and redis_key must be set together")
    if ca:
        try:
            ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("redis_ca", ca, f"cannot be used: {error}") from None
    if cert:
        try:
            load_server_tls(cert, key)
        except ConfigError as error:
            raise ConfigError(error.field.replace("tls_", "redis_"), error.value, error.rule) from None
    return RedisTls(ca, cert, key)


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """Certificates of the cluster's processes (mTLS). Each process is server and client, under the cluster's authority.

    Args:
        name: the name that every peer's certificate must hold, for a pool with dynamic addresses; empty: the host of
            the address.
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    name: str = ""


def load_cluster_tls(
    ca_file: Path | str, cert_file: Path | str, key_file: Path | str, name: str = ""
) -> ClusterTls | None:
    """None: no file is configured. Raises: ConfigError when only some are, or one is invalid."""
    import ssl

    named = {"cluster_ca": ca_file, "cluster_cert": cert_file, "cluster_key": key_file}
    if not any(str(file) for file in named.values()):
        if name:
            raise ConfigError("cluster_tls_name", name, "requires cluster_ca, cluster_cert and cluster_key")
        return None
    for setting, file in named.items():
        if not str(file):
            raise ConfigError(setting, "", "must be set too: mTLS needs an authority, a certificate and its key")
    try:
        authority = Path(ca_file).read_bytes()
        ssl.create_default_context(cadata=authority.decode())
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError("cluster_ca", str(ca_file), f"cannot be used: {error}") from None
    try:
        own = load_server_tls(cert_file, key_file)
    except ConfigError as error:
        raise ConfigError(error.field.replace("tls_", "cluster_"), error.value, error.rule) from None
    return ClusterTls(authority, own.cert, own.key, name)
