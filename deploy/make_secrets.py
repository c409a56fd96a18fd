"""Make the secrets that compose.yaml mounts: the cluster secret, Redis users with passwords, Grafana's password.

    python deploy/make_secrets.py [FOLDER]        default: deploy/secrets beside this file

Existing secrets are kept, so it may run before every start; delete the folder's files to change them all. Only the
owner can enter the folder (0700); its files are readable (0444), because a container reads them as another user.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from pathlib import Path

CLUSTER = "diptych"
# Commands and keys that common/store/redis_store.py uses, also inside its scripts; a role may do nothing else. A test runs
# the store against a server with these rights.
_CONNECT = "+ping +client|setinfo +client|setname"
_WORKER = f"{_CONNECT} +eval +time +type +del +get +set +hget +hset +sadd +srem +pexpire +expire +xadd"
_WORKER_KEYS = ("~{}:worker:*", "~{}:start:*", "~{}:workers", "~{}:kv:*")
_ROUTER = (
    f"{_CONNECT} +eval +time +type +del +get +set +hget +hgetall +hset +hdel +sadd +srem +smembers +pexpire +xread"
)
_ROUTER_KEYS = (
    "%R~{}:worker:*",
    "~{}:workers",
    "%R~{}:kv:*",
    "~{}:pending:*",
    "~{}:routers",
    "~{}:budget:*",
    "~{}:adapters*",
)


def acl(worker: str, router: str) -> str:
    """Redis's ACL file: a user for each role, restricted to that role's keys; the default user is off. `%R~`: read
    only."""

    def line(name: str, password: str, keys: tuple[str, ...], commands: str) -> str:
        digest = hashlib.sha256(password.encode()).hexdigest()
        patterns = " ".join(key.replace("{}", f"{{{CLUSTER}}}") for key in keys)
        return f"user {name} on #{digest} {patterns} resetchannels -@all {commands}\n"

    users = line("worker", worker, _WORKER_KEYS, _WORKER) + line("router", router, _ROUTER_KEYS, _ROUTER)
    return "user default off\n" + users


def settings(role: str, password: str) -> str:
    """A settings file for DIPTYCH_CONFIG: passwords are neither in an environment nor on a command line."""
    return f'redis-url = "redis://{role}:{password}@redis:6379/0"\n'


def _password(file: Path, role: str) -> str:
    """The password in a settings file; a new one if there is none."""
    text = file.read_text() if file.exists() else ""
    found = re.search(rf"redis://{role}:([^@]+)@", text)
    return found[1] if found else secrets.token_urlsafe(24)


def _write(file: Path, text: str) -> None:
    """Write atomically: a server may be reading it."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "w") as out:
        os.fchmod(out.fileno(), 0o444)
        out.write(text)
    fresh.replace(file)


def make(folder: Path) -> list[str]:
    """Write what is missing, and Redis's rights if they are not those of this version. Returns the names of the written
    files."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    passwords = {role: _password(folder / f"{role}.toml", role) for role in ("worker", "router")}
    files = {"cluster_secret": secrets.token_hex(32) + "\n", "grafana_password": secrets.token_urlsafe(18)}
    files |= {f"{role}.toml": settings(role, password) for role, password in passwords.items()}
    rights, users = folder / "redis.acl", acl(passwords["worker"], passwords["router"])
    todo = {name: text for name, text in files.items() if not (folder / name).exists()}
    if not rights.exists() or rights.read_text() != users:
        todo[rights.name] = users
    for name, text in todo.items():
        _write(folder / name, text)
    return list(todo)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "secrets"
    print(f"secrets in {target}: " + (", ".join(make(target)) or "all there"))
