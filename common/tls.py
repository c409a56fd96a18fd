"""Certificate and private key of a server, read and checked once at the start. `ssl` is imported where it is used: --help
should not wait for OpenSSL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files and what is in them. The chain begins with the server's own certificate."""

    cert_file: Path
    key_file: Path
    cert: bytes
    key: bytes


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
        # An empty password: an encrypted key is an error, not a question on somebody's terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls_cert", str(cert_file), f"no use with tls_key={str(key_file)!r}: {error}") from None
    return ServerTls(Path(cert_file), Path(key_file), found["tls_cert"], found["tls_key"])


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """What our own processes show each other (mTLS): a certificate of the cluster's authority, as server and as client.

    Args:
        name: that every peer's certificate must hold (one certificate for a whole pool, whose addresses nobody knows before);
            empty: the host that it is called by.
    """

    ca: bytes
    cert: bytes
    key: bytes
    name: str = ""


def load_cluster_tls(
    ca_file: Path | str, cert_file: Path | str, key_file: Path | str, name: str = ""
) -> ClusterTls | None:
    """None: none of the files is named. Raises: ConfigError when only some are, or one cannot be used."""
    import ssl

    named = {"cluster_ca": ca_file, "cluster_cert": cert_file, "cluster_key": key_file}
    if not any(str(file) for file in named.values()):
        if name:
            raise ConfigError("cluster_tls_name", name, "is of no use without cluster_ca, cluster_cert and cluster_key")
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
