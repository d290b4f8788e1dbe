"""``nlac``: LightningCLI's fit, validate, test and predict, and a few small commands."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings

from nlac_lightning.commands import COMMANDS
from nlac_lightning.errors import ConfigError, StoppedRun
from nlac_lightning.report.text import SafeFormatter


def main(argv: list[str] | None = None) -> None:
    """The ``nlac`` command. A wrong setting ends it with status 2 and one message."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _set_up_logging()
    try:
        if arguments and arguments[0] in COMMANDS:
            COMMANDS[arguments[0]](arguments[1:])
        else:
            run_trainer(arguments)
    except ConfigError as error:
        sys.exit(_failed(str(error), 2))
    except KeyboardInterrupt:
        sys.exit(_failed("interrupted", 130))
    except Exception as error:
        wrong = _wrapped_config_error(error)
        if wrong is not None:
            sys.exit(_failed(str(wrong), 2))
        if not _is_users(error):
            raise
        sys.exit(_failed(". Fix: ".join([str(error), *getattr(error, "__notes__", ())]), 1))


def _failed(message: str, status: int) -> int:
    print(f"nlac: {message}", file=sys.stderr)
    return status


def _wrapped_config_error(error: BaseException | None) -> ConfigError | None:
    """The setting at fault, where a library has wrapped the error in one of its own."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _is_users(error: Exception) -> bool:
    """Whether the message alone says what to do, so that a traceback would only hide it."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(error, OSError) and error.errno in NO_SPACE:
        error.add_note("free space on the disk, then continue with --ckpt_path last")
        return True
    return isinstance(error, MisconfigurationException | StoppedRun | UserWarning)


def run_trainer(arguments: list[str]) -> None:
    """Run LightningCLI with config names resolved."""
    from nlac_lightning.lightning_cli import NLACCommandLine

    NLACCommandLine.run_from(with_config_paths(arguments))


def with_config_paths(arguments: list[str]) -> list[str]:
    """Replace the names after ``--config`` by paths, so that packaged configs work anywhere."""
    from nlac_lightning.configs_path import find_config

    out = list(arguments)
    for i, word in enumerate(out):
        if word.startswith(("--config=", "-c=")):
            flag, _, name = word.partition("=")
            out[i] = f"{flag}={find_config(name)}"
        elif i and out[i - 1] in ("--config", "-c"):
            out[i] = str(find_config(word))
    return out


def _set_up_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("nlac_lightning").setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses an optional kernel
    logging.getLogger("lightning").propagate = False  # it has a handler of its own
    for pattern in (
        ".*does not have many workers.*",
        ".*module\\(s\\) in eval mode at the start of training.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*`is_gradient_checkpointing` is deprecated.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*LightningCLI's args parameter is intended to run from within Python.*",
        ".*Using ModelCheckpoint with manual optimization.*",  # the state after a step is meant
    ):
        warnings.filterwarnings("ignore", pattern)
    # --ckpt_path last that finds nothing must not start a new run instead
    warnings.filterwarnings("error", ".*there is no last checkpoint available.*")


if __name__ == "__main__":
    main()
