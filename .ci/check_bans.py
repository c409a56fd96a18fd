"""Banned calls and imports, found in the syntax tree.

Banned are: code execution from data; TLS without its checks, and broken hashes; forks,
since in a copy of a process with UCX, gRPC or CUDA their handlers run
(common/child.py starts children); children that could outlive who started them;
select(), which refuses descriptors from 1,024 on, where poll() takes them;
sleeps in tests, whose outcome would depend on the machine's speed; and deadlines in tests that a slow machine misses. A loop
that polls a condition may sleep (better: diptych_tests.waiting). A line says why another sleep decides nothing
(`# sleep: REASON`), why a deadline is short (`# short: REASON`), or what ends a child of a test that is killed
(`# ends: REASON`; better: child.start).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORKING_MODULES = {"multiprocessing", "pty"}
FORKING_CALLS = {"os.fork", "os.forkpty"}
MAY_FORK = "tests/support/diptych_tests/fork_server.py"
"""Of a process in which neither UCX, gRPC nor CUDA was ever started, and that has one thread."""
LOOP_FORKS = {
    "create_subprocess_exec",
    "create_subprocess_shell",
    "subprocess_exec",
    "subprocess_shell",
    "ProcessPoolExecutor",
}
"""uvloop's forks run Python's at-fork hooks in the copy. Allowed in benchmarks and tests."""
MAY_OUTLIVE = ("common/child.py", "cli/up/command.py")
"""common/child.py itself; `up --detach`, which is meant to."""
IMPORTS = {"__import__", "importlib.import_module", "import_module"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
MAY_SLEEP = ("tests/support/diptych_tests/waiting.py", "tests/conftest.py", "tests/sim/")
"""The polling helper; code without access to it; virtual time."""
LEAST_DEADLINE_S = 20.0
"""What takes milliseconds on an idle machine takes this long on none."""
WAITS = {"wait_for", "timeout", "wait", "join", "result", "settimeout", "communicate", "check_call", "Timeout"}
"""Calls whose last positional argument may be a number of seconds."""
HTTP_WAITS = {"get", "post", "put", "delete", "head", "options", "request", "stream", "Client", "AsyncClient"}
"""Of httpx: without a `timeout` they wait for 5 s."""
BANNED_CALLS = {
    "eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load",
    "tempfile.mktemp", "torch.hub.load", "ssl._create_unverified_context", "hashlib.md5", "hashlib.sha1",
    "jinja2.Environment", "select.select",
}  # fmt: skip
UNCHECKED = {"check_hostname": False, "ssl_check_hostname": False, "ssl_cert_reqs": "none", "verify": False}
"""Arguments and attributes that switch a check of TLS off; `verify` is one of HTTP clients. Where only one certificate is
trusted, its names need not be checked: the line says `# pinned`."""
HTTP_CLIENTS = ("httpx.", "requests.", "aiohttp.")


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")  # a method of a call's result
    return ".".join(reversed(parts))


def _keyword(call: ast.Call, name: str) -> object:
    """The constant that `name=` is given; None when it is absent or no constant."""
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def _polls(tree: ast.Module) -> set[ast.AST]:
    """All nodes in the body of a `while` with a condition."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant))
    return {inner for loop in loops for statement in loop.body for inner in ast.walk(statement)}


def _says(node: ast.AST, lines: list[str], word: str) -> bool:
    """Whether a comment on its lines gives a reason after `# word:`."""
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
    said = "\n".join(lines[first - 1 : last]).rpartition(f"# {word}:")
    return bool(said[1]) and len(said[2].strip()) >= 10


def _waits(call: ast.Call, lines: list[str]) -> bool:
    """Whether it sleeps, longer than one iteration of the event loop, without a reason."""
    if not call.args or (isinstance(call.args[0], ast.Constant) and call.args[0].value == 0):
        return False
    return not _says(call, lines, "sleep")


def _deadline_s(call: ast.Call, name: str) -> float | None:
    """The literal number of seconds that the call waits at most; None: there is none. `name`: dotted."""
    last = name.rpartition(".")[2]
    given: list[object] = [
        keyword.value.value
        for keyword in call.keywords
        if keyword.arg == "timeout" and isinstance(keyword.value, ast.Constant)
    ]
    if last in WAITS and len(call.args) == (2 if last == "wait_for" else 1) and isinstance(call.args[-1], ast.Constant):
        given.append(call.args[-1].value)
    numbers = [float(one) for one in given if isinstance(one, int | float) and not isinstance(one, bool) and one > 0]
    if numbers:
        return min(numbers)
    of_httpx = name.startswith("httpx.") and last in HTTP_WAITS
    return (
        5.0
        if of_httpx and not any(keyword.arg in ("timeout", "transport", None) for keyword in call.keywords)
        else None
    )


def findings(source: str, filename: str) -> list[str]:
    """Lines "file:line: what" of every banned use in one file."""
    found: list[str] = []
    serves = not filename.startswith("tests/") and "bench" not in filename
    is_test = filename.startswith("tests/") and not filename.startswith(MAY_SLEEP)
    lines = source.splitlines()

    def report(node: ast.AST, what: str) -> None:
        found.append(f"{filename}:{getattr(node, 'lineno', 0)}: {what}")

    tree = ast.parse(source, filename)
    polling = _polls(tree) if is_test else set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in BANNED_MODULES:
                report(node, f"import of {name}: it runs what it reads")
            if name.split(".")[0] in FORKING_MODULES:
                report(node, f"import of {name}: it forks; see common/child.py")
        if isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
            report(node, "CERT_NONE: TLS without a check of the certificate")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                name = target.attr if isinstance(target, ast.Attribute) else ""
                if (
                    name in UNCHECKED
                    and node.value.value == UNCHECKED[name]
                    and "# pinned" not in lines[node.lineno - 1]
                ):
                    report(node, f"{name} = {node.value.value}: TLS without a check")
        if isinstance(node, ast.Call):
            call = _dotted(node.func)
            loaded = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if call in IMPORTS and str(loaded).split(".")[0] in BANNED_MODULES:
                report(node, f"import of {loaded}: it runs what it reads")
            if call.split(".")[-1] == "read_pickle":
                report(node, f"{call}() runs what it reads")
            for name, off in UNCHECKED.items():
                given = _keyword(node, name)
                if given is not None and given == off and (name != "verify" or call.startswith(HTTP_CLIENTS)):
                    report(node, f"{name}={given}: TLS without a check")
            if is_test and call in SLEEPS and node not in polling and _waits(node, lines):
                report(node, f"{call}(): wait for a condition (diptych_tests.waiting), or say `# sleep: REASON`")
            if is_test and not _says(node, lines, "short"):
                deadline_s = _deadline_s(node, call)
                if deadline_s is not None and deadline_s < LEAST_DEADLINE_S:
                    report(
                        node,
                        f"{call}() waits for {deadline_s:g} s at most: a slow machine needs more (# short: REASON)",
                    )
            if call in BANNED_CALLS:
                report(node, f"{call}()")
            if (call in FORKING_CALLS and filename != MAY_FORK) or (serves and call.split(".")[-1] in LOOP_FORKS):
                report(node, f"{call}() forks; see common/child.py")
            if (
                call == "subprocess.Popen"
                and not filename.startswith(MAY_OUTLIVE)
                and not (filename.startswith("tests/") and _says(node, lines, "ends"))
            ):
                report(node, f"{call}(): what it starts outlives this process when it is killed; see common/child.py")
            if any(keyword.arg == "preexec_fn" for keyword in node.keywords):
                report(node, "preexec_fn: a fork with code of ours in the copy; see common/child.py")
            if call == "torch.load" and _keyword(node, "weights_only") is not True:
                report(node, "torch.load without weights_only=True")
            if _keyword(node, "allow_pickle") is True:
                report(node, "allow_pickle=True")
            if _keyword(node, "trust_remote_code") is True:
                report(node, "trust_remote_code=True")
            if call.startswith("subprocess.") and _keyword(node, "shell") is True:
                report(node, "a shell between us and the program")
    return found


def main() -> int:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = [ROOT / line for line in listing.stdout.splitlines() if not line.endswith(("_pb2.py", "_pb2_grpc.py"))]
    files = [path for path in files if path.is_file() and not path.is_symlink()]
    found = [line for path in files for line in findings(path.read_text(), str(path.relative_to(ROOT)))]
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"bans: nothing in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
