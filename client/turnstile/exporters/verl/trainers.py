"""verl's v1 trainers with estimators that count rollouts. Importing this registers them, in verl's processes by
``VERL_USE_EXTERNAL_MODULES=turnstile.exporters.verl.trainers``:

    trainer.v1.trainer_mode=turnstile_sync  (turnstile_colocate_async, turnstile_separate_async)
    algorithm.adv_estimator=turnstile_rloo  (``turnstile.exporters.verl.advantages.ESTIMATORS``)
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from turnstile.exporters.verl.advantages import keys_of_rows


def counting_rollouts(trainer: Any, mode: str) -> Any:
    """A subclass of verl's ``trainer`` of this mode, that tells estimators the keys of their rows."""

    class CountsRollouts(trainer):  # type: ignore[misc]  # a class that is given
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            # verl looks its options up by this name.
            config.trainer.v1.trainer_mode = mode
            super().__init__(config, *args, **kwargs)

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            with keys_of_rows(batch.keys):
                return super()._compute_advantage(batch, metrics)

    return CountsRollouts


for _mode, _trainer in {
    "sync": PPOTrainerSync,
    "colocate_async": PPOTrainerColocateAsync,
    "separate_async": PPOTrainerSeparateAsync,
}.items():
    register_trainer(f"turnstile_{_mode}")(counting_rollouts(_trainer, _mode))
