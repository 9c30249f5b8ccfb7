"""A PostgreSQL server of a test's own, from the binaries that the system has; also for the proof of tests/support/storms.py."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

START_S = 600.0


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`, the newest there is; None where the server isn't installed."""
    folders = [Path(found).parent for found in [shutil.which("postgres")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """A running server with an empty cluster; a context manager. It runs as another user where this one is root, which it refuses."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder
        self._user = "postgres" if os.getuid() == 0 and _exists("postgres") else "nobody" if os.getuid() == 0 else None
        self._home = Path(tempfile.mkdtemp(prefix="flashtune-postgres-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PostgresServer":
        if self._user is not None:
            shutil.chown(self._home, self._user)
        words = [
            self._bin / "initdb",
            "-D",
            self._home / "data",
            "-A",
            "trust",
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale",
            "C",
            "--no-sync",
        ]
        made = subprocess.run(words, user=self._user, cwd=self._home, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def url(self, database: str) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg://postgres:hunter2@127.0.0.1:{self._port}/{database}"

    def create(self, database: str) -> str:
        """A new database's URL."""
        import psycopg

        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        import psycopg

        words = [self._bin / "postgres", "-D", self._home / "data", "-p", str(self._port), "-k", self._home]
        words += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(words, user=self._user, cwd=self._home, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self._dsn("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None and time.monotonic() < deadline, (self._home / "log").read_text()
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server at once: connections are dropped, transactions rolled back."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None

    def _dsn(self, database: str) -> str:
        return f"postgresql://postgres:hunter2@127.0.0.1:{self._port}/{database}"


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
