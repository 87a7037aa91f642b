"""A run's metrics for Weights & Biases; W&B neither delays a run nor makes it fail.

Compute nodes have no network: they go into wandb/ of the run directory, from where `wandb
sync` takes them, unless WANDB_MODE says otherwise.
"""

import importlib.util
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import ConfigError
from hpc_tune.log import log

FOLDER, ID_FILE = "wandb", "run-id"
_LIMIT_S = 60.0  # for W&B to begin, and at the end to send what is left


def require_wandb(wanted: bool) -> None:
    """Check that W&B can be had where it is asked for, before anything takes time.

    Raises:
        ConfigError: if it is not installed.
    """
    if wanted and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "run.wandb=true needs wandb, which is not installed; pip install 'hpc_tune[wandb]', or "
            "remove run.wandb"
        )


class WandbLog:
    """One W&B run per run directory: a resumed run continues it."""

    def __init__(self, run_dir: Path, run: RunSettings, settings: dict[str, Any]) -> None:
        """Open it; ``settings`` is the whole configuration, dumped.

        Raises:
            ConfigError: if wandb refuses.
        """
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hpc_tune"),
                dir=run_dir,
                id=_run_id(run_dir / FOLDER / ID_FILE),
                resume=None if mode == "offline" else "allow",
                name=run.name or run_dir.absolute().name,
                tags=run.tags,
                config=settings,
                mode=mode,  # type: ignore[arg-type]
                settings=wandb.Settings(
                    init_timeout=_LIMIT_S, finish_timeout=_LIMIT_S, console="off", silent=True
                ),
            )
        except (wandb.Error, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"run.wandb=true: W&B refuses with WANDB_MODE={mode}: {reason}; unset WANDB_MODE "
                "to write files for `wandb sync`, or remove run.wandb"
            ) from None
        self._folder = Path(self._run.dir).parent
        if mode == "offline":
            log.info("wandb   offline; where there is a network: wandb sync %s", self._folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the values of one step by name; warn once if W&B refuses them."""
        if self._run is None:
            return
        try:
            self._run.log({**scalars, "step": step}, step=step)
        except Exception as error:  # any of a library that runs beside the run
            log.warning("W&B logging stopped: %s", error)
            self._run = None

    def close(self) -> None:
        """Send what is left."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # as above
            log.warning("W&B upload is incomplete: %s; run wandb sync %s", error, self._folder)
        self._run = None


def _run_id(file: Path) -> str:
    """Return the run directory's W&B id, made at its first start."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
