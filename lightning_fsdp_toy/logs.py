"""Where the log lines of a job's ranks go, and which of other libraries are left out."""

import logging
import logging.config
import warnings
from typing import Any

__all__ = ["log_files", "log_to_files", "set_up_logging"]

_NOISE = (  # warnings that nobody who runs a job can act on
    r".*does not have many workers",
    r".*is smaller than the logging interval",
    r".*isinstance\(treespec, LeafSpec\)",
    r".*The dirpath has changed from",
    r".*exists and is not empty",
    r".*torch\.distributed\.nn\.functional\.all_gather is deprecated",
    r".*`_get_pg_default_device` will be deprecated",
    r".*FSDP\.state_dict_type\(\) and FSDP\.set_state_dict_type\(\) are being deprecated",
)


def set_up_logging(rank: int, job_logging: dict[str, Any] | None) -> None:
    """Send logs and warnings of rank 0 where `job_logging` says, those of others to stderr.

    Args:
        rank: The rank; lines of ranks other than 0 bear it.
        job_logging: For `logging.config.dictConfig`; None: warnings to stderr.
    """
    if rank == 0 and job_logging is not None:
        logging.config.dictConfig(job_logging)
    else:
        form = f"[rank {rank}][%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
        level = logging.WARNING if rank == 0 else logging.INFO
        logging.basicConfig(level=level, format=form, force=True)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        library = logging.getLogger(name)
        library.handlers.clear()  # they print on the terminal whatever the level
        library.propagate = True
    logging.captureWarnings(True)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)


def log_files() -> list[str]:
    """Return the files that this process's log goes to."""
    return [handler.baseFilename for handler in _file_handlers()]


def log_to_files(text: str) -> None:
    """Log an error to this process's log files, not to the terminal."""
    logger = logging.getLogger(__name__)
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (), None)
    for handler in _file_handlers():
        handler.handle(record)


def _file_handlers() -> list[logging.FileHandler]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, logging.FileHandler)]
