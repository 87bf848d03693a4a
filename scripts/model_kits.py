"""Model folders without weights, of real open models, out of published packages.

    python scripts/model_kits.py                     makes all, in the cache folder
    python scripts/model_kits.py FOLDER --only qwen3,glm-4.7
    python scripts/model_kits.py --list
    python scripts/model_kits.py --fetch             fetches what the kits on GPT-2's vocabulary are made of

The packages (90 MB) have chat templates, vocabularies and control tokens. `pip download` fetches them, and they
are kept beside the folders; git keeps nothing of them. The families are in `kit_families.json`: a marker in a list
of its own is an added token that is not special. `kit.json` in a folder says what is real: a family whose
vocabulary no package has stands on GPT-2's, so its text is the model's and its ids are not. Each further template
of TRL is a kit `trl-NAME` on GPT-2's vocabulary, with the markers that it writes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit_vocabularies import QUICKTOK_PACKAGE, Spec, Vocabulary, vocabulary

FAMILIES = Path(__file__).with_name("kit_families.json")
LLAMA_CPP_PACKAGE = "llama-cpp-python==0.3.36"
TRL_PACKAGE = "trl==1.16.0"
TRL_TEMPLATES = "trl/chat_templates/"
STAND_IN = "gpt2"
_LLAMA_CPP_FILES = re.compile(
    r"[^/]+/vendor/llama\.cpp/models/(templates/.*\.jinja|ggml-vocab-(qwen2|llama-bpe|gemma-4|command-r|phi-3|gpt-2)\.gguf)"
)
_MARKER = re.compile(r"<[|｜][^<>|｜{}\s]+[|｜]>|<(?:start|end)_[a-z_]+>")
_PIP_OPTIONS = {
    LLAMA_CPP_PACKAGE: ("--no-binary", ":all:"),
    QUICKTOK_PACKAGE: (  # a compiled wheel; only its data is read, so that of one platform serves all
        *("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"),
        *("--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"),
    ),
}


class KitError(Exception):
    """A kit that cannot be made: an unknown name, or a package that cannot be had."""


def cache_folder() -> Path:
    """The folder of the kits and of their packages. TURNSTILE_MODEL_KITS names another."""
    if chosen := os.environ.get("TURNSTILE_MODEL_KITS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile" / "model-kits"


@dataclass(frozen=True)
class Family:
    """A family of models: its template, its vocabulary, and the control tokens behind those of the vocabulary.

    ``first_id`` is the id of the first of these markers; without it they follow the vocabulary. ``own_ids``: the
    ids of the control tokens are the model's own."""

    template: str
    vocabulary: str
    model_type: str
    eos: tuple[str, ...]
    own_ids: bool
    markers: tuple[tuple[str, bool], ...] = ()
    first_id: int | None = None
    bos: str | None = None
    note: str = ""


def families() -> dict[str, Family]:
    """The families of `kit_families.json` by name."""
    read = json.loads(FAMILIES.read_text(encoding="utf-8"))
    sets = {
        name: tuple((each, True) if isinstance(each, str) else (each[0], False) for each in given)
        for name, given in read["markers"].items()
    }
    return {
        name: Family(**row | {"eos": tuple(row["eos"]), "markers": sets.get(row.get("markers"), ())})
        for name, row in read["families"].items()
    }


class Packages:
    """The packages that the kits are made of, each fetched when it is first needed and kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._vocabularies: dict[str, Vocabulary] = {}

    def fetch(self) -> None:
        """Fetch what the kits on a stand-in vocabulary are made of."""
        for requirement in (LLAMA_CPP_PACKAGE, TRL_PACKAGE):
            self._path(requirement)

    def wheel(self, requirement: str, inside: str) -> bytes:
        with zipfile.ZipFile(self._path(requirement)) as archive:
            return archive.read(inside)

    def llama_cpp(self, inside: str) -> bytes:
        return self._llama_cpp_files[inside]

    def trl_templates(self) -> dict[str, str]:
        """TRL's chat templates by name."""
        with zipfile.ZipFile(self._path(TRL_PACKAGE)) as archive:
            return {
                Path(each).stem: archive.read(each).decode()
                for each in sorted(archive.namelist())
                if each.startswith(TRL_TEMPLATES) and each.endswith(".jinja")
            }

    def template(self, source: str) -> str:
        """The template that a family names as `lcp:NAME` (llama.cpp's) or `trl:NAME`."""
        package, _, name = source.partition(":")
        if package == "lcp":
            return self.llama_cpp(f"templates/{name}.jinja").decode()
        return self.wheel(TRL_PACKAGE, f"{TRL_TEMPLATES}{name}.jinja").decode()

    def vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            self._vocabularies[name] = vocabulary(name, self)
        return self._vocabularies[name]

    @functools.cached_property
    def _llama_cpp_files(self) -> dict[str, bytes]:
        """All that is needed of the source package, read at once: a compressed archive has no index."""
        files = {}
        with tarfile.open(self._path(LLAMA_CPP_PACKAGE)) as archive:
            for member in archive:
                wanted = _LLAMA_CPP_FILES.fullmatch(member.name)
                if wanted and (read := archive.extractfile(member)):
                    files[wanted[1]] = read.read()
        return files

    def _path(self, requirement: str) -> Path:
        if found := self._kept(requirement):
            return found[0]
        self._folder.mkdir(parents=True, exist_ok=True)
        options = _PIP_OPTIONS.get(requirement, ("--only-binary", ":all:"))
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, requirement]
        # Of two processes that fetch at once each moves a whole file into its place.
        with tempfile.TemporaryDirectory(dir=self._folder) as fetched:
            done = subprocess.run([*command, "-d", fetched], check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise KitError(
                    f"pip cannot fetch {requirement}, which model kits are made of: {done.stderr.strip()}"
                )
            for each in Path(fetched).iterdir():
                each.replace(self._folder / each.name)
        if found := self._kept(requirement):
            return found[0]
        raise KitError(f"pip download of {requirement} left no file of that name in {self._folder}")

    def _kept(self, requirement: str) -> list[Path]:
        name, _, version = requirement.partition("==")
        stem = name.replace("-", "[-_]")
        found = self._folder.glob(f"{stem}-{version}*")
        return [each for each in found if each.name.endswith((".whl", ".tar.gz"))]


class Kits:
    """Model folders in ``folder``. One that is there is complete, and is not made again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = Packages(folder / ".packages")

    @functools.cached_property
    def families(self) -> Mapping[str, Family]:
        """All families, with a `trl-NAME` for each template of TRL that no other family has."""
        own = families()
        taken = {self.packages.template(each.template) for each in own.values()}
        further = self.packages.trl_templates().items()
        return own | {
            f"trl-{name}": stand_in_family(f"trl:{name}", text, own.values())
            for name, text in further
            if text not in taken
        }

    def make(self, name: str) -> Path:
        """The folder of a kit, made where it is not there yet."""
        folder = self.folder / name
        if folder.is_dir():
            return folder
        own = families()
        family = own.get(name) or self.families.get(name)
        if family is None:
            raise KitError(f"There is no model kit {name}; there are {', '.join(self.families)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.folder))
        try:
            write_kit(made, name, family, self.packages)
            made.chmod(0o755)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return folder


def stand_in_family(source: str, template: str, known: Iterable[Family]) -> Family:
    """A family for a template alone: the control tokens of the nearest known one, and those that it writes."""

    def shared(family: Family) -> int:
        texts = {text for text, _ in family.markers} | {family.bos or family.eos[0], *family.eos}
        return sum(text in template for text in texts)

    nearest = max(known, key=shared)
    markers = dict(nearest.markers)
    for text in (*([nearest.bos] if nearest.bos else []), *nearest.eos, *_MARKER.findall(template)):
        markers.setdefault(text, True)
    return Family(
        source, STAND_IN, nearest.model_type, nearest.eos, False, tuple(markers.items()), None, nearest.bos
    )


def with_added_tokens(family: Family, source: Vocabulary) -> tuple[Spec, dict[str, int]]:
    """The `tokenizer.json` of a family, and the ids of its control tokens."""
    spec, given = source
    tokens = {number: (text, special) for number, text, special in given}
    known = {text for text, _ in tokens.values()}
    last = max([*spec["model"]["vocab"].values(), *tokens])
    start = last + 1 if family.first_id is None else family.first_id
    added = [each for each in family.markers if each[0] not in known]
    tokens |= {start + n: marker for n, marker in enumerate(added)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    entries = [
        {"id": number, "content": text, **flags, "special": special}
        for number, (text, special) in sorted(tokens.items())
    ]
    ids = {text: number for number, (text, _) in tokens.items()}
    model = spec["model"]
    if min(ids.values()) == 0:  # `tokenizers` numbers added tokens anew unless the vocabulary has them
        first = {text: number for text, number in ids.items() if number < 1000}
        model = model | {"vocab": first | model["vocab"]}
    return spec | {"added_tokens": entries, "model": model}, ids


def write_kit(folder: Path, name: str, family: Family, packages: Packages) -> None:
    """Write the files of a model folder that a server reads, but no weights."""
    spec, ids = with_added_tokens(family, packages.vocabulary(family.vocabulary))
    size = max([*spec["model"]["vocab"].values(), *ids.values()]) + 1
    files: dict[str, Any] = {
        "tokenizer.json": spec,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": family.bos,
            "eos_token": family.eos[0],
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
        },
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": family.model_type,
            "vocab_size": -(-size // 64) * 64,
            "max_position_embeddings": 131072,
            # Without a recent version transformers warns of a wrong regular expression in local folders.
            "transformers_version": "5.0.0",
            "bos_token_id": ids[family.bos] if family.bos else None,
            "eos_token_id": ids[family.eos[0]],
        },
        "generation_config.json": {
            "eos_token_id": [ids[each] for each in family.eos],
            **({"bos_token_id": ids[family.bos]} if family.bos else {}),
        },
        "kit.json": {
            "family": name,
            "template": family.template,
            "vocabulary": "stand-in: GPT-2" if family.vocabulary == STAND_IN else f"own, from {family.vocabulary}",
            "ids": family.own_ids,
            "note": family.note,
        },
    }
    for file, value in files.items():
        text = json.dumps(value, ensure_ascii=False, indent=None if file == "tokenizer.json" else 1)
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_bytes(packages.template(family.template).encode())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, help="default: the cache folder")
    arguments.add_argument("--only", help="the kits to make, separated by commas")
    arguments.add_argument(
        "--fetch", action="store_true", help="fetch llama.cpp's and TRL's packages, make no kit"
    )
    arguments.add_argument("--list", action="store_true", help="print the kits and make none")
    chosen = arguments.parse_args()
    kits = Kits(chosen.folder or cache_folder())
    if chosen.list:
        for name, family in kits.families.items():
            print(f"{name:24} {family.template:60} {family.vocabulary:10} {family.note}")
        return
    try:
        if chosen.fetch:
            kits.packages.fetch()
            return
        for name in chosen.only.split(",") if chosen.only else kits.families:
            print(kits.make(name), flush=True)
    except KitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
