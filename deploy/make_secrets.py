"""Make the secrets that compose.yaml mounts: the cluster secret, Redis users with passwords, Grafana's password.

    python deploy/make_secrets.py [FOLDER]        default: deploy/secrets beside this file

Existing files are kept, so it may run before every start; delete the folder's files to change them all. The folder is for its
owner alone (0700); the files in it are readable (0444), because a container reads them as a user of its own.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path

CLUSTER = "diptych"
# What common/redis_store.py sends, as a client and inside of its scripts; a role can do nothing else, and nothing elsewhere.
_CONNECT = "+ping +client|setinfo +client|setname"
_WORKER = f"{_CONNECT} +eval +time +type +del +get +set +hget +hset +sadd +srem +pexpire +expire +xadd"
_ROUTER = f"{_CONNECT} +smembers +srem +hget +xread"


def acl(worker: str, router: str) -> str:
    """Redis's ACL file: a user for each role, bounded to the cluster's keys; the default user is off."""

    def line(name: str, password: str, commands: str) -> str:
        digest = hashlib.sha256(password.encode()).hexdigest()
        return f"user {name} on #{digest} ~{{{CLUSTER}}}:* resetchannels -@all {commands}\n"

    return "user default off\n" + line("worker", worker, _WORKER) + line("router", router, _ROUTER)


def settings(role: str, password: str) -> str:
    """A settings file for DIPTYCH_CONFIG: what holds a password stands in no environment and on no command line."""
    return f'redis-url = "redis://{role}:{password}@redis:6379/0"\n'


def make(folder: Path) -> list[str]:
    """Write what is missing. Returns the names of the files that were made."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    files = {"cluster_secret": secrets.token_hex(32) + "\n", "grafana_password": secrets.token_urlsafe(18)}
    redis = ("redis.acl", "worker.toml", "router.toml")
    if not all((folder / name).exists() for name in redis):  # these three belong together
        worker, router = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        texts = (acl(worker, router), settings("worker", worker), settings("router", router))
        for name, text in zip(redis, texts, strict=True):
            (folder / name).unlink(missing_ok=True)
            files[name] = text
    made = []
    for name, text in files.items():
        try:
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        except FileExistsError:
            continue
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o444)
            file.write(text)
        made.append(name)
    return made


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "secrets"
    print(f"secrets in {target}: " + (", ".join(make(target)) or "all there"))
