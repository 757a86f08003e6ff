"""What the kernel counts: memory of this process, bytes on the network of this machine."""

from pathlib import Path

__all__ = ["network_bytes", "pss_bytes"]


def pss_bytes() -> int | None:
    """Resident memory of this process now, pages that n processes share counted as 1/n.

    `None` where the system cannot tell.
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:  # not Linux, or before 4.14
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def network_bytes() -> int | None:
    """Bytes that all network interfaces of this machine (loopback, too) have sent so far.

    Headers and acknowledgements included. `None` where the system cannot tell.
    """
    try:
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    # `name: 8 numbers received, 8 numbers sent`, bytes first; two lines of titles
    return sum(int(line.rpartition(":")[2].split()[8]) for line in lines[2:])
