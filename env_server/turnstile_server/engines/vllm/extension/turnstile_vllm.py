"""Worker extension for a vLLM server whose weights Turnstile replaces (vllm 0.32, CPU and GPU workers).

Runs inside vLLM's workers, so it imports nothing of Turnstile. Start vLLM with this file's folder on PYTHONPATH
and ``--worker-extension-cls turnstile_vllm.LoadFolder``. ``POST /collective_rpc`` then calls the methods of
``LoadFolder`` on every worker; each answers ``{"ok": true, ...}`` or ``{"ok": false, "error": "...", "broken":
…}``.

What must hold: nothing of the model is touched before the names, shapes and dtypes of all new tensors are those
of the folder that vLLM was started with. vLLM's own ``reload_weights`` does not look: a missing folder or a wrong
shape ends the engine, a missing tensor leaves a mixture, and on a CPU a tied output layer keeps the old weights.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

REVISION = 1
"""Raised with every change of what the methods take or answer; Turnstile compares it at start."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""vLLM turns these into the dtype that it serves, so one may come for another. Quantised ones must be equal."""

Layout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor by name."""


class LoadFolder:
    """Methods that vLLM adds to its worker class. Their names must not be those of a worker's own methods."""

    def turnstile_status(self) -> dict[str, Any]:
        """``path``: the folder last loaded, the start folder before. ``broken``: a load failed half-way."""
        state = _state(self)
        return {"ok": True, "revision": REVISION, "path": state.path, "broken": state.broken}

    def turnstile_check_folder(self, path: str) -> dict[str, Any]:
        """Checks that the folder can be loaded; changes nothing."""
        return _answer(self, lambda state: _checked(state, _layout_of_folder(path), path))

    def turnstile_load_folder(self, path: str) -> dict[str, Any]:
        """Loads the folder, after the same check."""

        def load(state: _State) -> dict[str, Any]:
            found = _checked(state, _layout_of_folder(path), path)
            _replace(self, state, path, weights_path=path)
            return found

        return _answer(self, load)

    def turnstile_begin(self) -> dict[str, Any]:
        """Forgets tensors that were added and not loaded."""

        def begin(state: _State) -> dict[str, Any]:
            state.added.clear()
            return {}

        return _answer(self, begin)

    def turnstile_add(self, tensors: str) -> dict[str, Any]:
        """Keeps tensors until ``turnstile_load_added``. ``tensors``: base64 of the bytes of a safetensors file."""

        def add(state: _State) -> dict[str, Any]:
            from safetensors.torch import load  # noqa: PLC0415 - a library of vLLM's environment

            added = load(base64.b64decode(tensors, validate=True))
            twice = sorted(added.keys() & state.added.keys())
            if twice:
                raise ValueError(f"tensors came twice: {twice[:5]}")
            state.added.update(added)
            return {"tensors": len(state.added)}

        return _answer(self, add)

    def turnstile_check_added(self) -> dict[str, Any]:
        """Checks that the tensors that were added are the whole model; changes nothing."""
        return _answer(self, lambda state: _checked(state, _layout_of_tensors(state.added), "the tensors sent"))

    def turnstile_load_added(self) -> dict[str, Any]:
        """Loads the tensors that were added, after the same check, and forgets them."""

        def load(state: _State) -> dict[str, Any]:
            found = _checked(state, _layout_of_tensors(state.added), "the tensors sent")
            added, state.added = state.added, {}
            _replace(self, state, "", weights_iterator=iter(added.items()))
            return found

        return _answer(self, load)


class _State:
    """The state that one worker keeps between calls."""

    def __init__(self, start_folder: str) -> None:
        self.path = start_folder
        self.expected = _layout_of_folder(start_folder)
        self.broken = False
        self.added: dict[str, Any] = {}


def _state(worker: Any) -> _State:
    """Made at the first call, which Turnstile makes at its start: a load changes the folder in vLLM's settings."""
    state: _State | None = vars(worker).get("_turnstile_state")
    if state is None:
        state = worker._turnstile_state = _State(str(worker.vllm_config.model_config.model))
    return state


def _answer(worker: Any, act: Any) -> dict[str, Any]:
    """An exception that leaves a worker would end the engine, so every one becomes an answer."""
    try:
        state = _state(worker)
    except Exception as error:  # noqa: BLE001
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "broken": False}
    try:
        return {"ok": True, **act(state), "broken": state.broken}
    except Exception as error:  # noqa: BLE001
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "broken": state.broken}


def _checked(state: _State, new: Layout, source: str) -> dict[str, Any]:
    """Raises ValueError, naming some of the tensors that are missing, new, or of another shape or dtype."""
    expected = state.expected
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - new.keys())]
    wrong += [f"{name} is not of this model" for name in sorted(new.keys() - expected.keys())]
    for name in sorted(new.keys() & expected.keys()):
        (shape, dtype), (old_shape, old_dtype) = new[name], expected[name]
        if shape != old_shape:
            wrong.append(f"{name} has shape {list(shape)}, not {list(old_shape)}")
        elif dtype != old_dtype and not {dtype, old_dtype} <= FLOATS:
            wrong.append(f"{name} has dtype {dtype}, not {old_dtype}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(wrong[:5])}{more}")
    return {"tensors": len(new)}


def _replace(worker: Any, state: _State, path: str, **source: Any) -> None:
    """Until this returns the model is a mixture of old and new."""
    state.broken = True
    runner = worker.model_runner
    runner.reload_weights(**source)
    # vllm 0.32 on a CPU computes on a packed copy of each linear layer. A tied output layer has no tensor of its
    # own in the checkpoint, so reload_weights does not renew its copy.
    for module in runner.get_model().modules():
        method = vars(module).get("quant_method")
        if "cpu_linear" in vars(module) and "embedding" in dir(method):
            method.process_weights_after_loading(module)
    state.path = path
    state.broken = False


def _layout_of_folder(folder: str) -> Layout:
    from safetensors import safe_open  # noqa: PLC0415 - a library of vLLM's environment

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there is no *.safetensors in {folder}")
    layout: Layout = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:  # refuses a file that is cut short
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                piece = tensors.get_slice(name)
                layout[name] = (tuple(piece.get_shape()), str(piece.get_dtype()))
    return layout


_TORCH_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _layout_of_tensors(tensors: dict[str, Any]) -> Layout:
    def dtype_of(tensor: Any) -> str:
        name = str(tensor.dtype).removeprefix("torch.")
        return _TORCH_NAMES.get(name, name)

    return {name: (tuple(tensor.shape), dtype_of(tensor)) for name, tensor in tensors.items()}
