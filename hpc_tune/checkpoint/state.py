"""What a checkpoint's manifest holds besides tensors, and which parts must match on resume.

``SettingMetadata.resume`` says for each setting whether a resumed run may change it.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from hpc_tune.config.load import setting_metadata, setting_names
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.section import ResumeRule, flatten_settings
from hpc_tune.errors import CheckpointError, ConfigError
from hpc_tune.log import log
from hpc_tune.rundir import facts

Settings = dict[str, dict[str, Any]]  # a dumped configuration
OTHER_WEIGHTS = "it has other weights than the checkpoint's model, of the same names and shapes"


@dataclass(frozen=True)
class Evals:
    """The first, the newest and the best evaluation of a run, each as (step, mean loss).

    ``since_best``: the number of evaluations after the best one. ``chosen``: for preferences, the
    log-probabilities of chosen answers in the newest evaluations, as far back as each one fell.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None
    best: tuple[int, float] | None = None
    since_best: int = 0
    chosen: facts.FallingLogProbs = ()

    def with_eval(self, step: int, loss: float, chosen: float | None = None) -> "Evals":
        """Return the record with one more evaluation; a non-finite loss is never the best.

        ``chosen``: for preferences, the log-probability of chosen answers.
        """
        new_eval, best, since_best = (step, loss), self.best, self.since_best + 1
        if math.isfinite(loss) and (best is None or loss < best[1]):
            best, since_best = new_eval, 0
        streak = () if chosen is None else facts.extend_falling_streak(self.chosen, chosen)
        return Evals(self.first or new_eval, new_eval, best, since_best, streak)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Evals":
        """Return the record that was saved as ``values``, in JSON types.

        Raises:
            ValueError: if fields are unknown or have another type.
        """
        return _EVALS.validate_python(values)

    def loss_at(self, step: int) -> float | None:
        """Return the loss of the newest evaluation if it was at this step."""
        return self.last[1] if self.last is not None and self.last[0] == step else None


@dataclass(frozen=True)
class RunState:
    """Everything that the next step depends on, except tensors. All JSON types.

    Randomness needs no state: order, new adapters and dropout follow from the seed and the row.
    ``micro_size`` is kept so that a resume in the same layout is bitwise the same.
    ``governor``: the governor's actions in effect, in order.
    ``eval_loss``: the held-out loss at this step, if it was measured. ``model_sample``: a hash over
    values of the base, if a resumed run needs the base. ``experts``: for a mixture of experts,
    which parts are trained. ``held_out``: a hash of the held-out data, empty if unknown. ``start``:
    a hash of the adapter that the reference model for preferences started from; empty if it was the
    base alone, None if there is no reference or it is unknown. ``scaled_for``: the text length in
    tokens for which the rotary positions of all texts are scaled, if scaling would otherwise depend
    on each text's length.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    total_steps: int
    model_identity: str
    loader: dict[str, Any]
    layout: dict[str, int]
    micro_size: int
    config: Settings
    eval_loss: float | None = None
    evals: dict[str, Any] = field(default_factory=dict)
    governor: list[str] = field(default_factory=list)
    model_sample: str = ""
    experts: str = ""
    held_out: str = ""
    start: str | None = None
    scaled_for: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], checkpoint_name: str) -> "RunState":
        """Return the state of a manifest.

        Raises:
            CheckpointError: if fields are missing, unknown or of another type.
        """
        try:
            state: RunState = _RUN_STATE.validate_python(values)
            Evals.from_json(state.evals)
            return state
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{checkpoint_name}: its state cannot be used: {reason}"
            ) from None

    def has_other_weights(self, model_sample: str) -> bool:
        """Return whether a base with this ``model_sample`` has other values than this state's base.

        False if either is unknown (empty), since earlier versions saved none.
        """
        return "" not in (model_sample, self.model_sample) and model_sample != self.model_sample

    def run_config(self, checkpoint_name: str) -> RunConfig:
        """Return the configuration that the state was saved with, without removed settings.

        ``checkpoint_name`` names the checkpoint in messages.

        Raises:
            CheckpointError: if this version cannot read it.
        """
        names = set(setting_names())
        known_settings = {
            section: {key: v for key, v in fields.items() if f"{section}.{key}" in names}
            for section, fields in self.config.items()
        }
        if removals := flatten_settings(self.config).keys() - names:
            log.warning(
                "%s: removed settings are ignored: %s", checkpoint_name, ", ".join(sorted(removals))
            )
        try:
            return RunConfig.model_validate(known_settings)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{checkpoint_name}: its configuration cannot be used: {reason}"
            ) from None


# Made once: constructing an adapter takes ten times as long as one validation.
_EVALS, _RUN_STATE = TypeAdapter(Evals), TypeAdapter(RunState)


def check_resume(
    saved_state: RunState,
    settings: Settings,
    model_identity: str,
    total_steps: int,
    model_sample: str = "",
) -> list[str]:
    """Return warnings for a resume of ``saved_state`` with ``settings``, a dumped configuration.

    ``model_identity`` and ``model_sample``: ``hash_architecture`` and ``fingerprint_weights`` of
    the base.

    Raises:
        ConfigError: lists every difference that is not allowed.
    """
    mismatch = (
        "" if saved_state.model_identity == model_identity else "it is not the checkpoint's model"
    )
    if not mismatch and saved_state.has_other_weights(model_sample):
        mismatch = f"{OTHER_WEIGHTS}, as a model and its instruct version have"
    require_same_settings(saved_state, settings, mismatch)
    warnings = _list_changes(saved_state, settings, "warn")
    if saved_state.total_steps != total_steps:
        warnings.append(
            f"the run has {total_steps} steps now and had {saved_state.total_steps}: "
            "the learning rate follows the new length"
        )
    return warnings


def require_same_settings(
    saved_state: RunState, settings: Settings, model_difference: str = ""
) -> None:
    """Refuse a resume of ``saved_state`` if ``settings`` that must match differ.

    ``model_difference`` says how the model differs; empty if it does not, or is not loaded yet.

    Raises:
        ConfigError: lists every difference that is not allowed.
    """
    differences = [f"model.path: {model_difference}"] if model_difference else []
    differences += _list_changes(saved_state, settings, "same")
    if differences:
        raise ConfigError(
            "the checkpoint belongs to a different run and cannot be resumed:\n"
            + "\n".join(f"  - {line}" for line in differences)
            + "\nUse the old values, or another run.dir."
        )


def _list_changes(saved_state: RunState, settings: Settings, kind: ResumeRule) -> list[str]:
    # A setting that an earlier version lacked counts as having its default.
    saved_values, new_values = (
        flatten_settings(RunConfig().model_dump()) | flatten_settings(saved_state.config),
        flatten_settings(settings),
    )
    return [
        f"{name}: {saved_values[name]} in the checkpoint, {new_values[name]} now"
        for name, facts in setting_metadata().items()
        if facts.resume == kind
        and _normalize(saved_values[name], facts.unordered)
        != _normalize(new_values[name], facts.unordered)
    ]


def _normalize(value: Any, unordered: bool) -> Any:
    """Return a form that is equal for equivalent values: lists without order become sets."""
    return set(value) if unordered and isinstance(value, list | tuple) else value
