"""New weights for an SGLang server: from a folder, from tensors, from a process group, by CUDA handles; LoRA
adapters.

The order of each way, and the traps of SGLang 0.5.23 that it avoids, are written here once. What must hold:

- Tensors that do not fit the model are refused before the server is asked, where its folder can be read from here:
  the server would die of a wrong shape or a file that is cut short, skip unknown names without an error, and mix a
  part of the weights with the old ones.
- The prefix cache is emptied with every update, except one ``in_place``, whose calls keep theirs: asked to empty
  it then, SGLang answers 400 though it has replaced the weights.
- The version is read back and compared. From the first piece of an update until its end the server calls its
  weights ``unknown``, so that a trainer, or a server, that dies meanwhile leaves no mixture under a good name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio

from turnstile.models import PauseMode
from turnstile_server.engines.replies import same_folder
from turnstile_server.engines.serialized_tensors import SAFETENSORS, tensors_in_file, tensors_of
from turnstile_server.engines.sglang.calls import LiveCalls
from turnstile_server.engines.sglang.control import SGLangControl
from turnstile_server.engines.sglang.facts import ServerFacts
from turnstile_server.engines.sglang.groups import SGLangGroups
from turnstile_server.engines.tensor_shapes import TensorShapes, check_folder, check_tensors, folder_shapes
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS
from turnstile_server.engines.weights import BroadcastBucket, IpcBucket, TensorBucket, UpdateWay, WeightBucket
from turnstile_server.errors import Conflict, EngineProtocolError, EngineRefused, EngineTimeout, EngineUnavailable
from turnstile_server.settings import EngineSettings

FLUSH_ATTEMPTS: Final = 20
FLUSH_INTERVAL_S: Final = 0.1
"""Between two attempts to empty the cache: calls that were aborted need a moment to go."""

NOT_FLUSHED: Final = "Weights were updated, but the cache was not flushed"
NO_WEIGHTS: Final = "Failed to get weights iterator"
ROLLED_BACK: Final = "Rolling back to original weights"
"""SGLang says so, and loads the new folder once more (0.5.23, weight_updater.py): its weights are not known
then."""
SESSION_OPEN: Final = "session is already open"


class SGLangWeights:
    """The updates of one server, one after the other: its callers hold ``control.lock``."""

    def __init__(
        self,
        control: SGLangControl,
        calls: LiveCalls,
        groups: SGLangGroups,
        facts: ServerFacts,
        settings: EngineSettings,
    ) -> None:
        self._control = control
        self._calls = calls
        self._groups = groups
        self._facts = facts
        self._settings = settings
        self._shapes: TensorShapes | None = None
        self._shapes_read = False
        self._way: UpdateWay | None = None
        """The way of the update that has begun and not ended."""
        self._pieces = 0
        self._folder_of: dict[str, str] = {}
        """The folder of every weight version that was served since start."""

    async def from_disk(self, path: str, version: str, mode: PauseMode) -> None:
        """Pauses, loads, and reads back. The caller resumes."""
        control = self._control
        if control.asleep:
            raise EngineRefused("The engine is asleep: wake it (POST /engine/wake), then load weights.")
        await self._refuse_reused_name(path, version)
        await self._check_folder(path)
        await control.pause(mode)
        in_place = mode == "in_place"
        body = {"model_path": path, "weight_version": version}
        before, control.version = control.version, None
        try:
            await control.post(
                "/update_weights_from_disk",
                body | ({"flush_cache": False} if in_place else {}),
                self._settings.weights_timeout_s,
            )
        except EngineRefused as error:
            if NOT_FLUSHED in error.message:
                await self._finish(version, flush=True)
            elif ROLLED_BACK in error.message:
                await control.name_weights(UNKNOWN_WEIGHTS)
                raise EngineProtocolError(
                    f"The engine failed while it loaded {path}; what it serves now is not known: load weights "
                    f"again. It said: {error.message}"
                ) from error
            else:
                control.version = before
                if NO_WEIGHTS in error.message:  # SGLang takes a path that is no folder for a name on the Hub
                    raise EngineRefused(
                        f"SGLang finds no weights in {path}: PATH is a folder with *.safetensors that the "
                        f"engine's machine can read. The old weights are kept. It said: {error.message}"
                    ) from error
                raise
        except EngineTimeout as error:
            self._calls.may_be_loaded(version)
            raise EngineTimeout(
                f"The engine did not load {path} within engine.weights_timeout_s "
                f"({self._settings.weights_timeout_s:g} s), and may still do so. Its weights are unknown: ask for "
                "its state, then load again."
            ) from error
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"The engine was lost while it loaded {path}: {error.message} SGLang ends when it cannot load "
                "weights, for want of memory too (its own log says why)."
            ) from error
        self._folder_of[version] = path
        await self._served(version, in_place=in_place)

    async def begin(self, way: UpdateWay) -> None:
        if way not in self._facts.capabilities.updates or way == "disk":
            ways = ", ".join(sorted(self._facts.capabilities.updates - {"disk"})) or "none"
            raise EngineRefused(f"This engine cannot take weights in pieces by {way}; ways: {ways}.")
        if self._control.asleep:
            raise EngineRefused("The engine is asleep: wake it (POST /engine/wake), then load weights.")
        self._way, self._pieces = None, 0
        if way == "trainer":
            # The trainer may resume the engine before it is done here: what is sampled then has no name.
            self._control.version = None
            await self._control.name_weights(UNKNOWN_WEIGHTS)
        elif way != "ipc":  # by handles SGLang knows no session
            try:
                await self._control.post("/begin_weight_update", {})
            except EngineRefused as error:
                if SESSION_OPEN not in error.message:
                    raise
                await self._control.post("/end_weight_update", {})  # of an update that never ended
                await self._control.post("/begin_weight_update", {})
        self._way = way

    async def load(self, bucket: WeightBucket) -> None:
        path, body = await self._request(bucket)
        if self._pieces == 0:
            self._control.version = None
            await self._control.name_weights(UNKNOWN_WEIGHTS)
        self._pieces += 1
        try:
            # Never with each piece: the cache is emptied once, at the end.
            await self._control.post(path, body | {"flush_cache": False}, self._settings.weights_timeout_s)
        except EngineRefused as error:
            raise EngineProtocolError(
                f"The engine failed at piece {self._pieces} of new weights: {error.message} Its weights are a "
                "mixture of old and new now; they serve under no name until a whole update succeeds."
            ) from error
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"The engine was lost at piece {self._pieces} of new weights: {error.message} SGLang ends when it "
                "cannot load tensors (its own log says why)."
            ) from error
        except EngineTimeout as error:
            raise EngineTimeout(
                f"The engine did not take piece {self._pieces} of new weights within engine.weights_timeout_s "
                f"({self._settings.weights_timeout_s:g} s). Its weights are a mixture of old and new now."
            ) from error

    async def end(self, version: str) -> None:
        if self._way is None:
            raise Conflict("No update of weights in pieces has begun.")
        self._refuse_unknown_name(version)
        if self._way == "trainer":
            self._way = None
            await self._end_of_trainers(version)
            return
        if self._pieces == 0:
            raise Conflict(f"No piece of the weights {version!r} came: the old ones are served.")
        way, self._way = self._way, None
        if way != "ipc":
            await self._control.post("/end_weight_update", {}, self._settings.weights_timeout_s)
        in_place = self._control.paused and self._control.mode == "in_place"
        await self._finish(version, flush=not in_place)
        self._folder_of.pop(version, None)
        await self._served(version, in_place=in_place)

    async def _end_of_trainers(self, version: str) -> None:
        """The trainer's weights are there. Raises EngineProtocolError where it named them otherwise."""
        control = self._control
        said = await control.served_version()
        if said not in (None, version):
            raise EngineProtocolError(
                f"The trainer gave the engine weights that it names {said!r}, and the update is of {version!r}. "
                "Give both the same name, then load weights again.",
                detail={"engine_weight_version": said},
            )
        await control.pause(control.mode)  # the trainer may have resumed it, and a cache in use is not emptied
        await self._finish(version, flush=True)
        self._folder_of.pop(version, None)
        await self._served(version, in_place=False)

    async def load_adapter(self, name: str, path: str) -> None:
        self._needs_adapters()
        await self._control.post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": path}, self._settings.weights_timeout_s
        )

    async def unload_adapter(self, name: str) -> None:
        self._needs_adapters()
        try:
            await self._control.post("/unload_lora_adapter", {"lora_name": name}, self._settings.weights_timeout_s)
        except EngineRefused as error:
            if "does not exist" not in error.message:
                raise

    def _needs_adapters(self) -> None:
        if not self._facts.capabilities.adapters:
            raise EngineRefused(
                "This SGLang takes no LoRA adapters: start it with --enable-lora --max-lora-rank N "
                "--lora-target-modules all."
            )

    async def _request(self, bucket: WeightBucket) -> tuple[str, dict[str, Any]]:
        """The endpoint and body for one piece. Raises EngineRefused for one that cannot be loaded, unasked."""
        kinds = {TensorBucket: "tensors", BroadcastBucket: "distributed", IpcBucket: "ipc"}
        if self._way != kinds[type(bucket)]:
            began = "no update has begun" if self._way is None else f"this update comes by {self._way}"
            raise Conflict(f"The piece comes by {kinds[type(bucket)]}, and {began}.")
        if isinstance(bucket, TensorBucket):
            await anyio.to_thread.run_sync(self._check_bucket, bucket)
            body = {"serialized_named_tensors": list(bucket.serialized), "load_format": bucket.load_format}
            return "/update_weights_from_tensor", body
        if isinstance(bucket, IpcBucket):
            return "/update_weights_from_ipc", {"zmq_handles": dict(bucket.handles)}
        if not self._groups.joined(bucket.group):
            raise EngineRefused(f"The engine is in no process group {bucket.group!r}: join it first.")
        if not len(bucket.names) == len(bucket.dtypes) == len(bucket.shapes) > 0:
            raise EngineRefused(
                f"The piece has {len(bucket.names)} names, {len(bucket.dtypes)} dtypes and {len(bucket.shapes)} "
                "shapes."
            )
        await self._check_tensors(list(zip(bucket.names, bucket.shapes, strict=True)))
        return "/update_weights_from_distributed", {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": bucket.group,
        }

    def _check_bucket(self, bucket: TensorBucket) -> None:
        """In a thread: a bucket may be large."""
        ranks = self._facts.tensor_parallel
        if len(bucket.serialized) != ranks:
            raise EngineRefused(
                f"The bucket is serialized for {len(bucket.serialized)} ranks; the engine has {ranks} (--tp-size)."
            )
        tensors = (
            tensors_in_file(bucket)
            if self._facts.capabilities.tensor_format == SAFETENSORS
            else tensors_of(bucket)
        )
        shapes = self._model_shapes()
        if shapes is not None:
            check_tensors(tensors, shapes)

    async def _check_tensors(self, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
        shapes = await anyio.to_thread.run_sync(self._model_shapes)
        if shapes is not None:
            check_tensors(tensors, shapes)

    async def _check_folder(self, path: str) -> None:
        def check() -> None:
            shapes = None if self._facts.checks_folders else self._model_shapes()
            if shapes is not None and Path(path).is_dir():
                check_folder(Path(path), shapes)

        await anyio.to_thread.run_sync(check)

    def _model_shapes(self) -> TensorShapes | None:
        """The tensor shapes of the model that the server started with; None where they cannot be known."""
        if not self._settings.check_weights or self._facts.quantized:
            return None  # quantised layers take tensors of other shapes than they have on disk
        if not self._shapes_read:
            self._shapes, self._shapes_read = folder_shapes(Path(self._facts.model_path)), True
        return self._shapes

    async def _refuse_reused_name(self, path: str, version: str) -> None:
        self._refuse_unknown_name(version)
        info = await self._control.get("/model_info")
        self._folder_of.setdefault(str(info.get("weight_version")), str(info.get("model_path")))
        known = self._folder_of.get(version)
        if known is not None and not same_folder(known, path):
            raise Conflict(f"the weight version {version!r} names other weights already; give each its own name")

    def _refuse_unknown_name(self, version: str) -> None:
        if version == UNKNOWN_WEIGHTS:
            raise Conflict(f"{UNKNOWN_WEIGHTS!r} is what weights without a name are called; take another name.")

    async def _finish(self, version: str, *, flush: bool) -> None:
        """The new weights are there: empties the cache, then names them."""
        if flush:
            for attempt in range(FLUSH_ATTEMPTS):
                try:
                    await self._control.drop_cache()
                    break
                except EngineRefused as error:
                    if attempt + 1 == FLUSH_ATTEMPTS:
                        raise EngineProtocolError(
                            f"The engine has the weights {version!r}, and keeps a prefix cache of older ones: "
                            f"{error.message} Pause it (retract), then load the weights again."
                        ) from error
                    await anyio.sleep(FLUSH_INTERVAL_S)
        await self._control.name_weights(version)

    async def _served(self, version: str, *, in_place: bool) -> None:
        await self._control.confirm(version)
        if in_place and self._facts.keeps_cache_in_place:
            self._control.keeps_old_cache = True
            self._control.prefix_keys.loaded_in_place()
            self._calls.loaded_in_place(version, self._facts.prefill_tokens)
        elif not in_place:
            self._control.keeps_old_cache = False
